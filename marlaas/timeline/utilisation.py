"""How well a run used its accelerators, and how fairly: figures from its stage records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np
from pydantic import BaseModel, ConfigDict

from marlaas.timeline.clock import Clock, clock, covered
from marlaas.timeline.runs import Run
from storage import StageRecord
from storage.stages import Stage

STAGES: tuple[Stage, ...] = ("rollout", "interact", "update", "publish", "evaluate")


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TenantUse(_Figures):
    """One tenant of a run. Seconds are without pauses; shares are between 0 and 1.

    span_seconds: from its first stage to its last. sampled_tokens: of rollouts and evaluations, as tokens_per_second
    over the span. device_share: of the device seconds of all tenants. step_seconds: from the start of a step's
    rollout to the end of its update, None before the first update. environment_share: of the span, in which an
    interact stage was in progress. call_seconds: mean wait for one call of the environment, None without calls.
    """

    tenant: str
    steps: int
    span_seconds: float
    sampled_tokens: int
    trained_tokens: int
    tokens_per_second: float
    device_seconds: float
    device_share: float
    step_seconds_mean: float | None
    step_seconds_median: float | None
    environment_share: float
    call_seconds: float | None


class RunUse(_Figures):
    """A whole run. wall_seconds are without its pauses, the times in which nothing of it was in progress.

    busy_share: device seconds over wall seconds times devices; busy_by_stage: the same, of each stage that used a
    device. overlap: mean number of tenants with a stage in progress. fairness: Jain's index over the tenants' device
    seconds in the fair_seconds in which all were active; None if there were none, or none used a device in them.
    silent: tenants without records.
    """

    run: str
    devices: int
    wall_seconds: float
    pauses: int
    paused_seconds: float
    device_seconds: float
    busy_share: float
    busy_by_stage: dict[Stage, float]
    overlap: float
    fairness: float | None
    fair_seconds: float
    tenants: tuple[TenantUse, ...]
    silent: tuple[str, ...]


def utilisation(run: Run, devices: int = 1) -> RunUse:
    """The figures of a run on a pool of `devices` accelerators."""
    records = run.records
    time = clock(records)
    whole = time.wall_seconds * devices
    total = sum(r.device_seconds for r in records)
    by_stage = {stage: sum(r.device_seconds for r in records if r.stage == stage) for stage in STAGES}
    fairness, fair_seconds = _fairness(run.tenants, time)
    return RunUse(
        run=run.name,
        devices=devices,
        wall_seconds=time.wall_seconds,
        pauses=len(time.pauses),
        paused_seconds=time.paused_seconds,
        device_seconds=total,
        busy_share=_ratio(total, whole),
        busy_by_stage={stage: _ratio(seconds, whole) for stage, seconds in by_stage.items() if seconds},
        overlap=_ratio(sum(covered(_intervals(rs)) for rs in run.tenants.values()), time.wall_seconds),
        fairness=fairness,
        fair_seconds=fair_seconds,
        tenants=tuple(_tenant(name, rs, time, total) for name, rs in run.tenants.items()),
        silent=run.silent,
    )


def jain(shares: Sequence[float]) -> float:
    """Jain's fairness index, (sum x)^2 / (n sum x^2): 1 when all of n get the same, 1/n when one gets everything.

    Jain, Chiu and Hawe, "A quantitative measure of fairness and discrimination for resource allocation in shared
    computer systems", DEC-TR-301, 1984. Raises ValueError unless some share is positive and none is negative.
    """
    if not any(shares) or min(shares) < 0:
        raise ValueError(f"shares {list(shares)} must not be negative, and not all 0")
    return sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares))


def spread(records: Sequence[StageRecord], time: Clock, edges: np.ndarray) -> np.ndarray:
    """Device seconds in each bin, float64 `[len(edges) - 1]`, each stage's spread evenly over its interval.

    edges: increasing, seconds of `time`, from the start of the first record to the end of the last or beyond them.
    """
    start = time.seconds([r.start for r in records])
    length = time.seconds([r.end for r in records]) - start
    used = np.array([r.device_seconds for r in records])
    # One pass an edge keeps the memory at one array of records; a stage without length falls into one bin.
    until = np.array([(used * np.clip((edge - start) / np.maximum(length, 1e-9), 0, 1)).sum() for edge in edges[:-1]])
    return np.diff(np.append(until, used.sum()))


def _fairness(tenants: Mapping[str, Sequence[StageRecord]], time: Clock) -> tuple[float | None, float]:
    """Jain's index of the device seconds while all tenants were active, and how long that was."""
    start = max(min(r.start for r in records) for records in tenants.values())
    end = min(max(r.end for r in records) for records in tenants.values())
    if end <= start:
        return None, 0.0
    used = [sum(r.device_seconds * _inside(r, start, end) for r in records) for records in tenants.values()]
    return (jain(used) if any(used) else None), time.between(start, end)


def _inside(record: StageRecord, start: float, end: float) -> float:
    """The share of a stage's interval that lies between two moments."""
    if record.end <= record.start:
        return float(start <= record.start <= end)
    return max(0.0, min(record.end, end) - max(record.start, start)) / (record.end - record.start)


def _tenant(name: str, records: Sequence[StageRecord], time: Clock, total: float) -> TenantUse:
    span = time.between(min(r.start for r in records), max(r.end for r in records))
    sampled = sum(r.tokens for r in records if r.stage in ("rollout", "evaluate"))
    used = sum(r.device_seconds for r in records)
    steps = _step_seconds(records, time)
    interact = [r for r in records if r.stage == "interact"]
    calls = sum(r.calls for r in interact)
    return TenantUse(
        tenant=name,
        steps=len(steps),
        span_seconds=span,
        sampled_tokens=sampled,
        trained_tokens=sum(r.tokens for r in records if r.stage == "update"),
        tokens_per_second=_ratio(sampled, span),
        device_seconds=used,
        device_share=_ratio(used, total),
        step_seconds_mean=fmean(steps) if steps else None,
        step_seconds_median=median(steps) if steps else None,
        environment_share=_ratio(covered(_intervals(interact)), span),
        call_seconds=sum(r.waited_seconds for r in interact) / calls if calls else None,
    )


def _step_seconds(records: Sequence[StageRecord], time: Clock) -> list[float]:
    """How long each step took that has an update; of a step that was done again, the last time counts."""
    in_order = sorted(records, key=lambda r: r.start)
    sampled = {r.step: r.start for r in in_order if r.stage == "rollout"}
    updates = {r.step: r for r in in_order if r.stage == "update"}
    return [time.between(sampled.get(step, update.start), update.end) for step, update in updates.items()]


def _intervals(records: Sequence[StageRecord]) -> list[tuple[float, float]]:
    return [(r.start, r.end) for r in records]


def _ratio(part: float, whole: float) -> float:
    """part / whole; 0 of nothing."""
    return part / whole if whole else 0.0
