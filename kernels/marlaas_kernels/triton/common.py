"""What the forward and backward kernels share: addressing rows of A and columns of parts, and launching."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from marlaas_kernels.table import SegmentTable
from marlaas_kernels.triton.config import Tiles

# Arguments that point into a batch's table. Their alignment differs from batch to batch, and Triton would compile a
# kernel for each.
TABLE = (
    "block_segment_ptr",
    "block_token_ptr",
    "start_ptr",
    "end_ptr",
    "rank_ptr",
    "scale_ptr",
    "a_offset_ptr",
    "b_offset_ptr",
    "column_ptr",
)

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def a_rows(offset_ptr, rows, rank, inputs, PARTS: tl.constexpr, VECTOR: tl.constexpr):
    """Where A's rows of all parts begin in a bank (row = part * rank + r), and which of `rows` there are."""
    offset = tl.load(offset_ptr + rows // rank, mask=rows < PARTS * rank, other=-1)
    begin = tl.multiple_of(offset, VECTOR) + (rows % rank).to(tl.int64) * inputs
    return begin, offset >= 0


@triton.jit
def column_tile(column_ptr, tile, PARTS: tl.constexpr, BLOCK_O: tl.constexpr):
    """The part of the tile-th block of columns, and the block's first column within the part."""
    part = tile * 0
    for p in tl.static_range(PARTS - 1):
        tiles = tl.cdiv(tl.load(column_ptr + 2 * p + 1), BLOCK_O)
        beyond = (part == p) & (tile >= tiles)
        tile = tl.where(beyond, tile - tiles, tile)
        part = tl.where(beyond, p + 1, part)
    return part, tile * BLOCK_O


@triton.jit
def sum_of_splits(at, mask, split_stride, SPLITS: tl.constexpr):
    """Loads shrunk activations, which that many programs of the shrink have computed a share of each."""
    total = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * split_stride, mask=mask, other=0.0)
    return total


def operand_dtype(tensor: torch.Tensor) -> Any:
    """What matrix operands are cast to: the bank's dtype; on a CPU, that is in the interpreter, fp32.

    The interpreter multiplies the bit patterns of bf16 operands.
    """
    return tl.float32 if tensor.device.type == "cpu" else _DTYPES[tensor.dtype]


def grid(first: int, second: int, tiles: Tiles) -> tuple[int, int]:
    """A launch's grid. Raises ValueError beyond the device's limit: the batch has to be cut."""
    if first * second > tiles.max_programs or second > 65535:
        raise ValueError(f"a launch of {first} x {second} programs is too large; the batch has too many tokens")
    return first, second


def column_tiles(table: SegmentTable, tiles: Tiles) -> int:
    """Blocks of columns of all parts; none spans two parts."""
    return sum(triton.cdiv(size, tiles.columns) for _, size in table.columns)


def check(x_TI: torch.Tensor, y_TO: torch.Tensor, bank: torch.Tensor, table: SegmentTable, tiles: Tiles) -> None:
    """Asserts what the kernels' addressing takes for granted."""
    block_tokens = table.segments.block_tokens
    assert block_tokens == tiles.tokens, f"the table's blocks have {block_tokens} tokens, not {tiles.tokens}"
    assert x_TI.dtype == bank.dtype, f"x is {x_TI.dtype}, the adapters are {bank.dtype}"
    assert x_TI.shape[0] == y_TO.shape[0], f"x has {x_TI.shape[0]} tokens, y {y_TO.shape[0]}"
    assert y_TO.shape[1] >= table.outputs, f"y has {y_TO.shape[1]} columns, the table {table.outputs}"
    assert x_TI.stride(1) == y_TO.stride(1) == 1, "rows of x and y must be contiguous"
    assert bank.is_contiguous(), "the bank must be contiguous"


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Makes the tensor's device the current one, to which launches go."""
    if tensor.device.type == "cpu":
        return nullcontext()
    return torch.accelerator.device_index(tensor.device.index)
