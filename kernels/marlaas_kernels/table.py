"""Where the adapters of a flat batch lie at one fused linear, for kernels that address the flat bank by offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_VECTOR = 8  # elements that a device loads at once (16 bytes of bf16), where addresses allow it


@dataclass(frozen=True)
class SegmentTable:
    """G segments of contiguous tokens, one adapter each, at a fused linear of P parts; tensors lie on the device.

    start_G, end_G: int32, tokens `[start, end)`; rank_G: int32; scale_G: fp32.
    a_offset_GP, b_offset_GP: int64, the first element of a part's A `[rank, I]` and B `[size, rank]` in the flattened
    bank, -1 where the adapter does not target the part.
    column_P2: int32, `columns` on the device: each part's slice (start, size) of the output.
    block_segment_N, block_token_N: int32, the segments cut into blocks of at most `block_tokens` tokens: each block's
    segment and its first token. An empty segment has none.
    vector: how many elements offsets, ranks and columns are all multiples of, 8 or 1.
    distinct: no two segments share an offset, so that each element of a gradient bank has one writer.
    """

    start_G: torch.Tensor
    end_G: torch.Tensor
    rank_G: torch.Tensor
    scale_G: torch.Tensor
    a_offset_GP: torch.Tensor
    b_offset_GP: torch.Tensor
    column_P2: torch.Tensor
    block_segment_N: torch.Tensor
    block_token_N: torch.Tensor
    columns: tuple[tuple[int, int], ...]
    max_rank: int
    block_tokens: int
    vector: int
    distinct: bool

    @staticmethod
    def of(
        spans: Sequence[tuple[int, int]],
        ranks: Sequence[int],
        scales: Sequence[float],
        a_offsets: Sequence[Sequence[int]],
        b_offsets: Sequence[Sequence[int]],
        columns: Sequence[tuple[int, int]],
        block_tokens: int,
        device: torch.device | str = "cpu",
    ) -> SegmentTable:
        """From one entry a segment: its tokens [start, end), in ascending order, and its adapter's offsets by part."""
        bounds = [token for span in spans for token in span]
        assert bounds == sorted(bounds), f"segments {spans} are not in token order or overlap"
        blocks = [(g, token) for g, (start, end) in enumerate(spans) for token in range(start, end, block_tokens)]

        def tensor(values: Sequence[object], dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).reshape(shape or (len(values),))

        return SegmentTable(
            start_G=tensor([start for start, _ in spans], torch.int32),
            end_G=tensor([end for _, end in spans], torch.int32),
            rank_G=tensor(ranks, torch.int32),
            scale_G=tensor(scales, torch.float32),
            a_offset_GP=tensor(a_offsets, torch.int64, len(spans), len(columns)),
            b_offset_GP=tensor(b_offsets, torch.int64, len(spans), len(columns)),
            column_P2=tensor(columns, torch.int32, len(columns), 2),
            block_segment_N=tensor([g for g, _ in blocks], torch.int32),
            block_token_N=tensor([token for _, token in blocks], torch.int32),
            columns=tuple((start, size) for start, size in columns),
            max_rank=max(ranks, default=1),
            block_tokens=block_tokens,
            vector=_vector(ranks, *columns, *a_offsets, *b_offsets),
            distinct=_distinct(a_offsets, b_offsets),
        )

    def moved(self, a_offsets: Sequence[Sequence[int]], b_offsets: Sequence[Sequence[int]]) -> SegmentTable:
        """The same segments with their matrices elsewhere, e.g. in a bank of gradients."""
        return replace(
            self,
            a_offset_GP=torch.tensor(a_offsets, dtype=torch.int64).reshape(self.a_offset_GP.shape).to(self.device),
            b_offset_GP=torch.tensor(b_offsets, dtype=torch.int64).reshape(self.b_offset_GP.shape).to(self.device),
            vector=min(self.vector, _vector(*a_offsets, *b_offsets)),
            distinct=_distinct(a_offsets, b_offsets),
        )

    @property
    def segments(self) -> int:
        return self.start_G.shape[0]

    @property
    def blocks(self) -> int:
        return self.block_segment_N.shape[0]

    @property
    def parts(self) -> int:
        return len(self.columns)

    @property
    def outputs(self) -> int:
        """Columns of the fused linear's output."""
        return max(start + size for start, size in self.columns)

    @property
    def device(self) -> torch.device:
        return self.start_G.device


def _vector(*values: Sequence[int]) -> int:
    return _VECTOR if all(v % _VECTOR == 0 for row in values for v in row if v >= 0) else 1


def _distinct(*offsets: Sequence[Sequence[int]]) -> bool:
    used = [offset for rows in offsets for row in rows for offset in row if offset >= 0]
    return len(used) == len(set(used))
