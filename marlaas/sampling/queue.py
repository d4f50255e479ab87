"""Who is served next: weighted fair sharing of tokens between owners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _Owner(Generic[T]):
    weight: float = 1.0
    cap: int | None = None
    virtual_time: float = 0.0
    running: int = 0
    waiting: deque[tuple[T, int]] = field(default_factory=deque)


class FairQueue(Generic[T]):
    """Start-time fair queueing: the owner that has had the fewest tokens for its weight goes next.

    Costs are in tokens, charged when an item starts and settled when it ends. An owner that was idle starts level
    with those that are busy: it neither saves up nor starves anyone.
    """

    def __init__(self) -> None:
        self._owners: dict[str, _Owner[T]] = {}

    def set_share(self, owner: str, weight: float, cap: int | None) -> None:
        """Sets an owner's weight and how many of its items may run at once."""
        entry = self._owners.setdefault(owner, _Owner())
        entry.weight, entry.cap = weight, cap

    def forget(self, owner: str) -> None:
        """Drops an owner that has nothing waiting or running."""
        entry = self._owners.get(owner)
        if entry is not None and not entry.waiting and not entry.running:
            del self._owners[owner]

    def __len__(self) -> int:
        return sum(len(o.waiting) for o in self._owners.values())

    def waiting(self, owner: str) -> int:
        """How many of the owner's items wait."""
        return len(self._owners[owner].waiting) if owner in self._owners else 0

    def put(self, owner: str, item: T, cost: int) -> None:
        """Adds an item that is expected to cost that many tokens."""
        entry = self._owners.setdefault(owner, _Owner())
        if not entry.waiting and not entry.running:
            busy = [o.virtual_time for o in self._owners.values() if o is not entry and (o.waiting or o.running)]
            entry.virtual_time = max(entry.virtual_time, min(busy, default=entry.virtual_time))
        entry.waiting.append((item, cost))

    def take(self, fits: Callable[[T], bool]) -> T | None:
        """The next item to run, or None if all owners are idle or at their cap, or the next does not fit.

        What does not fit is not overtaken, so that nothing large starves.
        """
        ready = [
            (o.virtual_time, name)
            for name, o in self._owners.items()
            if o.waiting and (o.cap is None or o.running < o.cap)
        ]
        if not ready:
            return None
        entry = self._owners[min(ready)[1]]
        if not fits(entry.waiting[0][0]):
            return None
        item, cost = entry.waiting.popleft()
        entry.virtual_time += cost / entry.weight
        entry.running += 1
        return item

    def settle(self, owner: str, expected: int, used: int) -> None:
        """Ends one running item of the owner and corrects its charge to what was used."""
        entry = self._owners[owner]
        entry.running -= 1
        entry.virtual_time -= (expected - used) / entry.weight

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Removes and returns the waiting items that are unwanted."""
        removed = []
        for entry in self._owners.values():
            removed += [item for item, _ in entry.waiting if unwanted(item)]
            entry.waiting = deque((item, cost) for item, cost in entry.waiting if not unwanted(item))
        return removed
