"""The pool inside one process: one device that samples and trains on one copy of the base weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from marlaas.lora import import_peft
from marlaas.models import Progress
from marlaas.pool.engine import Engine
from marlaas.pool.protocol import ADMISSION_SECONDS, AdapterLease, adapter_name
from marlaas.pool.stats import PoolStats
from marlaas.pool.versions import Versions
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.specs import ModelSpec, PoolSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.trainer import JobState


class LocalPool:
    """See `Pool`."""

    def __init__(self, model: ModelSpec, pool: PoolSpec, progress: Progress = lambda line: None) -> None:
        """Loads the base model. Raises ModelError."""
        self._engine = Engine(model, pool, progress)
        self._versions = Versions()
        self._longest = pool.max_sequence_tokens

    @property
    def tokenizer(self) -> Any:
        return self._engine.base.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._engine.base.stop_ids

    @property
    def longest(self) -> int:
        return self._longest

    @property
    def base_name(self) -> str:
        return self._engine.base.name

    @property
    def base_fingerprint(self) -> str:
        return self._engine.base.fingerprint

    async def open_job(
        self,
        job: str,
        spec: TenantSpec,
        state: JobState | None = None,
        on_wait: Callable[[str], None] = lambda reason: None,
    ) -> int:
        while isinstance(outcome := await asyncio.wrap_future(self._engine.open(job, spec, state)), str):
            on_wait(outcome)
            await asyncio.sleep(ADMISSION_SECONDS)
        self._engine.set_quota(spec.name, spec.quota)
        await self._publish(job, outcome)
        return outcome

    async def close_job(self, job: str) -> None:
        self._engine.drop_requests(job)
        self._drop(self._versions.close(job))
        await asyncio.wrap_future(self._engine.close_job(job))
        await asyncio.wrap_future(self._engine.drop_requests(job))

    def lease(self, job: str) -> contextlib.AbstractAsyncContextManager[AdapterLease]:
        return self._versions.lease(job, self._drop)

    @contextlib.asynccontextmanager
    async def lease_files(self, name: str, files: Mapping[str, bytes]) -> AsyncIterator[AdapterLease]:
        layout, vector = await asyncio.to_thread(import_peft, files, self._engine.base.transformer)
        self._versions.hold_named(name)
        try:
            await asyncio.wrap_future(self._engine.add_adapter(name, layout.shape, vector))
            yield AdapterLease(name, int(name.rsplit("/v", 1)[1]))
        finally:
            self._drop(self._versions.release(name))

    async def generate(self, request: SamplingRequest) -> Sample:
        try:
            return await asyncio.wrap_future(self._engine.generate(request))
        except asyncio.CancelledError:
            self._engine.cancel(request)
            raise

    def end_session(self, session: str) -> None:
        self._engine.end_session(session)

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        result = await asyncio.wrap_future(self._engine.update(batch))
        await self._publish(batch.job, result.version)
        return result

    async def state(self, job: str) -> JobState:
        return await asyncio.wrap_future(self._engine.state(job))

    async def export(self, job: str) -> dict[str, bytes]:
        return await asyncio.wrap_future(self._engine.export(job))

    async def stats(self) -> PoolStats:
        device, tenants = await asyncio.wrap_future(self._engine.stats())
        return PoolStats([device], tenants)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    async def _publish(self, job: str, version: int) -> None:
        """Makes the job's weights a version to sample from, and retires the one before. If cancelled, does nothing."""
        name = adapter_name(job, version)
        shape, vector = await asyncio.wrap_future(self._engine.weights(job))
        self._versions.hold_named(name)
        try:
            await asyncio.wrap_future(self._engine.add_adapter(name, shape, vector))
            self._drop(self._versions.publish(job, version))
        finally:
            self._drop(self._versions.release(name))

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self._engine.drop_adapter(name)
