"""The multi-LoRA linear: adds to each token of a flat batch its own adapter's delta, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marlaas.lora.layout import AdapterLayout
from marlaas.transformer import Site
from marlaas_kernels.segments import SegmentWeights, multi_lora_, multi_lora_backward


@dataclass(frozen=True)
class Segment:
    """Tokens `[start, end)` of one adapter.

    weights: the adapter's vector in the model's dtype; gradient: where its fp32 gradient is added up, if it trains.
    """

    start: int
    end: int
    layout: AdapterLayout
    weights: torch.Tensor
    gradient: torch.Tensor | None = None


class LoraBatch:
    """The adapters of one flat batch, in token order. Tokens of no segment get the base model alone."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = [s for s in segments if s.end > s.start]

    def add(self, site: Site, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """y `[T, out]` plus every token's delta of x `[T, in]`. In place where no gradient is wanted."""
        here = [s for s in self.segments if site in s.layout]
        if not here:
            return y_TO
        if torch.is_grad_enabled():
            return _MultiLora.apply(x_TI, y_TO, site, here)
        multi_lora_(y_TO, x_TI, [_weights(s, site) for s in here])
        return y_TO


def _weights(segment: Segment, site: Site) -> SegmentWeights:
    a, b = segment.layout.matrices(segment.weights, site)
    columns = [(p.start, p.size) for p in segment.layout.site(site).parts]
    return SegmentWeights(segment.start, segment.end, segment.layout.scale, a, b, columns)


class _MultiLora(torch.autograd.Function):
    """Backward writes adapter gradients straight into each segment's own buffer; autograd sees only x and y."""

    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, y_TO: torch.Tensor, site: Site, segments: list[Segment]) -> torch.Tensor:
        ctx.mark_dirty(y_TO)
        weights = [_weights(s, site) for s in segments]
        shrunk = multi_lora_(y_TO, x_TI, weights)
        ctx.save_for_backward(x_TI, *shrunk)
        ctx.site, ctx.segments, ctx.weights = site, segments, weights
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (dy_TO,) = grads
        x_TI, *shrunk = ctx.saved_tensors
        buffers = []
        for segment in ctx.segments:
            assert segment.gradient is not None, "a segment in a training pass has nowhere to put its gradient"
            buffers.append(segment.layout.matrices(segment.gradient, ctx.site))
        dx_TI = multi_lora_backward(dy_TO.contiguous(), x_TI, shrunk, ctx.weights, buffers)
        return dx_TI, dy_TO, None, None
