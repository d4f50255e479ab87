"""A tenant's loop on a pool without orchestration: rollouts and updates side by side, as its flow runs them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from marlaas.environments import Environment
from marlaas.errors import MarlaasError
from marlaas.pool import Pool
from marlaas.rollouts import Collected, collect
from marlaas.specs import TenantSpec
from marlaas.training.batch import TrainingBatch, TrainingSample
from marlaas.training.trainer import JobState
from storage import Rollout

RESTART_SECONDS = 0.1
"""How soon a tenant that failed and restarts is back."""


@dataclass(frozen=True)
class TenantStep:
    """A step that was trained. Times are of time.perf_counter: its rollouts began, its update ended.

    version: that sampled it. tokens: sampled. device_seconds: the tenant's share of its sampling and training passes.
    failures: conversations that are missing; split: those that became several samples.
    """

    step: int
    version: int
    began: float
    ended: float
    reward: float
    tokens: int
    device_seconds: float
    failures: int
    split: int


@dataclass
class TenantResult:
    """What a tenant did. failures: why it failed, each time that it did."""

    name: str
    steps: list[TenantStep] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step."""
        return [step.reward for step in self.steps]

    @property
    def tokens(self) -> int:
        """Sampled in all steps."""
        return sum(step.tokens for step in self.steps)

    @property
    def device_seconds(self) -> float:
        """Of all steps."""
        return sum(step.device_seconds for step in self.steps)


@dataclass(frozen=True)
class _Rolled:
    step: int
    version: int
    began: float
    found: Collected


class _Runner:
    """One run of a tenant's job, from its last step on."""

    def __init__(self, pool: Pool, job: str, spec: TenantSpec, environment: Environment, result: TenantResult) -> None:
        self._pool, self._job, self._spec, self._environment = pool, job, spec, environment
        self._result = result
        self._moved = asyncio.Condition()
        self._version = 0

    async def run(self, steps: int | None, state: JobState | None) -> None:
        """Trains to the last step; for ever if `steps` is None. The job is closed again, whatever happens."""
        self._version = await self._pool.open_job(self._job, self._spec, state)
        rolled: asyncio.Queue[asyncio.Task[_Rolled]] = asyncio.Queue(maxsize=self._spec.max_staleness + 1)
        try:
            async with asyncio.TaskGroup() as stages:
                stages.create_task(self._roll_out(steps, rolled, stages))
                stages.create_task(self._update(steps, rolled))
        except* MarlaasError as group:  # one reason is enough
            raise _first(group) from None
        finally:
            await asyncio.shield(self._pool.close_job(self._job))

    async def _roll_out(
        self, steps: int | None, rolled: asyncio.Queue[asyncio.Task[_Rolled]], stages: asyncio.TaskGroup
    ) -> None:
        step = self._version
        while steps is None or step < steps:
            async with self._moved:
                await self._moved.wait_for(lambda: step - self._version <= self._spec.max_staleness)  # noqa: B023
            await rolled.put(stages.create_task(self._collect(step)))
            step += 1

    async def _collect(self, step: int) -> _Rolled:
        began = time.perf_counter()
        count = self._spec.prompts_per_step
        examples, _ = await self._environment.training(count, self._spec.seed, step * count, frozenset())
        async with self._pool.lease(self._job) as adapter:
            found = await collect(self._pool, self._environment, self._spec, step, examples, adapter)
        return _Rolled(step, adapter.version, began, found)

    async def _update(self, steps: int | None, rolled: asyncio.Queue[asyncio.Task[_Rolled]]) -> None:
        while steps is None or self._version < steps:
            ready = await (await rolled.get())
            batch = training_batch(self._job, ready.found.rollouts, self._version - ready.version)
            trained = await self._pool.update(batch)
            self._result.steps.append(
                TenantStep(
                    step=ready.step,
                    version=ready.version,
                    began=ready.began,
                    ended=time.perf_counter(),
                    reward=trained.metrics["reward_mean"],
                    tokens=sum(int(sample.mask.sum()) for sample in batch.samples),
                    device_seconds=ready.found.device_seconds + trained.device_seconds,
                    failures=sum(ready.found.failures.values()),
                    split=ready.found.split,
                )
            )
            async with self._moved:
                self._version = trained.version
                self._moved.notify_all()


async def run_tenant(
    pool: Pool,
    spec: TenantSpec,
    environment: Environment,
    steps: int | None,
    *,
    until: asyncio.Event | None = None,
    restarts: bool = False,
    on_step: Callable[[], Awaitable[None]] | None = None,
) -> TenantResult:
    """Trains a tenant's job for `steps` steps, or until the event: what is under way then is dropped.

    restarts: a tenant that fails comes back with the state of its last step, as often as it takes; otherwise its
    error is raised.
    """
    result = TenantResult(spec.name)
    work = asyncio.create_task(_run(pool, spec, environment, steps, result, restarts))
    ending = asyncio.create_task(until.wait()) if until is not None else None
    try:
        await asyncio.wait({work, ending} if ending else {work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, ending):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, MarlaasError):
                    await task
    return result
