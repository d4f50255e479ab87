"""Where each tensor of an adapter lies inside its slot: an adapter is one flat vector.

One vector an adapter makes the optimizer, clipping, copies and checkpoints single operations, and makes it
impossible for one adapter's optimizer to touch another's parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from marlaas.errors import AdapterError
from marlaas.transformer import Decoder, Part, Site

MOST_PARTS = 3  # of a fused linear: q, k and v


@dataclass(frozen=True)
class AdapterShape:
    """Rank, alpha and target modules of one adapter; the delta is scaled by alpha / rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class SiteSlice:
    """One fused linear's share of the vector: the A matrices of its targeted parts in a row, then their Bs.

    An A lies there as `[rank, in]` and a B as `[rank, out]`, so that both products read rows. index: of the linear
    in its layer.
    """

    index: int
    offset: int
    inputs: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class NamedTensor:
    """A view `[rank, in]` (A) or `[out, rank]` (B) of one module's matrix."""

    layer: int
    module: str
    matrix: str
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return f"layers.{self.layer}.{self.module}.{self.matrix}"


class AdapterLayout:
    """Offsets of an adapter's tensors for one base model and one shape. `size` is in elements."""

    def __init__(self, transformer: Decoder, shape: AdapterShape) -> None:
        """Raises AdapterError if the base model has none of the targets, or lacks one."""
        self.shape = shape
        self._sites: dict[tuple[int, str], SiteSlice] = {}
        self._offsets: dict[str, torch.Tensor] = {}
        offset = 0
        found: set[str] = set()
        seen: Counter[int] = Counter()
        for site in transformer.sites:
            seen[site.layer] += 1
            parts = tuple(p for p in site.parts if p.module in shape.targets)
            found.update(p.module for p in parts)
            if parts:
                self._sites[site_key(site)] = SiteSlice(seen[site.layer] - 1, offset, site.inputs, parts)
                offset += shape.rank * sum(site.inputs + p.size for p in parts)
        missing = [t for t in shape.targets if t not in found]
        if missing or not found:
            there = ", ".join(targets_of(transformer))
            raise AdapterError(f"lora.targets: {missing or 'none'} match no module of the base, which has {there}")
        self.size = offset
        self._table_shape = (len(seen), max(seen.values()), 2 + 2 * MOST_PARTS)

    def __contains__(self, site: Site) -> bool:
        return site_key(site) in self._sites

    def site(self, site: Site) -> SiteSlice:
        """The slice of a targeted fused linear."""
        return self._sites[site_key(site)]

    def bounds(self, site: Site) -> tuple[int, int]:
        """Where the site's part of the vector begins and ends."""
        s = self.site(site)
        return s.offset, s.offset + self.shape.rank * sum(s.inputs + part.size for part in s.parts)

    def matrices(self, vector: torch.Tensor, site: Site) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Views into `vector` (1-D): A `[parts * rank, in]` and one B `[out, rank]`, transposed, a part."""
        s, rank = self.site(site), self.shape.rank
        rows = len(s.parts) * rank
        a = vector.narrow(0, s.offset, rows * s.inputs).view(rows, s.inputs)
        offset, b = s.offset + rows * s.inputs, []
        for part in s.parts:
            b.append(vector.narrow(0, offset, part.size * rank).view(rank, part.size).T)
            offset += part.size * rank
        return a, b

    @cached_property
    def table(self) -> np.ndarray:
        """int64 `[layers, sites, 2 + 2 * parts]`: offset (-1: not targeted), number of parts, each part's columns."""
        table = np.full(self._table_shape, -1, dtype=np.int64)
        for (layer, _), s in self._sites.items():
            columns = [number for part in s.parts for number in (part.start, part.size)]
            table[layer, s.index, : 2 + len(columns)] = [s.offset, len(s.parts), *columns]
        return table

    def offsets(self, site: Site) -> torch.Tensor:
        """int64 `[2, layers, parts]`: where each part's A and B begin at the site's kind of linear, or -1."""
        kind = site.parts[0].module
        if kind not in self._offsets:
            layers = [self._part_offsets(self._sites.get((layer, kind))) for layer in range(self._table_shape[0])]
            rows = [[layer.get(part, (-1, -1)) for part in site.parts] for layer in layers]
            self._offsets[kind] = torch.tensor(rows).permute(2, 0, 1)
        return self._offsets[kind]

    def _part_offsets(self, slice_: SiteSlice | None) -> dict[Part, tuple[int, int]]:
        if slice_ is None:
            return {}
        rank, found = self.shape.rank, {}
        a, b = slice_.offset, slice_.offset + len(slice_.parts) * self.shape.rank * slice_.inputs
        for part in slice_.parts:
            found[part] = (a, b)
            a, b = a + rank * slice_.inputs, b + rank * part.size
        return found

    def tensors(self, vector: torch.Tensor, sites: Sequence[Site]) -> Iterator[NamedTensor]:
        """Every matrix of the adapter as a view into `vector`, layer by layer."""
        for site in sites:
            if site in self:
                a, b = self.matrices(vector, site)
                for i, part in enumerate(self.site(site).parts):
                    rows = slice(i * self.shape.rank, (i + 1) * self.shape.rank)
                    yield NamedTensor(site.layer, part.module, "A", a[rows])
                    yield NamedTensor(site.layer, part.module, "B", b[i])

    @cached_property
    def scale(self) -> float:
        return self.shape.scale

    def initialise_(self, vector: torch.Tensor, sites: Sequence[Site], seed: int) -> None:
        """PEFT's default start, in place: A uniform as Kaiming (a = sqrt 5), B zero. The same on every device."""
        generator = torch.Generator().manual_seed(seed)
        vector.zero_()
        for named in self.tensors(vector, sites):
            if named.matrix == "A":
                bound = 1 / math.sqrt(named.tensor.shape[1])
                drawn = torch.rand(named.tensor.shape, generator=generator)
                named.tensor.copy_(drawn * (2 * bound) - bound)


def targets_of(transformer: Decoder) -> tuple[str, ...]:
    """The modules of the base model that take LoRA."""
    return tuple(dict.fromkeys(part.module for site in transformer.sites for part in site.parts))


def site_key(site: Site) -> tuple[int, str]:
    """What names a fused linear: its layer and its first module."""
    return site.layer, site.parts[0].module
