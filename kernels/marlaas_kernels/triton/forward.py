"""Shrink and expand: the multi-LoRA delta of a flat batch, two launches, no atomics.

They are not one kernel: a program of the expand owns a block of columns, so that a fused one would compute h for each
of them, reading A (rank x inputs) to use B (rank x columns): 16 to 64 times the traffic at the sizes of real models.
Two launches keep every byte of A and B read once, and in a CUDA graph the second costs about a microsecond. The shrink
of a decode step has little output to spread over a device, so its inputs are split among programs, each of which
writes a share of h; the expand sums the shares while it loads them, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from marlaas_kernels.table import SegmentTable
from marlaas_kernels.triton.common import TABLE, a_rows, column_tile, column_tiles, grid, operand_dtype, sum_of_splits
from marlaas_kernels.triton.config import Tiles, rank_block


@triton.jit(do_not_specialize=TABLE)
def _shrink_kernel(
    h_ptr,
    x_ptr,
    bank_ptr,
    block_segment_ptr,
    block_token_ptr,
    end_ptr,
    rank_ptr,
    scale_ptr,
    a_offset_ptr,
    inputs,
    split_inputs,
    row_tiles,
    x_stride,
    h_stride,
    h_split_stride,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    VECTOR: tl.constexpr,
    OPERAND: tl.constexpr,
):
    segment = tl.load(block_segment_ptr + tl.program_id(0))
    rank = tl.load(rank_ptr + segment)
    row = tl.program_id(1) % row_tiles * BLOCK_C
    split = tl.program_id(1) // row_tiles
    if row >= PARTS * rank:
        return
    rows = row + tl.arange(0, BLOCK_C)
    a_row, is_row = a_rows(a_offset_ptr + segment * PARTS, rows, rank, inputs, PARTS, VECTOR)
    tokens = tl.load(block_token_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_T)
    is_token = tokens < tl.load(end_ptr + segment)
    x_row = tokens.to(tl.int64) * x_stride
    first = split * split_inputs
    accumulator = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for i in range(first, tl.minimum(first + split_inputs, inputs), BLOCK_I):
        columns = i + tl.arange(0, BLOCK_I)
        is_column = (columns < inputs)[None, :]
        x = tl.load(x_ptr + x_row[:, None] + columns[None, :], mask=is_token[:, None] & is_column, other=0.0)
        a = tl.load(bank_ptr + a_row[:, None] + columns[None, :], mask=is_row[:, None] & is_column, other=0.0)
        accumulator = tl.dot(x.to(OPERAND), tl.trans(a.to(OPERAND)), accumulator, input_precision="ieee")
    scaled = accumulator * tl.load(scale_ptr + segment)
    h_row = split.to(tl.int64) * h_split_stride + tokens.to(tl.int64) * h_stride
    tl.store(h_ptr + h_row[:, None] + rows[None, :], scaled, mask=is_token[:, None] & (rows < PARTS * rank)[None, :])


@triton.jit(do_not_specialize=TABLE)
def _expand_kernel(
    y_ptr,
    h_ptr,
    bank_ptr,
    block_segment_ptr,
    block_token_ptr,
    end_ptr,
    rank_ptr,
    b_offset_ptr,
    column_ptr,
    y_stride,
    h_stride,
    h_split_stride,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    VECTOR: tl.constexpr,
    OPERAND: tl.constexpr,
):
    segment = tl.load(block_segment_ptr + tl.program_id(0))
    part, column = column_tile(column_ptr, tl.program_id(1), PARTS, BLOCK_O)
    offset = tl.load(b_offset_ptr + segment * PARTS + part)
    if offset < 0:
        return
    offset = tl.multiple_of(offset, VECTOR)
    rank = tl.load(rank_ptr + segment)
    size = tl.multiple_of(tl.load(column_ptr + 2 * part + 1), VECTOR)
    columns = column + tl.arange(0, BLOCK_O)
    is_column = columns < size
    tokens = tl.load(block_token_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_T)
    is_token = tokens < tl.load(end_ptr + segment)
    h_row = tokens.to(tl.int64) * h_stride + part * rank
    accumulator = tl.zeros((BLOCK_T, BLOCK_O), dtype=tl.float32)
    for r in range(0, rank, BLOCK_R):
        ranks = r + tl.arange(0, BLOCK_R)
        is_rank = ranks < rank
        h_at = h_ptr + h_row[:, None] + ranks[None, :]
        h = sum_of_splits(h_at, is_token[:, None] & is_rank[None, :], h_split_stride, SPLITS)
        b_row = offset + ranks.to(tl.int64) * size
        b = tl.load(bank_ptr + b_row[:, None] + columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0)
        accumulator = tl.dot(h.to(OPERAND), b.to(OPERAND), accumulator, input_precision="ieee")
    start = tl.multiple_of(tl.load(column_ptr + 2 * part), VECTOR)
    y_at = y_ptr + (tokens.to(tl.int64) * y_stride)[:, None] + (start + columns)[None, :]
    mask = is_token[:, None] & is_column[None, :]
    y = tl.load(y_at, mask=mask, other=0.0).to(tl.float32) + accumulator
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


def shrink(x_TI: torch.Tensor, bank: torch.Tensor, table: SegmentTable, tiles: Tiles) -> torch.Tensor:
    """Scaled shrunk activations, fp32 `[splits, T, parts * max_rank]`, to be summed over the splits.

    Row t has its own adapter's part p and rank r in column p * rank + r; columns beyond parts * rank, and rows of
    tokens without adapter, are not written.
    """
    segments = table.segments
    splits = tiles.splits_of(x_TI.shape[1])
    h_STC = x_TI.new_empty(splits, x_TI.shape[0], table.parts * segments.max_rank, dtype=torch.float32)
    if segments.blocks == 0:
        return h_STC
    row_tiles = triton.cdiv(h_STC.shape[2], tiles.rows)
    _shrink_kernel[grid(segments.blocks, row_tiles * splits, tiles)](
        h_STC,
        x_TI,
        bank,
        segments.block_segment_N,
        segments.block_token_N,
        segments.end_G,
        segments.rank_G,
        segments.scale_G,
        table.a_offset_GP,
        x_TI.shape[1],
        triton.cdiv(triton.cdiv(x_TI.shape[1], splits), tiles.inputs) * tiles.inputs,
        row_tiles,
        x_TI.stride(0),
        h_STC.stride(1),
        h_STC.stride(0),
        PARTS=table.parts,
        BLOCK_T=tiles.tokens,
        BLOCK_C=tiles.rows,
        BLOCK_I=tiles.inputs,
        VECTOR=table.vector,
        OPERAND=operand_dtype(bank),
        **tiles.launch,
    )
    return h_STC


def expand_(y_TO: torch.Tensor, h_STC: torch.Tensor, bank: torch.Tensor, table: SegmentTable, tiles: Tiles) -> None:
    """Adds B h of every part to y `[T, O]` in place, h being what `shrink` returned."""
    segments = table.segments
    if segments.blocks == 0:
        return
    _expand_kernel[grid(segments.blocks, column_tiles(table, tiles), tiles)](
        y_TO,
        h_STC,
        bank,
        segments.block_segment_N,
        segments.block_token_N,
        segments.end_G,
        segments.rank_G,
        table.b_offset_GP,
        table.column_P2,
        y_TO.stride(0),
        h_STC.stride(1),
        h_STC.stride(0),
        PARTS=table.parts,
        SPLITS=h_STC.shape[0],
        BLOCK_T=tiles.tokens,
        BLOCK_O=tiles.columns,
        BLOCK_R=rank_block(segments.max_rank),
        VECTOR=table.vector,
        OPERAND=operand_dtype(bank),
        **tiles.launch,
    )
