"""Compiles every Triton kernel for a CUDA device that need not be there: python compile_for_cuda.py {decode,long} DTYPE.

Prints one line a kernel: its name, and the widest global load of its PTX in bytes.
"""

import re
import sys
from functools import partialmethod

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.lora_problems import Adapter, Problem
from marlaas_kernels.triton.config import Shape, tiles_of
from marlaas_kernels.triton.op import segment_lora_, segment_lora_backward


class Hopper:
    """What the launcher asks a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def widest_load(ptx):
    """Bytes, e.g. 16 for ld.global.v4.b32 and for cp.async of 16 bytes."""
    loads = [int(n or 1) * int(bits) // 8 for n, bits in re.findall(r"ld\.global[\w.]*?(?:\.v(\d))?\.[bfu](\d+)", ptx)]
    return max(loads + [int(size) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, 0x([\da-f]+)", ptx)])


def main(shape, dtype):
    compiled = []
    run = JITFunction.run

    def compile_only(self, *args, **kwargs):
        kwargs["warmup"] = True
        compiled.append((self.__name__, run(self, *args, **kwargs)))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(Hopper())
    tiles = tiles_of("cuda", shape)
    p = Problem.random([Adapter(1, 8, targets=(True,) * 3), Adapter(3, 16, targets=(True,) * 3)], 2048, (2048, 512, 512), dtype, tiles.tokens)
    meta = {name: value.to("meta") for name, value in vars(p).items() if isinstance(value, torch.Tensor)}
    x, y, dy, bank, gradients = (meta[k] for k in ("x_TI", "y_TO", "dy_TO", "bank", "gradients"))
    h = segment_lora_(y, x, bank, p.table, tiles)
    segment_lora_backward(dy, x, h, bank, p.table, gradients, p.gradient_table, tiles)
    for name, kernel in compiled:
        print(name, widest_load(kernel.asm["ptx"]))


if __name__ == "__main__":
    main(Shape(sys.argv[1]), getattr(torch, sys.argv[2]))
