"""Multi-LoRA over contiguous segments: tokens sorted by adapter, two matrix products a segment and part.

Many short segments of equal ranks are one batch of matrix products instead, since what a short one costs is mostly
its calls. A segment never reads or writes another segment's rows, so whatever one adapter computes (NaN included)
stays with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SegmentWeights:
    """One adapter at one fused linear, for the tokens `[start, end)`.

    a: `[parts * rank, I]`, the shrink matrices of all its parts; b: one `[size, rank]` a part;
    columns: each part's slice `(start, size)` of the output.
    """

    start: int
    end: int
    scale: float
    a: torch.Tensor
    b: Sequence[torch.Tensor]
    columns: Sequence[tuple[int, int]]

    @property
    def rank(self) -> int:
        return self.a.shape[0] // len(self.b)


@dataclass(frozen=True)
class StackedTokens:
    """Which tokens G short segments have: the i-th of them is token `tokens_N[i]` of the flat batch.

    places_N: where it lies when each segment is padded to the longest, `length`, as index into `[G * length]`.
    """

    tokens_N: torch.Tensor
    places_N: torch.Tensor
    count: int
    length: int

    @staticmethod
    def of(spans: Sequence[tuple[int, int]], device: torch.device) -> StackedTokens:
        """Of segments given as [start, end)."""
        length = max(end - start for start, end in spans)
        tokens = [token for start, end in spans for token in range(start, end)]
        places = [g * length + i for g, (start, end) in enumerate(spans) for i in range(end - start)]
        return StackedTokens(
            torch.tensor(tokens, device=device), torch.tensor(places, device=device), len(spans), length
        )


def stacked_lora_(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    which: StackedTokens,
    scale: float,
    a_GRI: torch.Tensor,
    b_GOR: Sequence[torch.Tensor],
    columns: Sequence[tuple[int, int]],
) -> None:
    """Adds the deltas of G segments to y in place.

    a_GRI: `[G, parts * rank, I]`; b_GOR: `[G, size, rank]` a part; columns: each part's slice (start, size) of the
    output.
    """
    padded = x_TI.new_zeros(which.count * which.length, x_TI.shape[1])
    padded[which.places_N] = x_TI[which.tokens_N]
    shrunk = torch.bmm(padded.view(which.count, which.length, -1), a_GRI.transpose(1, 2)).mul_(scale)
    rank = b_GOR[0].shape[2]
    for part, (b, (column, size)) in enumerate(zip(b_GOR, columns, strict=True)):
        delta = torch.bmm(shrunk[:, :, part * rank : (part + 1) * rank], b.transpose(1, 2))
        y_TO.narrow(1, column, size).index_add_(0, which.tokens_N, delta.flatten(0, 1)[which.places_N])


def multi_lora_(y_TO: torch.Tensor, x_TI: torch.Tensor, segments: Sequence[SegmentWeights]) -> list[torch.Tensor]:
    """Adds every segment's delta to y in place; returns the scaled shrunk activations, one `[n, parts * rank]` each."""
    shrunk = []
    for s in segments:
        h = (x_TI[s.start : s.end] @ s.a.T).mul_(s.scale)
        for part, (b_OR, (column, size)) in enumerate(zip(s.b, s.columns, strict=True)):
            h_part = h[:, part * s.rank : (part + 1) * s.rank]
            y_TO[s.start : s.end, column : column + size].addmm_(h_part, b_OR.T)
        shrunk.append(h)
    return shrunk


def multi_lora_backward(
    dy_TO: torch.Tensor,
    x_TI: torch.Tensor,
    shrunk: Sequence[torch.Tensor],
    segments: Sequence[SegmentWeights],
    gradients: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
) -> torch.Tensor:
    """Gradient with respect to x, `[T, I]`; those of A and B are added into `gradients` (one (a, [b...]) a segment)."""
    dx_TI = torch.zeros_like(x_TI)
    for s, h, (grad_a, grad_b) in zip(segments, shrunk, gradients, strict=True):
        dh = torch.empty_like(h)
        for part, (b_OR, (column, size)) in enumerate(zip(s.b, s.columns, strict=True)):
            window = slice(part * s.rank, (part + 1) * s.rank)
            dy_part = dy_TO[s.start : s.end, column : column + size]
            dh[:, window] = dy_part @ b_OR
            grad_b[part].T.add_(h[:, window].T @ dy_part)  # b lies transposed in memory
        dh.mul_(s.scale)
        grad_a.add_(dh.T @ x_TI[s.start : s.end])
        dx_TI[s.start : s.end] = dh @ s.a
    return dx_TI
