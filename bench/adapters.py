"""Adapters with random weights for the benchmarks, far enough from zero to change replies."""

from __future__ import annotations

from pathlib import Path

import torch

from marlaas.lora import AdapterLayout, AdapterShape, export_peft
from marlaas.models import BaseModel
from marlaas.specs import TARGETS

RANK = 16
_DEVIATION = 0.02  # of A and B; with it a delta is about a tenth of what the linear layer makes


def random_adapters(base: BaseModel, count: int, rank: int = RANK) -> tuple[AdapterLayout, list[torch.Tensor]]:
    """On all linears, scaled by 2: the layout, and `count` vectors in the model's dtype."""
    layout = AdapterLayout(base.transformer, AdapterShape(rank, 2.0 * rank, TARGETS))
    generator = torch.Generator().manual_seed(0)
    dtype = base.transformer.dtype
    vectors = [(torch.randn(layout.size, generator=generator) * _DEVIATION).to(dtype) for _ in range(count)]
    return layout, vectors


def write_adapters(base: BaseModel, layout: AdapterLayout, vectors: list[torch.Tensor], folder: Path) -> list[str]:
    """Writes each adapter as a PEFT folder below `folder`; returns the paths."""
    paths = []
    for i, vector in enumerate(vectors):
        path = folder / f"a{i}"
        path.mkdir()
        for name, content in export_peft(layout, vector, base.transformer, str(base.folder)).items():
            (path / name).write_bytes(content)
        paths.append(str(path))
    return paths
