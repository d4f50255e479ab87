"""The multi-LoRA linear: adds to each token of a flat batch its own adapter's delta, or none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from marlaas.lora.layout import AdapterLayout, AdapterShape
from marlaas.lora.segment import Segment
from marlaas.lora.tables import BatchTables
from marlaas.transformer import Site
from marlaas_kernels.segments import (
    SegmentWeights,
    StackedTokens,
    multi_lora_,
    multi_lora_backward,
    stacked_lora_,
)

_SHORT = 32  # tokens; from there on a matrix product costs more than its call
_FEW = 3  # segments that are not worth a batch


@dataclass(frozen=True)
class _Stack:
    """Short segments of adapters with one layout, and the slots of the adapters."""

    layout: AdapterLayout
    slots_G: torch.Tensor
    which: StackedTokens


class LoraBatch:
    """The adapters of one flat batch, in token order. Tokens of no segment get the base model alone."""

    def __init__(self, segments: Sequence[Segment], bank_SP: torch.Tensor | None = None) -> None:
        """bank_SP: the vectors of all slots; then many short segments are computed as one. For inference only.

        Where the device has kernels for it, all segments are computed as one, in training too, and the vectors lie in
        one tensor, as do the gradients.
        """
        self.segments = [s for s in segments if s.end > s.start]
        self._bank_SP = bank_SP
        self._stacks: list[_Stack] = []
        self._tables = BatchTables.of(self.segments)
        if self._tables is None and bank_SP is not None:
            self.segments = self._stack(self.segments, bank_SP.device)

    def add(self, site: Site, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """y `[T, out]` plus every token's delta of x `[T, in]`. In place where no gradient is wanted."""
        if self._tables is not None:
            return self._tables.add(site, x_TI, y_TO)
        for stack in self._stacks:
            if site in stack.layout:
                self._add_stack(stack, site, x_TI, y_TO)
        here = [s for s in self.segments if site in s.layout]
        if not here:
            return y_TO
        if torch.is_grad_enabled():
            return _MultiLora.apply(x_TI, y_TO, site, here)
        multi_lora_(y_TO, x_TI, [_weights(s, site) for s in here])
        return y_TO

    def _stack(self, segments: Sequence[Segment], device: torch.device) -> list[Segment]:
        """Makes stacks of the short segments, by layout; returns the segments that are left."""
        short: dict[AdapterShape, list[Segment]] = defaultdict(list)
        for segment in segments:
            if segment.slot is not None and segment.end - segment.start <= _SHORT:
                short[segment.layout.shape].append(segment)
        stacked: set[int] = set()
        for alike in short.values():
            if len(alike) >= _FEW:
                which = StackedTokens.of([(s.start, s.end) for s in alike], device)
                slots_G = torch.tensor([s.slot for s in alike], device=device)
                self._stacks.append(_Stack(alike[0].layout, slots_G, which))
                stacked.update(map(id, alike))
        return [s for s in segments if id(s) not in stacked]

    def _add_stack(self, stack: _Stack, site: Site, x_TI: torch.Tensor, y_TO: torch.Tensor) -> None:
        assert self._bank_SP is not None
        slice_, rank = stack.layout.site(site), stack.layout.shape.rank
        start, end = stack.layout.bounds(site)
        vectors_GP = self._bank_SP.narrow(1, start, end - start).index_select(0, stack.slots_G)
        rows = len(slice_.parts) * rank
        a_GRI = vectors_GP[:, : rows * slice_.inputs].unflatten(1, (rows, slice_.inputs))
        sizes = [part.size * rank for part in slice_.parts]
        b = vectors_GP[:, rows * slice_.inputs :].split(sizes, dim=1)
        b_GOR = [v.unflatten(1, (rank, part.size)).transpose(1, 2) for v, part in zip(b, slice_.parts, strict=True)]
        columns = [(part.start, part.size) for part in slice_.parts]
        stacked_lora_(y_TO, x_TI, stack.which, stack.layout.scale, a_GRI, b_GOR, columns)


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
