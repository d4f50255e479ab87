"""Compiles every Triton kernel for a CUDA device that need not be there: compile_for_cuda.py SHAPE DTYPE {80,90}.

Prints one line a kernel: its name, the widest global load of its PTX in bytes, how often it was compiled for two
batches whose tables lie differently in memory, and the shared memory that a program takes, in bytes.
"""

import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.lora_problems import Adapter, Problem
from marlaas_kernels.triton.config import Shape, tiles_of
from marlaas_kernels.triton.op import segment_lora_, segment_lora_backward

ALL = (True,) * 3
BATCHES = ([Adapter(1, 8, targets=ALL), Adapter(3, 16, targets=ALL)], [Adapter(n, 16, targets=ALL) for n in (2, 1, 1)])


class Device:
    """What the launcher asks a driver before it compiles."""

    def __init__(self, capability):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def widest_load(ptx):
    """Bytes, e.g. 16 for ld.global.v4.b32 and for cp.async of 16 bytes."""
    loads = [int(n or 1) * int(bits) // 8 for n, bits in re.findall(r"ld\.global[\w.]*?(?:\.v(\d))?\.[bfu](\d+)", ptx)]
    return max(
        loads + [int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, 0x([\da-f]+)", ptx)]
    )


def main(shape, dtype, capability):
    compiled = {}
    run = JITFunction.run

    def compile_only(self, *args, **kwargs):
        compiled.setdefault(self.__name__, []).append(run(self, *args, **kwargs | {"warmup": True}))

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(Device(capability))
    tiles = tiles_of("cuda", shape)
    for adapters in BATCHES:
        p = Problem.random(adapters, 2048, (2048, 512, 512), dtype, tiles.tokens)
        x, y, dy, bank, gradients = (t.to("meta") for t in (p.x_TI, p.y_TO, p.dy_TO, p.bank, p.gradients))
        h = segment_lora_(y, x, bank, p.table, tiles)
        segment_lora_backward(dy, x, h, bank, p.table, gradients, p.gradient_table, tiles)
    for name, kernels in compiled.items():
        one = kernels[0]
        print(name, widest_load(one.asm["ptx"]), len(set(map(id, kernels))), one.metadata.shared)


if __name__ == "__main__":
    main(Shape(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]))
