"""Where the adapters of a flat batch lie at a fused linear, for kernels that address a flat bank by offsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

_VECTOR = 8  # elements that a device loads at once (16 bytes of bf16), where addresses allow it

Columns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Segments:
    """G segments of contiguous tokens in token order, one adapter each; tensors lie on the device.

    start_G, end_G: int32, tokens `[start, end)`; rank_G: int32; scale_G: fp32.
    block_segment_N, block_token_N: int32, the segments cut into blocks of at most `block_tokens` tokens: each block's
    segment and its first token. An empty segment has none.
    """

    start_G: torch.Tensor
    end_G: torch.Tensor
    rank_G: torch.Tensor
    scale_G: torch.Tensor
    block_segment_N: torch.Tensor
    block_token_N: torch.Tensor
    max_rank: int
    block_tokens: int

    @staticmethod
    def of(
        spans: Sequence[tuple[int, int]],
        ranks: Sequence[int],
        scales: Sequence[float],
        block_tokens: int,
        device: torch.device | str = "cpu",
    ) -> Segments:
        """From one entry a segment: its tokens [start, end), in ascending order, and its adapter's rank and scale."""
        bounds = [token for span in spans for token in span]
        assert bounds == sorted(bounds), f"segments {spans} are not in token order or overlap"
        blocks = [(g, token) for g, (start, end) in enumerate(spans) for token in range(start, end, block_tokens)]
        integers = [bounds[::2], bounds[1::2], ranks, [g for g, _ in blocks], [token for _, token in blocks]]
        packed = torch.tensor([n for row in integers for n in row], dtype=torch.int32).to(device)  # one copy for all
        start_G, end_G, rank_G, block_segment_N, block_token_N = packed.split([len(row) for row in integers])
        scale_G = torch.tensor(scales, dtype=torch.float32).to(device)
        highest = max(ranks, default=1)
        return Segments(start_G, end_G, rank_G, scale_G, block_segment_N, block_token_N, highest, block_tokens)

    @property
    def count(self) -> int:
        return self.start_G.shape[0]

    @property
    def blocks(self) -> int:
        return self.block_segment_N.shape[0]


@dataclass(frozen=True)
class SegmentTable:
    """Where the segments' adapters lie in a flat bank, at a fused linear of P parts.

    a_offset_GP, b_offset_GP: int64, on the device: the first element of a part's A, `[rank, I]`, and of its B, which
    lies transposed, `[rank, size]`; -1 where the adapter does not target the part.
    columns: each part's slice (start, size) of the output; column_P2: int32, the same on the device.
    vector: how many elements offsets and columns are all multiples of, 8 or 1.
    distinct: no two matrices share an offset, so that each element of a gradient bank has one writer.
    """

    segments: Segments
    a_offset_GP: torch.Tensor
    b_offset_GP: torch.Tensor
    column_P2: torch.Tensor
    columns: Columns
    vector: int
    distinct: bool

    @staticmethod
    def of(
        segments: Segments,
        a_offsets: Sequence[Sequence[int]],
        b_offsets: Sequence[Sequence[int]],
        columns: Sequence[tuple[int, int]],
    ) -> SegmentTable:
        """From each segment's offsets by part."""
        offsets = torch.tensor([a_offsets, b_offsets], dtype=torch.int64)
        return SegmentTable.of_layers(segments, offsets.view(2, 1, segments.count, len(columns)), columns)[0]

    @staticmethod
    def of_layers(
        segments: Segments, offsets_2LGP: torch.Tensor, columns: Sequence[tuple[int, int]]
    ) -> list[SegmentTable]:
        """One table a layer, from the offsets of A and B in all layers, on the host; they are copied at once."""
        device, used = segments.start_G.device, offsets_2LGP[offsets_2LGP >= 0]
        aligned = bool((used % _VECTOR == 0).all()) and all(n % _VECTOR == 0 for column in columns for n in column)
        distinct = used.unique().numel() == used.numel()
        columns = tuple((start, size) for start, size in columns)
        column_P2, vector = _on_device(columns, device), _VECTOR if aligned else 1
        a_offsets, b_offsets = offsets_2LGP.to(device).unbind()
        return [
            SegmentTable(segments, a_GP, b_GP, column_P2, columns, vector, distinct)
            for a_GP, b_GP in zip(a_offsets.unbind(), b_offsets.unbind(), strict=True)
        ]

    @property
    def parts(self) -> int:
        return len(self.columns)

    @property
    def outputs(self) -> int:
        """Columns of the fused linear's output."""
        return max(start + size for start, size in self.columns)


@cache
@torch.inference_mode(False)
def _on_device(columns: Columns, device: torch.device) -> torch.Tensor:
    return torch.tensor(columns, dtype=torch.int32).to(device)
