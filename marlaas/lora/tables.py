"""A batch's adapters as tables of offsets into one flat memory, for devices whose kernels read them that way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marlaas.lora.segment import Segment
from marlaas.transformer import Site
from marlaas_kernels.registry import TableKernels, table_kernels
from marlaas_kernels.table import Segments, SegmentTable


class _Memory:
    """The memory that several vectors lie in, flat, and where each of them begins."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        storage = vectors[0].untyped_storage()
        for vector in vectors:
            assert vector.untyped_storage().data_ptr() == storage.data_ptr(), "a batch's adapters lie in one tensor"
        self.flat = vectors[0].as_strided((storage.nbytes() // vectors[0].itemsize,), (1,), 0)
        self.begin_G = torch.tensor([vector.storage_offset() for vector in vectors])


class BatchTables:
    """The segments' tables: those of a kind of fused linear are made at its first use, for all layers at once."""

    def __init__(self, segments: Sequence[Segment], kernels: TableKernels) -> None:
        self._adapters, self._kernels = segments, kernels
        layouts = [s.layout for s in segments]
        self._segments = Segments.of(
            [(s.start, s.end) for s in segments],
            [layout.shape.rank for layout in layouts],
            [layout.scale for layout in layouts],
            kernels.block_tokens,
            segments[0].weights.device,
        )
        self._bank = _Memory([s.weights for s in segments])
        self._gradients: _Memory | None = None
        self._tables: dict[tuple[str, bool], list[SegmentTable] | None] = {}

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> BatchTables | None:
        """None where the device has no kernels that take tables."""
        if not segments:
            return None
        kernels = table_kernels(segments[0].weights.device, max(s.end - s.start for s in segments))
        return None if kernels is None else cls(segments, kernels)

    def add(self, site: Site, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """See LoraBatch.add."""
        table = self._table(site, self._bank, trains=False)
        if table is None:
            return y_TO
        if torch.is_grad_enabled():
            return _TableLora.apply(x_TI, y_TO, self, site, table)
        self.forward_(x_TI, y_TO, table)
        return y_TO

    def forward_(self, x_TI: torch.Tensor, y_TO: torch.Tensor, table: SegmentTable) -> torch.Tensor:
        """Adds the deltas; returns what `backward` needs."""
        return self._kernels.add_(y_TO, x_TI, self._bank.flat, table)

    def backward(
        self, dy_TO: torch.Tensor, x_TI: torch.Tensor, shrunk: torch.Tensor, site: Site, table: SegmentTable
    ) -> torch.Tensor:
        """Gradient of x; the adapters' are added to the segments' buffers."""
        if self._gradients is None:
            vectors = [s.gradient for s in self._adapters if s.gradient is not None]
            assert len(vectors) == len(self._adapters), "a segment in a training pass has nowhere to put its gradient"
            self._gradients = _Memory(vectors)
        of_gradients = self._table(site, self._gradients, trains=True)
        assert of_gradients is not None
        gradients = self._gradients.flat
        return self._kernels.backward(dy_TO, x_TI, shrunk, self._bank.flat, table, gradients, of_gradients)

    def _table(self, site: Site, memory: _Memory, trains: bool) -> SegmentTable | None:
        """None if no adapter of the batch targets this kind of linear."""
        key = (site.parts[0].module, trains)
        if key not in self._tables:
            within = torch.stack([s.layout.offsets(site) for s in self._adapters], dim=2)
            offsets_2LGP = torch.where(within < 0, -1, within + memory.begin_G[:, None])
            columns = [(part.start, part.size) for part in site.parts]
            tables = SegmentTable.of_layers(self._segments, offsets_2LGP, columns) if (within >= 0).any() else None
            self._tables[key] = tables
        of_kind = self._tables[key]
        return None if of_kind is None else of_kind[site.layer]


class _TableLora(torch.autograd.Function):
    """As in `layers`: adapter gradients go straight to their buffers; autograd sees only x and y."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: torch.Tensor, y_TO: torch.Tensor, batch: BatchTables, site: Site, table: SegmentTable
    ) -> torch.Tensor:
        ctx.mark_dirty(y_TO)
        ctx.save_for_backward(x_TI, batch.forward_(x_TI, y_TO, table))
        ctx.batch, ctx.site, ctx.table = batch, site, table
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy_TO,) = grads
        x_TI, shrunk = ctx.saved_tensors
        return ctx.batch.backward(dy_TO.contiguous(), x_TI, shrunk, ctx.site, ctx.table), dy_TO, None, None, None
