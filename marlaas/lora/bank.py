"""Slots: a fixed number of resident adapters in one stacked tensor, each slot owned by one key at a time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from marlaas.errors import AdapterError
from marlaas.lora.layout import AdapterLayout


@dataclass(frozen=True)
class Resident:
    """An adapter in a slot: its layout and its vector `[layout.size]`, a view into the bank."""

    slot: int
    layout: AdapterLayout
    vector: torch.Tensor


class AdapterBank:
    """`[slots, size]` weights. A slot is zeroed when it is given out; on a CPU, untouched slots take no memory."""

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.weights_SP = torch.empty(slots, size, dtype=dtype, device=device)
        self._resident: dict[Hashable, Resident] = {}
        self._free = list(range(slots - 1, -1, -1))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._resident

    def __getitem__(self, key: Hashable) -> Resident:
        return self._resident[key]

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def slot_size(self) -> int:
        """Elements of the largest adapter that fits."""
        return self.weights_SP.shape[1]

    def add(self, key: Hashable, layout: AdapterLayout) -> Resident:
        """Gives `key` a zeroed slot. Raises AdapterError when the adapter or one more does not fit."""
        assert key not in self._resident, f"{key} is resident already"
        if layout.size > self.weights_SP.shape[1]:
            raise AdapterError(
                f"{key}: an adapter of rank {layout.shape.rank} has {layout.size} parameters; "
                f"a slot has room for {self.weights_SP.shape[1]}"
            )
        if not self._free:
            raise AdapterError(f"{key}: all {self.weights_SP.shape[0]} adapter slots are taken")
        slot = self._free.pop()
        self.weights_SP[slot].zero_()
        self._resident[key] = Resident(slot, layout, self.weights_SP[slot, : layout.size])
        return self._resident[key]

    def remove(self, key: Hashable) -> None:
        """Frees the slot of `key`."""
        self._free.append(self._resident.pop(key).slot)
