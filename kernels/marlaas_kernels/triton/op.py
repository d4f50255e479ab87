"""The kernels behind the signatures of `reference`: a whole fused linear's delta, forward and backward."""

from __future__ import annotations

import torch

from marlaas_kernels.table import SegmentTable
from marlaas_kernels.triton.backward import input_gradient, matrix_gradients_, shrunk_gradient
from marlaas_kernels.triton.common import check, on_device_of
from marlaas_kernels.triton.config import Shape, Tiles, tiles_of
from marlaas_kernels.triton.forward import expand_, shrink


def segment_lora_(
    y_TO: torch.Tensor, x_TI: torch.Tensor, bank: torch.Tensor, table: SegmentTable, tiles: Tiles | None = None
) -> torch.Tensor:
    """Adds each token's LoRA delta to y in place; returns the shrunk activations for `segment_lora_backward`.

    x `[T, I]` in the bank's dtype: fp32, fp16 or bf16. tiles: if not given, those of the device for the table's blocks.
    """
    tiles = tiles or tiles_of(x_TI.device.type, Shape.of(table.segments.block_tokens))
    check(x_TI, y_TO, bank, table, tiles)
    with on_device_of(x_TI):
        h_STC = shrink(x_TI, bank, table, tiles)
        expand_(y_TO, h_STC, bank, table, tiles)
    return h_STC


def segment_lora_backward(
    dy_TO: torch.Tensor,
    x_TI: torch.Tensor,
    h_STC: torch.Tensor,
    bank: torch.Tensor,
    table: SegmentTable,
    gradients: torch.Tensor,
    gradient_table: SegmentTable,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Gradient with respect to x, `[T, I]` in x's dtype; those of A and B are added to `gradients`.

    h_STC: what `segment_lora_` returned for x. gradients: fp32, read flat at the offsets of `gradient_table`: the same
    segments, with -1 where an adapter does not target a part. Each adapter has one segment: nothing here is atomic.
    """
    tiles = tiles or tiles_of(x_TI.device.type, Shape.of(table.segments.block_tokens))
    check(x_TI, dy_TO, bank, table, tiles)
    assert gradients.dtype == torch.float32, f"gradients are added up in float32, not {gradients.dtype}"
    assert gradients.is_contiguous(), "the bank of gradients must be contiguous"
    assert gradient_table.distinct, "two segments would write to the same gradients"
    with on_device_of(x_TI):
        dh_TC = shrunk_gradient(dy_TO, bank, table, tiles)
        matrix_gradients_(gradients, dy_TO, x_TI, h_STC, dh_TC, gradient_table, tiles)
        return input_gradient(x_TI, dh_TC, bank, table, tiles)
