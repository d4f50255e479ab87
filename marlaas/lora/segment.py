"""A stretch of a flat batch that one adapter has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from marlaas.lora.layout import AdapterLayout


@dataclass(frozen=True)
class Segment:
    """Tokens `[start, end)` of one adapter.

    weights: the adapter's vector in the model's dtype; gradient: where its fp32 gradient is added up, if it trains;
    slot: where the vector lies in the bank that the batch is given.
    """

    start: int
    end: int
    layout: AdapterLayout
    weights: torch.Tensor
    gradient: torch.Tensor | None = None
    slot: int | None = None
