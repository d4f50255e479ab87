"""Who is served next on a shared device: by priority, then by weighted shares of the batch, then by device time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Owner(Generic[T]):
    """device_time: virtual, in seconds for a weight of 1. working: items that use the device outside of the batch."""

    weight: float = 1.0
    cap: int | None = None
    priority: int = 0
    device_time: float = 0.0
    running: int = 0
    working: int = 0
    waiting: deque[T] = field(default_factory=deque)

    @property
    def active(self) -> bool:
        return bool(self.waiting) or self.running > 0 or self.working > 0

    @property
    def capped(self) -> bool:
        return self.cap is not None and self.running >= self.cap


class FairQueue(Generic[T]):
    """Deals the places of a running batch, and keeps everybody's device time.

    Places go to the owner with the fewest of them for its weight: tokens are dealt out at equal rates, since every
    place yields a token a step (max-min fairness, Bertsekas and Gallager 1992, 6.5.2). Ties go to the least device
    time. An owner that was idle starts level with those that are active: it neither saves up nor starves anyone.
    """

    def __init__(self, may_run: Callable[[T], bool] = lambda item: True) -> None:
        """may_run: says of an owner's first item whether it could run now, were there a place."""
        self._owners: dict[str, _Owner[T]] = {}
        self._may_run = may_run

    def set_share(self, owner: str, weight: float, cap: int | None, priority: int = 0) -> None:
        """Sets an owner's weight, how many of its items may run at once, and its priority: higher goes first."""
        entry = self._owners.setdefault(owner, _Owner())
        entry.weight, entry.cap, entry.priority = weight, cap, priority

    def forget(self, owner: str) -> None:
        """Drops an owner that has nothing waiting or running."""
        entry = self._owners.get(owner)
        if entry is not None and not entry.active:
            del self._owners[owner]

    def __len__(self) -> int:
        return sum(len(o.waiting) for o in self._owners.values())

    def owners(self) -> list[str]:
        """All owners that are known."""
        return list(self._owners)

    @property
    def competing(self) -> bool:
        """Whether there is more than one owner."""
        return len(self._owners) > 1

    def waiting(self, owner: str) -> int:
        """How many of the owner's items wait."""
        return len(self._owners[owner].waiting) if owner in self._owners else 0

    def running(self, owner: str) -> int:
        """How many of the owner's items run."""
        return self._owners[owner].running if owner in self._owners else 0

    def put(self, owner: str, item: T) -> None:
        """Adds an item at the end of the owner's line."""
        self._enter(owner).waiting.append(item)

    def put_back(self, owner: str, item: T) -> None:
        """A running item that was preempted: it waits again, at the head of the owner's line."""
        entry = self._owners[owner]
        entry.running -= 1
        entry.waiting.appendleft(item)

    def next_owner(self) -> str | None:
        """Whose item would be taken next; None if nobody waits, or all who do are at their caps."""
        ready = [
            (-o.priority, (o.running + 1) / o.weight, o.device_time, name)
            for name, o in self._owners.items()
            if o.waiting and not o.capped and self._may_run(o.waiting[0])
        ]
        return min(ready)[-1] if ready else None

    def head(self) -> T | None:
        """The item that would be taken next."""
        owner = self.next_owner()
        return None if owner is None else self._owners[owner].waiting[0]

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """The next item to run, or None if there is none or the next does not fit.

        What does not fit is not overtaken, so that nothing large starves.
        """
        name = self.next_owner()
        if name is None or not fits(self._owners[name].waiting[0]):
            return None
        entry = self._owners[name]
        entry.running += 1
        return entry.waiting.popleft()

    def victim(self, owner: str) -> str | None:
        """Who should give up a place for `owner`: somebody of lower priority, or whose share stays the larger one."""
        wanting = self._owners[owner]
        after = (wanting.running + 1) / wanting.weight
        candidates = [
            (o.priority, -o.running / o.weight, -o.device_time, name)
            for name, o in self._owners.items()
            if o is not wanting
            and o.running
            and (
                o.priority < wanting.priority
                or (o.priority == wanting.priority and (o.running - 1) / o.weight >= after)
            )
        ]
        return min(candidates)[-1] if candidates else None

    def leave(self, owner: str) -> None:
        """One of the owner's running items has ended."""
        self._owners[owner].running -= 1

    def begin_work(self, owner: str) -> None:
        """The owner has work for the device outside of the batch (an update): it is active until `end_work`."""
        self._enter(owner).working += 1

    def end_work(self, owner: str) -> None:
        """Ends one `begin_work`."""
        self._owners[owner].working -= 1

    def charge(self, owner: str, seconds: float) -> None:
        """Counts device seconds that the owner has used."""
        entry = self._owners.get(owner)
        if entry is not None:
            entry.device_time += seconds / entry.weight

    def lead(self, owner: str) -> float:
        """How far the owner's device time, by weight, is ahead of the mean of those in the batch; in seconds."""
        others = [o.device_time for name, o in self._owners.items() if o.running and name != owner]
        return self._owners[owner].device_time - sum(others) / len(others) if others else 0.0

    def order(self, owners: list[str]) -> list[str]:
        """The owners in the order in which work outside of the batch should be done."""
        return sorted(owners, key=lambda name: (-self._owners[name].priority, self._owners[name].device_time))

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Removes and returns the waiting items that are unwanted."""
        removed = []
        for entry in self._owners.values():
            removed += [item for item in entry.waiting if unwanted(item)]
            entry.waiting = deque(item for item in entry.waiting if not unwanted(item))
        return removed

    def _enter(self, owner: str) -> _Owner[T]:
        entry = self._owners.setdefault(owner, _Owner())
        if not entry.active:
            active = [o.device_time for o in self._owners.values() if o is not entry and o.active]
            entry.device_time = max(entry.device_time, min(active, default=entry.device_time))
        return entry
