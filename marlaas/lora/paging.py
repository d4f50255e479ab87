"""More adapters than slots: all of them in host memory, those in use in the slots of the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator

import torch

from marlaas.errors import AdapterError
from marlaas.lora.bank import AdapterBank, Resident
from marlaas.lora.layout import AdapterLayout


class PagedAdapters:
    """Adapters by name. One is copied into a slot when it is needed, in place of the one that was used longest ago."""

    def __init__(self, bank: AdapterBank) -> None:
        self._bank = bank
        self._stored: dict[str, tuple[AdapterLayout, torch.Tensor]] = {}
        self._resident: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __getitem__(self, name: str) -> Resident:
        """The slot of an adapter that is resident."""
        return self._bank[name]

    @property
    def weights_SP(self) -> torch.Tensor:
        """The vectors of all slots."""
        return self._bank.weights_SP

    @property
    def resident(self) -> int:
        """How many adapters are in slots."""
        return len(self._resident)

    @property
    def paged(self) -> int:
        """How many adapters are in host memory only."""
        return len(self._stored) - len(self._resident)

    def add(self, name: str, layout: AdapterLayout, vector: torch.Tensor) -> None:
        """Keeps a copy of `vector` `[layout.size]`, in the bank's dtype. Raises AdapterError if no slot is so large."""
        assert name not in self._stored, f"{name} is known already"
        if layout.size > self._bank.slot_size:
            raise AdapterError(
                f"{name}: an adapter of rank {layout.shape.rank} has {layout.size} parameters; "
                f"a slot has room for {self._bank.slot_size}"
            )
        self._stored[name] = (layout, vector.detach().to("cpu", self._bank.weights_SP.dtype, copy=True))

    def remove(self, name: str) -> None:
        """Forgets an adapter; its slot becomes free."""
        del self._stored[name]
        if name in self._resident:
            self._evict(name)

    def page_in(self, name: str, in_use: Container[str]) -> bool:
        """Makes an adapter resident; False if every slot holds one that is in use."""
        if name not in self._resident:
            if not self._bank.free:
                idle = next((other for other in self._resident if other not in in_use), None)
                if idle is None:
                    return False
                self._evict(idle)
            layout, vector = self._stored[name]
            self._bank.add(name, layout).vector.copy_(vector)
            self._resident[name] = None
        self._resident.move_to_end(name)
        return True

    def _evict(self, name: str) -> None:
        del self._resident[name]
        self._bank.remove(name)
