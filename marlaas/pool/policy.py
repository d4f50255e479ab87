"""What the one device does next when it both samples and trains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceLoad:
    """What there is to do.

    waiting: updates not begun, of how many open jobs; oldest_seconds: how long the first of them has waited. under_way:
    updates begun. sampling: whether requests wait or run. lead_seconds: how far the tenant that would train next is
    ahead, in device time, of those in the sampling batch. usual_seconds: the median update's device time.
    """

    waiting: int
    open_jobs: int
    oldest_seconds: float
    under_way: int
    sampling: bool
    lead_seconds: float
    usual_seconds: float


_USUAL_UPDATES_AHEAD = 2.0


def should_train(load: DeviceLoad, coalesce_seconds: float) -> bool:
    """Whether the next pass is a training pass; if not, it is a sampling step.

    An update is what a job waits for before its next rollout, and a training pass costs the same per token whatever
    its size, while a decoding step costs less per row the fuller it is. So updates go first, after a short wait for
    company: the batch fills meanwhile. But a tenant that has had the device for two usual updates more than those
    in the batch leaves it to them, so that a very large update delays nobody for long.
    """
    if load.waiting + load.under_way == 0:
        return False
    if not load.sampling:
        return True
    if load.usual_seconds > 0 and load.lead_seconds > _USUAL_UPDATES_AHEAD * load.usual_seconds:
        return False
    return load.under_way > 0 or load.waiting >= load.open_jobs or load.oldest_seconds >= coalesce_seconds
