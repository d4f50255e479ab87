"""Which kernels compute multi-LoRA over a flat bank: by the type of device, with tiles by how long the segments are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from marlaas_kernels.table import SegmentTable
from marlaas_kernels.triton.config import Shape, tiles_of

_PACKAGES = {"cuda": "marlaas[triton]", "npu": "triton-ascend"}


@dataclass(frozen=True)
class TableKernels:
    """Multi-LoRA at a fused linear, by a table whose blocks have at most `block_tokens` tokens.

    add_(y_TO, x_TI, bank, table) adds each token's delta to y and returns what the backward needs of it;
    backward(dy_TO, x_TI, that, bank, table, gradients, gradient_table) returns dx and adds to the gradients.
    """

    block_tokens: int
    add_: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SegmentTable], torch.Tensor]
    backward: Callable[..., torch.Tensor]


def table_kernels(device: torch.device, longest_segment: int) -> TableKernels | None:
    """The device's kernels for segments of up to so many tokens; None where `segments` computes them in torch."""
    of_device = KERNELS.get(device.type)
    return None if of_device is None else of_device(device.type, longest_segment)


def triton_kernels(device_type: str, longest_segment: int) -> TableKernels | None:
    """Those in Triton; None, and once a warning, where it is not installed."""
    if not _triton_is_installed(device_type):
        return None
    from marlaas_kernels.triton.op import segment_lora_, segment_lora_backward

    tiles = tiles_of(device_type, Shape.of(longest_segment))
    return TableKernels(tiles.tokens, partial(segment_lora_, tiles=tiles), partial(segment_lora_backward, tiles=tiles))


KERNELS: dict[str, Callable[[str, int], TableKernels | None]] = {"cuda": triton_kernels, "npu": triton_kernels}


@cache
def _triton_is_installed(device_type: str) -> bool:
    try:
        import triton  # noqa: F401
    except (ImportError, RuntimeError) as error:  # triton-ascend without CANN raises the latter
        package = _PACKAGES.get(device_type, "triton")
        logging.getLogger(__name__).warning(
            "Triton does not load (%s), so torch adds the adapters on %s, one after another, which is slower. "
            "pip install '%s'",
            error,
            device_type,
            package,
        )
        return False
    return True
