"""What the one device does next when it both samples and trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceLoad:
    """updates: waiting, of how many open jobs; oldest_seconds: how long the first of them has waited."""

    updates: int
    open_jobs: int
    oldest_seconds: float
    sampling: bool


def should_train(load: DeviceLoad, coalesce_seconds: float) -> bool:
    """Train as soon as no more company can be expected: all jobs are here, nothing is sampling, or time is up.

    An update is what a job waits for before its next rollout, and a training pass costs the same per token
    whatever its size, so waiting longer only empties the sampling batch.
    """
    if load.updates == 0:
        return False
    return load.updates >= load.open_jobs or not load.sampling or load.oldest_seconds >= coalesce_seconds
