"""Random multi-LoRA problems at one fused linear, and how far the Triton kernels are from the reference on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from marlaas_kernels.reference import segment_lora, segment_lora_backward
from marlaas_kernels.table import Segments, SegmentTable
from marlaas_kernels.triton.config import Tiles

# Largest error over largest magnitude of an output. Half precision: operands and outputs are rounded to 8 or 11 bits.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Adapter:
    """One segment's adapter: the segment's length, the tokens without adapter before it, and which parts it targets."""

    tokens: int
    rank: int
    gap: int = 0
    scale: float = 1.0
    targets: tuple[bool, ...] = (True,)


@dataclass(frozen=True)
class Problem:
    """Inputs, adapters and gradients so far (fp32, at offsets of their own) of one fused linear."""

    x_TI: torch.Tensor
    y_TO: torch.Tensor
    dy_TO: torch.Tensor
    bank: torch.Tensor
    table: SegmentTable
    gradients: torch.Tensor
    gradient_table: SegmentTable

    @staticmethod
    def random(
        adapters: Sequence[Adapter],
        inputs: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        block_tokens: int,
        device: torch.device | str = "cpu",
        tail: int = 0,
        padding: int = 0,
        seed: int = 0,
    ) -> Problem:
        """tail: tokens without adapter at the end; padding: elements before each adapter's vector in the bank."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        spans, token = [], 0
        for adapter in adapters:
            start = token + adapter.gap
            token = start + adapter.tokens
            spans.append((start, token))
        a_offsets, b_offsets, elements = _offsets(adapters, inputs, sizes, padding)
        columns = [(sum(sizes[:p]), size) for p, size in enumerate(sizes)]
        ranks, scales = [a.rank for a in adapters], [a.scale for a in adapters]
        segments = Segments.of(spans, ranks, scales, block_tokens, device)
        table = SegmentTable.of(segments, a_offsets, b_offsets, columns)
        bank = draw(elements)
        for adapter, a_row, b_row in zip(adapters, a_offsets, b_offsets, strict=True):
            for a, b, size in zip(a_row, b_row, sizes, strict=True):
                if a >= 0:  # every matrix product then has entries near one
                    bank[a : a + adapter.rank * inputs] /= inputs**0.5
                    bank[b : b + adapter.rank * size] /= adapter.rank**0.5
        a_offsets, b_offsets, elements = _offsets(adapters, inputs, sizes, 2 * padding)
        return Problem(
            draw(token + tail, inputs),
            draw(token + tail, sum(sizes)),
            draw(token + tail, sum(sizes)),
            bank,
            table,
            torch.randn(elements, generator=generator, device=device),
            SegmentTable.of(segments, a_offsets, b_offsets, columns),
        )

    def errors(self, tiles: Tiles) -> dict[str, float]:
        """Largest error of y, dx and the gradients, each over its largest magnitude; the reference runs in float64."""
        from marlaas_kernels.triton import op

        x, dy, bank = self.x_TI.double(), self.dy_TO.double(), self.bank.double()
        y, gradients = self.y_TO.clone(), self.gradients.clone()
        h_STC = op.segment_lora_(y, self.x_TI, self.bank, self.table, tiles)
        dx = op.segment_lora_backward(
            self.dy_TO, self.x_TI, h_STC, self.bank, self.table, gradients, self.gradient_table, tiles
        )
        wanted_dx, dbank = segment_lora_backward(dy, x, bank, self.table)
        wanted_gradients = self.gradients.double()
        for matrix in ("a", "b"):
            _move(dbank, self.table, wanted_gradients, self.gradient_table, matrix, x.shape[1])
        return {
            "y": _error(y, self.y_TO.double() + segment_lora(x, bank, self.table)),
            "dx": _error(dx, wanted_dx),
            "gradients": _error(gradients, wanted_gradients),
        }

    def poisoned(self, segment: int) -> Problem:
        """The same with one adapter that is not a number."""
        bank, rank = self.bank.clone(), int(self.table.segments.rank_G[segment])
        for part, (_, size) in enumerate(self.table.columns):
            a, b = int(self.table.a_offset_GP[segment, part]), int(self.table.b_offset_GP[segment, part])
            if a >= 0:
                bank[a : a + rank * self.x_TI.shape[1]] = torch.nan
                bank[b : b + rank * size] = torch.nan
        return replace(self, bank=bank)


def _offsets(
    adapters: Sequence[Adapter], inputs: int, sizes: Sequence[int], padding: int
) -> tuple[list[list[int]], list[list[int]], int]:
    """Offsets of A and B by adapter and part, and the bank's elements: targeted parts' As in a row, then their Bs."""
    a_offsets, b_offsets, at = [], [], 0
    for adapter in adapters:
        at += padding
        for offsets, lengths in ((a_offsets, [inputs] * len(sizes)), (b_offsets, sizes)):
            row = []
            for length, targeted in zip(lengths, adapter.targets, strict=True):
                row.append(at if targeted else -1)
                at += adapter.rank * length if targeted else 0
            offsets.append(row)
    return a_offsets, b_offsets, at + padding


def _move(
    source: torch.Tensor, table: SegmentTable, target: torch.Tensor, moved: SegmentTable, matrix: str, inputs: int
) -> None:
    """Adds the matrices of one bank to those of another with the same segments."""
    offsets, places = (getattr(t, f"{matrix}_offset_GP").tolist() for t in (table, moved))
    for segment, rank in enumerate(table.segments.rank_G.tolist()):
        for part, (_, size) in enumerate(table.columns):
            if offsets[segment][part] >= 0:
                length = rank * (inputs if matrix == "a" else size)
                place, offset = places[segment][part], offsets[segment][part]
                target[place : place + length] += source[offset : offset + length]


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    magnitude = float(wanted.abs().max())
    return float((got.double() - wanted).abs().max()) / (magnitude or 1.0)
