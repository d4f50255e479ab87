"""A tenant's loop on a pool without orchestration: rollouts and updates side by side, as its flow runs them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from marlaas.environments import Environment
from marlaas.errors import MarlaasError
from marlaas.pool import Pool
from marlaas.rollouts import Collected, collect, training_batch
from marlaas.specs import TenantSpec
from marlaas.training.trainer import JobState

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
    """A tenant's job; it can be run again from where its last step left it."""

    def __init__(
        self, pool: Pool, spec: TenantSpec, environment: Environment, on_step: Callable[[TenantStep], None]
    ) -> None:
        self.result = TenantResult(spec.name)
        self._pool, self._spec, self._environment, self._on_step = pool, spec, environment, on_step
        self._job = f"{spec.name}/bench"
        self._state: JobState | None = None
        self._version = 0
        self._moved = asyncio.Condition()

    async def run(self, steps: int | None, restarts: bool) -> None:
        while True:
            try:
                return await self._run(steps)
            except MarlaasError as error:
                self.result.failures[str(error)] += 1
                if not restarts:
                    raise
            await asyncio.sleep(RESTART_SECONDS)

    async def _run(self, steps: int | None) -> None:
        """Trains to the last step; for ever if `steps` is None. The job is closed again, whatever happens."""
        self._version = await self._pool.open_job(self._job, self._spec, self._state)
        rolled: asyncio.Queue[asyncio.Task[_Rolled]] = asyncio.Queue(maxsize=self._spec.max_staleness + 1)
        try:
            async with asyncio.TaskGroup() as stages:
                stages.create_task(self._roll_out(steps, rolled, stages))
                stages.create_task(self._update(steps, rolled))
        except* MarlaasError as group:  # one reason is enough: the other stages were only cancelled for it
            raise _first(group) from None
        finally:
            await asyncio.shield(self._pool.close_job(self._job))

    async def _roll_out(
        self, steps: int | None, rolled: asyncio.Queue[asyncio.Task[_Rolled]], stages: asyncio.TaskGroup
    ) -> None:
        for step in itertools.count(self._version) if steps is None else range(self._version, steps):
            await self._may_roll_out(step)
            await rolled.put(stages.create_task(self._collect(step)))

    async def _may_roll_out(self, step: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: step - self._version <= self._spec.max_staleness)

    async def _collect(self, step: int) -> _Rolled:
        began, count = time.perf_counter(), self._spec.prompts_per_step
        examples, _ = await self._environment.training(count, self._spec.seed, step * count, frozenset())
        async with self._pool.lease(self._job) as adapter:
            found = await collect(self._pool, self._environment, self._spec, step, examples, adapter)
        return _Rolled(step, adapter.version, began, found)

    async def _update(self, steps: int | None, rolled: asyncio.Queue[asyncio.Task[_Rolled]]) -> None:
        while steps is None or self._version < steps:
            ready = await (await rolled.get())
            batch = training_batch(self._job, ready.found.rollouts, self._version - ready.version)
            trained = await self._pool.update(batch)
            ended = time.perf_counter()
            self._state = await self._pool.state(self._job)  # what a flow writes its checkpoint from
            step = TenantStep(
                step=ready.step,
                version=ready.version,
                began=ready.began,
                ended=ended,
                reward=trained.metrics["reward_mean"],
                tokens=sum(int(sample.mask.sum()) for sample in batch.samples),
                device_seconds=ready.found.device_seconds + trained.device_seconds,
                failures=sum(ready.found.failures.values()),
                split=ready.found.split,
            )
            self.result.steps.append(step)
            self._on_step(step)
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
    on_step: Callable[[TenantStep], None] = lambda step: None,
) -> TenantResult:
    """Trains the job `{name}/bench` for `steps` steps, or until the event: what is under way then is dropped.

    steps None: for ever. restarts: a tenant that fails comes back with the state of its last step, as often as it
    takes; otherwise its MarlaasError is raised.
    """
    runner = _Runner(pool, spec, environment, on_step)
    work = asyncio.create_task(runner.run(steps, restarts))
    waits: list[asyncio.Task[Any]] = [work, *([asyncio.create_task(until.wait())] if until is not None else [])]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return runner.result


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
