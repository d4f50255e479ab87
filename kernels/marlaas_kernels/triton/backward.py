"""Gradients of the multi-LoRA delta: dh, dx, dA and dB, one launch each, no atomics.

With h = scale * A x and y = B h: dh = scale * dy B, dx = dh A, dA = dh^T x, dB = dy^T h; B and dB lie
transposed. A program of dA or dB owns a tile of one adapter's gradient and walks over all tokens of its segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from marlaas_kernels.table import SegmentTable
from marlaas_kernels.triton.common import TABLE, a_rows, column_tile, column_tiles, grid, operand_dtype, sum_of_splits
from marlaas_kernels.triton.config import Tiles, rank_block


@triton.jit(do_not_specialize=TABLE)
def _dh_kernel(
    dh_ptr,
    dy_ptr,
    bank_ptr,
    block_segment_ptr,
    block_token_ptr,
    end_ptr,
    rank_ptr,
    scale_ptr,
    b_offset_ptr,
    column_ptr,
    rank_tiles,
    dy_stride,
    dh_stride,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    VECTOR: tl.constexpr,
    OPERAND: tl.constexpr,
):
    segment = tl.load(block_segment_ptr + tl.program_id(0))
    part = tl.program_id(1) // rank_tiles
    first = tl.program_id(1) % rank_tiles * BLOCK_R
    rank = tl.load(rank_ptr + segment)
    offset = tl.load(b_offset_ptr + segment * PARTS + part)
    if (offset < 0) | (first >= rank):
        return
    offset = tl.multiple_of(offset, VECTOR)
    start = tl.multiple_of(tl.load(column_ptr + 2 * part), VECTOR)
    size = tl.multiple_of(tl.load(column_ptr + 2 * part + 1), VECTOR)
    ranks = first + tl.arange(0, BLOCK_R)
    is_rank = ranks < rank
    b_row = offset + ranks.to(tl.int64) * size
    tokens = tl.load(block_token_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_T)
    is_token = tokens < tl.load(end_ptr + segment)
    dy_row = tokens.to(tl.int64) * dy_stride + start
    accumulator = tl.zeros((BLOCK_T, BLOCK_R), dtype=tl.float32)
    for o in range(0, size, BLOCK_O):
        columns = o + tl.arange(0, BLOCK_O)
        is_column = columns < size
        dy_mask = is_token[:, None] & is_column[None, :]
        dy = tl.load(dy_ptr + dy_row[:, None] + columns[None, :], mask=dy_mask, other=0.0)
        b = tl.load(bank_ptr + b_row[:, None] + columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0)
        accumulator = tl.dot(dy.to(OPERAND), tl.trans(b.to(OPERAND)), accumulator, input_precision="ieee")
    dh_row = tokens.to(tl.int64) * dh_stride + part * rank
    scaled = accumulator * tl.load(scale_ptr + segment)
    tl.store(dh_ptr + dh_row[:, None] + ranks[None, :], scaled, mask=is_token[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=TABLE)
def _dx_kernel(
    dx_ptr,
    dh_ptr,
    bank_ptr,
    block_segment_ptr,
    block_token_ptr,
    end_ptr,
    rank_ptr,
    a_offset_ptr,
    inputs,
    dx_stride,
    dh_stride,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    VECTOR: tl.constexpr,
    OPERAND: tl.constexpr,
):
    segment = tl.load(block_segment_ptr + tl.program_id(0))
    rank = tl.load(rank_ptr + segment)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_column = (columns < inputs)[None, :]
    tokens = tl.load(block_token_ptr + tl.program_id(0)) + tl.arange(0, BLOCK_T)
    is_token = (tokens < tl.load(end_ptr + segment))[:, None]
    dh_row = tokens.to(tl.int64) * dh_stride
    accumulator = tl.zeros((BLOCK_T, BLOCK_I), dtype=tl.float32)
    for row in range(0, PARTS * rank, BLOCK_C):
        rows = row + tl.arange(0, BLOCK_C)
        a_row, is_row = a_rows(a_offset_ptr + segment * PARTS, rows, rank, inputs, PARTS, VECTOR)
        # dh of a part that is not targeted was never written
        dh = tl.load(dh_ptr + dh_row[:, None] + rows[None, :], mask=is_token & is_row[None, :], other=0.0)
        a = tl.load(bank_ptr + a_row[:, None] + columns[None, :], mask=is_row[:, None] & is_column, other=0.0)
        accumulator = tl.dot(dh.to(OPERAND), a.to(OPERAND), accumulator, input_precision="ieee")
    dx_at = dx_ptr + (tokens.to(tl.int64) * dx_stride)[:, None] + columns[None, :]
    tl.store(dx_at, accumulator.to(dx_ptr.dtype.element_ty), mask=is_token & is_column)


@triton.jit(do_not_specialize=TABLE)
def _da_kernel(
    gradient_ptr,
    dh_ptr,
    x_ptr,
    start_ptr,
    end_ptr,
    rank_ptr,
    a_offset_ptr,
    inputs,
    row_tiles,
    x_stride,
    dh_stride,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr,
    VECTOR: tl.constexpr,
    OPERAND: tl.constexpr,
):
    segment = tl.program_id(0) // row_tiles
    row = tl.program_id(0) % row_tiles * BLOCK_C
    rank = tl.load(rank_ptr + segment)
    if row >= PARTS * rank:
        return
    rows = row + tl.arange(0, BLOCK_C)
    a_row, is_row = a_rows(a_offset_ptr + segment * PARTS, rows, rank, inputs, PARTS, VECTOR)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_column = (columns < inputs)[None, :]
    end = tl.load(end_ptr + segment)
    accumulator = tl.zeros((BLOCK_C, BLOCK_I), dtype=tl.float32)
    for token in range(tl.load(start_ptr + segment), end, BLOCK_T):
        tokens = token + tl.arange(0, BLOCK_T)
        is_token = (tokens < end)[:, None]
        dh_at = dh_ptr + (tokens.to(tl.int64) * dh_stride)[:, None] + rows[None, :]
        dh = tl.load(dh_at, mask=is_token & is_row[None, :], other=0.0)
        x_at = x_ptr + (tokens.to(tl.int64) * x_stride)[:, None] + columns[None, :]
        x = tl.load(x_at, mask=is_token & is_column, other=0.0)
        accumulator = tl.dot(tl.trans(dh.to(OPERAND)), x.to(OPERAND), accumulator, input_precision="ieee")
    gradient_at = gradient_ptr + a_row[:, None] + columns[None, :]
    mask = is_row[:, None] & is_column
    tl.store(gradient_at, tl.load(gradient_at, mask=mask, other=0.0) + accumulator, mask=mask)


@triton.jit(do_not_specialize=TABLE)
def _db_kernel(
    gradient_ptr,
    dy_ptr,
    h_ptr,
    start_ptr,
    end_ptr,
    rank_ptr,
    b_offset_ptr,
    column_ptr,
    rank_tiles,
    dy_stride,
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
    segment = tl.program_id(0) // rank_tiles
    first = tl.program_id(0) % rank_tiles * BLOCK_R
    part, column = column_tile(column_ptr, tl.program_id(1), PARTS, BLOCK_O)
    rank = tl.load(rank_ptr + segment)
    offset = tl.load(b_offset_ptr + segment * PARTS + part)
    if (offset < 0) | (first >= rank):
        return
    offset = tl.multiple_of(offset, VECTOR)
    start = tl.multiple_of(tl.load(column_ptr + 2 * part), VECTOR)
    size = tl.multiple_of(tl.load(column_ptr + 2 * part + 1), VECTOR)
    columns = column + tl.arange(0, BLOCK_O)
    is_column = (columns < size)[None, :]
    ranks = first + tl.arange(0, BLOCK_R)
    is_rank = ranks < rank
    end = tl.load(end_ptr + segment)
    accumulator = tl.zeros((BLOCK_R, BLOCK_O), dtype=tl.float32)
    for token in range(tl.load(start_ptr + segment), end, BLOCK_T):
        tokens = token + tl.arange(0, BLOCK_T)
        is_token = (tokens < end)[:, None]
        dy_at = dy_ptr + (tokens.to(tl.int64) * dy_stride)[:, None] + (start + columns)[None, :]
        dy = tl.load(dy_at, mask=is_token & is_column, other=0.0)
        h_at = h_ptr + (tokens.to(tl.int64) * h_stride + part * rank)[:, None] + ranks[None, :]
        h = sum_of_splits(h_at, is_token & is_rank[None, :], h_split_stride, SPLITS)
        accumulator = tl.dot(tl.trans(h.to(OPERAND)), dy.to(OPERAND), accumulator, input_precision="ieee")
    gradient_at = gradient_ptr + (offset + ranks.to(tl.int64) * size)[:, None] + columns[None, :]
    mask = is_rank[:, None] & is_column
    tl.store(gradient_at, tl.load(gradient_at, mask=mask, other=0.0) + accumulator, mask=mask)


def shrunk_gradient(dy_TO: torch.Tensor, bank: torch.Tensor, table: SegmentTable, tiles: Tiles) -> torch.Tensor:
    """dh, fp32 `[T, parts * max_rank]`, in the columns of `forward.shrink`; those of other parts are not written."""
    segments = table.segments
    dh_TC = dy_TO.new_empty(dy_TO.shape[0], table.parts * segments.max_rank, dtype=torch.float32)
    if segments.blocks == 0:
        return dh_TC
    block_r = rank_block(segments.max_rank)
    rank_tiles = triton.cdiv(segments.max_rank, block_r)
    _dh_kernel[grid(segments.blocks, table.parts * rank_tiles, tiles)](
        dh_TC,
        dy_TO,
        bank,
        segments.block_segment_N,
        segments.block_token_N,
        segments.end_G,
        segments.rank_G,
        segments.scale_G,
        table.b_offset_GP,
        table.column_P2,
        rank_tiles,
        dy_TO.stride(0),
        dh_TC.stride(0),
        PARTS=table.parts,
        BLOCK_T=tiles.tokens,
        BLOCK_O=tiles.inputs,
        BLOCK_R=block_r,
        VECTOR=table.vector,
        OPERAND=operand_dtype(bank),
        **tiles.launch,
    )
    return dh_TC


def input_gradient(
    x_TI: torch.Tensor, dh_TC: torch.Tensor, bank: torch.Tensor, table: SegmentTable, tiles: Tiles
) -> torch.Tensor:
    """dx, like x; 0 for tokens of no segment."""
    segments = table.segments
    dx_TI = torch.zeros_like(x_TI, memory_format=torch.contiguous_format)
    if segments.blocks == 0:
        return dx_TI
    _dx_kernel[grid(segments.blocks, triton.cdiv(x_TI.shape[1], tiles.columns), tiles)](
        dx_TI,
        dh_TC,
        bank,
        segments.block_segment_N,
        segments.block_token_N,
        segments.end_G,
        segments.rank_G,
        table.a_offset_GP,
        x_TI.shape[1],
        dx_TI.stride(0),
        dh_TC.stride(0),
        PARTS=table.parts,
        BLOCK_T=tiles.tokens,
        BLOCK_C=tiles.rows,
        BLOCK_I=tiles.columns,
        VECTOR=table.vector,
        OPERAND=operand_dtype(bank),
        **tiles.launch,
    )
    return dx_TI


def matrix_gradients_(
    gradients: torch.Tensor,
    dy_TO: torch.Tensor,
    x_TI: torch.Tensor,
    h_STC: torch.Tensor,
    dh_TC: torch.Tensor,
    table: SegmentTable,
    tiles: Tiles,
) -> None:
    """Adds dA and dB to `gradients`, fp32, at the table's offsets; nothing where an offset is -1."""
    segments = table.segments
    if segments.blocks == 0:
        return
    row_tiles = triton.cdiv(dh_TC.shape[1], tiles.rows)
    _da_kernel[grid(segments.count * row_tiles, triton.cdiv(x_TI.shape[1], tiles.columns), tiles)](
        gradients,
        dh_TC,
        x_TI,
        segments.start_G,
        segments.end_G,
        segments.rank_G,
        table.a_offset_GP,
        x_TI.shape[1],
        row_tiles,
        x_TI.stride(0),
        dh_TC.stride(0),
        PARTS=table.parts,
        BLOCK_T=tiles.tokens,
        BLOCK_C=tiles.rows,
        BLOCK_I=tiles.columns,
        VECTOR=table.vector,
        OPERAND=operand_dtype(x_TI),
        **tiles.launch,
    )
    block_r = rank_block(segments.max_rank)
    rank_tiles = triton.cdiv(segments.max_rank, block_r)
    _db_kernel[grid(segments.count * rank_tiles, column_tiles(table, tiles), tiles)](
        gradients,
        dy_TO,
        h_STC,
        segments.start_G,
        segments.end_G,
        segments.rank_G,
        table.b_offset_GP,
        table.column_P2,
        rank_tiles,
        dy_TO.stride(0),
        h_STC.stride(1),
        h_STC.stride(0),
        PARTS=table.parts,
        SPLITS=h_STC.shape[0],
        BLOCK_T=tiles.tokens,
        BLOCK_O=tiles.columns,
        BLOCK_R=block_r,
        VECTOR=table.vector,
        OPERAND=operand_dtype(dy_TO),
        **tiles.launch,
    )
