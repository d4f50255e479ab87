"""The time of a run: seconds since its start, without the pauses in which nothing of it was in progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from storage import StageRecord

PAUSE_STAGES = 10

Interval = tuple[float, float]


@dataclass(frozen=True)
class Clock:
    """start, end: of the run, seconds since the epoch. pauses: what is cut out, in order, likewise."""

    start: float
    end: float
    pauses: tuple[Interval, ...]

    @property
    def paused_seconds(self) -> float:
        """The length of all pauses."""
        return sum(end - start for start, end in self.pauses)

    @property
    def wall_seconds(self) -> float:
        """From start to end without the pauses."""
        return self.end - self.start - self.paused_seconds

    def seconds(self, times: Sequence[float] | np.ndarray) -> np.ndarray:
        """Seconds since the epoch `[n]` as seconds since the start without pauses, float64 `[n]`."""
        moments = np.asarray(times, dtype=np.float64)
        paused = np.zeros_like(moments)
        for start, end in self.pauses:
            paused += np.clip(moments, start, end) - start
        return moments - self.start - paused

    def between(self, start: float, end: float) -> float:
        """Seconds from one moment to another, both since the epoch, without pauses."""
        first, last = self.seconds([start, end])
        return float(last - first)


def clock(records: Sequence[StageRecord]) -> Clock:
    """The clock of a run's records, at least one. A pause is longer than PAUSE_STAGES times the median stage."""
    shortest = PAUSE_STAGES * median(r.end - r.start for r in records)
    busy = merged((r.start, r.end) for r in records)
    gaps = [(before[1], after[0]) for before, after in pairwise(busy)]
    pauses = tuple((start, end) for start, end in gaps if end - start > shortest > 0)
    return Clock(busy[0][0], busy[-1][1], pauses)


def length_text(seconds: float) -> str:
    """A time for people: 12.34 as "12.3 s", 117 as "1 min 57 s", 3700 as "1 h 2 min"."""
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    if seconds < 3599.5:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    return "{} h {} min".format(*divmod(round(seconds / 60), 60))


def merged(intervals: Iterable[Interval], apart: float = 0.0) -> list[Interval]:
    """The union of intervals, in order; those at most `apart` from each other become one."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start - union[-1][1] <= apart:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    return sum(end - start for start, end in merged(intervals))
