"""The device memory of training: a slot holds one job's weights, gradient and moments; other jobs wait on the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

import torch

from marlaas.errors import AdapterError


@dataclass(frozen=True)
class JobVectors:
    """fp32 `[size]` each: the master weights, their gradient, and AdamW's first and second moment.

    rounded: what passes read, room for the weights in the model's dtype; in fp32 the weights themselves.
    """

    weights: torch.Tensor
    gradient: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    rounded: torch.Tensor


@dataclass
class _Place:
    size: int
    slot: int | None
    stored: torch.Tensor | None  # `[3, size]` on the host: weights and moments; a gradient lives within one update


class TrainingSlots:
    """`slots` jobs on the device at a time, any number on the host; the one used longest ago makes room."""

    def __init__(self, slots: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """size: elements of the largest adapter; dtype: the model's.

        On a CPU, slots that were never used take no memory. Each kind of vector lies in one tensor, so that kernels
        reach all of a pass's adapters by offsets.
        """
        self._slots = torch.empty(slots, 4, size, device=device)
        rounded = dtype != torch.float32
        self._rounded = torch.empty(slots, size, dtype=dtype, device=device) if rounded else self._slots[:, 0]
        self._free = list(range(slots - 1, -1, -1))
        self._jobs: OrderedDict[str, _Place] = OrderedDict()

    def __contains__(self, job: str) -> bool:
        return job in self._jobs

    @property
    def paged(self) -> int:
        """How many jobs are on the host."""
        return sum(place.slot is None for place in self._jobs.values())

    def add(self, job: str, size: int) -> None:
        """Takes a job in, on the host, with zeros. Raises AdapterError when no slot is so large."""
        if size > self._slots.shape[2]:
            raise AdapterError(f"{job}: an adapter of {size} parameters; a slot has room for {self._slots.shape[2]}")
        self._jobs[job] = _Place(size, None, torch.zeros(3, size))

    def remove(self, job: str) -> None:
        """Forgets a job."""
        place = self._jobs.pop(job)
        if place.slot is not None:
            self._free.append(place.slot)

    def page_in(self, job: str, in_use: Container[str]) -> bool:
        """Brings a job onto the device; False if every slot holds one that is in use."""
        place = self._jobs[job]
        if place.slot is None:
            if not self._free and not self._page_out_one(in_use):
                return False
            assert place.stored is not None
            place.slot = self._free.pop()
            held = self._slots[place.slot, :, : place.size]
            held[0].copy_(place.stored[0])
            held[1].zero_()
            held[2:].copy_(place.stored[1:])
            place.stored = None
        self._jobs.move_to_end(job)
        return True

    def __getitem__(self, job: str) -> JobVectors:
        """The vectors of a job that is on the device."""
        place = self._jobs[job]
        assert place.slot is not None, f"{job} is not on the device"
        weights, gradient, first, second = self._slots[place.slot, :, : place.size].unbind()
        return JobVectors(weights, gradient, first, second, self._rounded[place.slot, : place.size])

    def read(self, job: str) -> torch.Tensor:
        """A copy `[3, size]` on the host of weights, first and second moment, wherever they are."""
        place = self._jobs[job]
        if place.stored is not None:
            return place.stored.clone()
        assert place.slot is not None
        return self._slots[place.slot, [0, 2, 3], : place.size].to("cpu", copy=True)

    def write(self, job: str, vectors: torch.Tensor) -> None:
        """Sets weights, first and second moment of a job that is on the host; `[3, size]`."""
        stored = self._jobs[job].stored
        assert stored is not None, f"{job} is on the device"
        stored.copy_(vectors)

    def _page_out_one(self, in_use: Container[str]) -> bool:
        for job, place in self._jobs.items():
            if place.slot is not None and job not in in_use:
                place.stored = self.read(job)
                self._free.append(place.slot)
                place.slot = None
                return True
        return False
