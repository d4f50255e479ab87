"""One job of one tenant: its record in the store, its handles, and where it resumes."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from marlaas.checkpoints import decode_state
from marlaas.environments import Environment, Example, open_environment, question_key
from marlaas.errors import MarlaasError, SpecError
from marlaas.job_records import JobRecord, read_record
from marlaas.pool import Pool
from marlaas.progress import Board
from marlaas.specs import FleetSpec, StoreSpec, TenantSpec
from marlaas.tracking import JobRun, Tracker
from marlaas.training.trainer import JobState
from storage import (
    Commit,
    JobLayout,
    ObjectExists,
    ObjectStore,
    StageRecord,
    latest_commit,
    write_stages,
)
from storage.stages import Stage

# Fields that say how a job is run and not what it computes: they may change between a start and a resume.
_MAY_CHANGE = {"quota", "keep_checkpoints", "stage_timeout_seconds"}


@dataclass(frozen=True)
class RolloutRef:
    """A step's rollouts in the store. cursor: of the example stream, after this step.

    metrics: what the stage reports of itself, for the step's commit.
    """

    step: int
    key: str
    version: int
    cursor: int
    metrics: dict[str, float]


class Job:
    """The handles that the stages of one job share. Not a dataclass: Prefect would walk into it."""

    def __init__(
        self,
        spec: TenantSpec,
        layout: JobLayout,
        store: StoreSpec,
        pool: Pool,
        environment: Environment,
        board: Board,
    ) -> None:
        self.spec, self.layout, self.store_spec, self.store = spec, layout, store, store.open()
        self.pool, self.environment, self.board = pool, environment, board
        self.run: JobRun
        self.name = f"{layout.tenant}/{layout.job}"
        self.resumed: Commit | None = None
        self.version = 0
        self.step = 0
        self.held_out: frozenset[str] = frozenset()
        self._cursor = 0
        self._drawn = 0
        self._moved = asyncio.Condition()
        self._stages: list[StageRecord] = []

    @classmethod
    async def open(
        cls,
        fleet: FleetSpec,
        tenant: str,
        pool: Pool,
        tracker: Tracker,
        board: Board,
        on_wait: Callable[[], None] = lambda: None,
    ) -> Job:
        """Records the job, or finds it and restores its last committed step. Takes a slot in the pool.

        on_wait: called each time that the pool says why the job is not admitted yet.

        A job whose environment does not open is not recorded. Raises SpecError if the job was started with another
        spec; whatever it raises, nothing stays open.
        """
        spec = fleet.tenant(tenant)
        async with contextlib.AsyncExitStack() as undo:
            environment = open_environment(spec.environment)
            undo.push_async_callback(environment.close)
            job = cls(spec, JobLayout(tenant, fleet.job(spec)), fleet.store, pool, environment, board)
            if spec.evaluation.enabled:
                held_out = await environment.held_out(spec.evaluation.examples, spec.evaluation.seed)
                job.held_out = frozenset(question_key(e) for e in held_out)
            record = JobRecord(model=fleet.model, pool=fleet.pool, tenant=spec, base_fingerprint=pool.base_fingerprint)
            await asyncio.to_thread(_claim, job.store, job.layout, record)
            state = await asyncio.to_thread(job._restore)

            def wait(reason: str) -> None:
                board.set(tenant, stage="waiting", note=reason)
                on_wait()

            job.version = await pool.open_job(job.name, spec, state, wait)
            board.set(tenant, note="")
            undo.push_async_callback(pool.close_job, job.name)
            job.run = await asyncio.to_thread(job._track, tracker)
            undo.pop_all()
        return job

    def _restore(self) -> JobState | None:
        commit = self.resumed = latest_commit(self.store, self.layout)
        if commit is None:
            return None
        state, about = decode_state(self.store.get(commit.checkpoint), self.pool.base_fingerprint)
        self.step = self._drawn = commit.step + 1
        self._cursor = int(about.dataset_cursor["next"])
        return state

    def _track(self, tracker: Tracker) -> JobRun:
        parameters = self.spec.model_dump(mode="json", exclude={"name", "job"})
        base = {"base_model": self.pool.base_name, "base_fingerprint": self.pool.base_fingerprint[:12]}
        return tracker.job(self.layout.tenant, self.layout.job, parameters, base)

    @property
    def publication_due(self) -> bool:
        """Whether the newest version is one to publish."""
        return self.version > 0 and (self.version % self.spec.publish_every == 0 or self.version == self.spec.steps)

    async def may_roll_out(self, step: int) -> None:
        """Waits until sampling step `step` now keeps the rollouts at most `max_staleness` versions old."""
        async with self._moved:
            await self._moved.wait_for(lambda: step - self.version <= self.spec.max_staleness)

    async def draw(self, step: int) -> tuple[list[Example], int]:
        """The step's training examples, and the stream's cursor after them. Steps draw in their order."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._drawn == step)
            examples, self._cursor = await self.environment.training(
                self.spec.prompts_per_step, self.spec.seed, self._cursor, self.held_out
            )
            self._drawn += 1
            self._moved.notify_all()
            return examples, self._cursor

    async def advance(self, version: int) -> None:
        """The trainer made a version: sampling of later steps may start."""
        async with self._moved:
            self.version = version
            self._moved.notify_all()

    def record(self, stage: Stage, step: int, start: float, end: float, **numbers: Any) -> None:
        """Notes what a stage did and when (seconds since the epoch); `write_records` stores it."""
        about = {"tenant": self.layout.tenant, "job": self.layout.job, "stage": stage, "step": step}
        self._stages.append(StageRecord(**about, start=start, end=end, **numbers))

    def write_records(self) -> None:
        """Stores the stage records noted since the last time."""
        records, self._stages = self._stages, []
        if records:
            write_stages(self.store, self.layout, f"{records[0].step:08d}-{uuid.uuid4().hex[:12]}", records)

    async def close(self) -> None:
        """Stores what is noted, and gives the pool slot and the environment back."""
        try:
            await asyncio.to_thread(self.write_records)
        finally:
            await self.pool.close_job(self.name)
            await self.environment.close()


def _claim(store: ObjectStore, layout: JobLayout, record: JobRecord) -> None:
    """Writes the record of a new job; for a known one, checks that this is still the same."""
    try:
        store.create(layout.spec, record.model_dump_json(indent=2).encode())
        return
    except ObjectExists:
        known = read_record(store, layout)
    if known.base_fingerprint != record.base_fingerprint:
        raise MarlaasError(
            f"{layout.tenant}/{layout.job} was started on base model {known.base_fingerprint[:12]}; "
            f"this is {record.base_fingerprint[:12]}. Choose another job name"
        )
    before, now = (r.tenant.model_dump(mode="json", exclude=_MAY_CHANGE) for r in (known, record))
    changed = [_change(key, before, now) for key in now if before.get(key) != now[key]]
    if changed:
        problem = f"the job was started with another spec: {'; '.join(changed)}. Choose another job name"
        raise SpecError(f"{layout.tenant}/{layout.job}", [problem])


def _change(key: str, before: dict[str, Any], now: dict[str, Any]) -> str:
    return f"{key} was {before.get(key)!r} and is {now[key]!r}"
