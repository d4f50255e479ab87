"""What runs in a Ray actor: one device of the pool, and who uses it.

A client is a process that has a RayPool open. It says now and then that it lives; what a client that has fallen
silent left behind is cleared away, so that its jobs can be opened anew.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from marlaas.errors import MarlaasError
from marlaas.lora import AdapterShape, import_peft
from marlaas.pool.engine import Engine
from marlaas.pool.stats import DeviceStats, TenantStats
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.specs import ModelSpec, PoolSpec, QuotaSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.trainer import JobState

CLIENT_SECONDS = 30.0  # a client that has been silent for so long is gone


@dataclass(frozen=True)
class DeviceInfo:
    """What a client wants to know of a device."""

    process: int
    tokenizer: Any
    stop_ids: frozenset[int]
    base_name: str
    base_fingerprint: str
    longest: int


@dataclass
class _Client:
    seen: float
    jobs: set[str] = field(default_factory=set)
    adapters: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Trained:
    """A job after it was opened or updated: all that its client needs to sample from it, or to open it anew."""

    shape: AdapterShape
    weights: torch.Tensor
    state: JobState


class DeviceActor:
    """One device. `role` is "rollout" or "train"; methods are Ray's to call."""

    def __init__(self, name: str, role: str, model: dict[str, Any], pool: dict[str, Any]) -> None:
        """Loads the base model. Raises ModelError."""
        spec = PoolSpec.model_validate(pool)
        self._engine = Engine(
            ModelSpec.model_validate(model), spec, name=name, samples=role == "rollout", trains=role == "train"
        )
        self._longest = spec.max_sequence_tokens
        self._clients: dict[str, _Client] = {}
        self._updating: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._results: dict[str, UpdateResult] = {}

    async def describe(self) -> DeviceInfo:
        base = self._engine.base
        return DeviceInfo(
            os.getpid(),
            base.tokenizer,
            base.stop_ids,
            base.name,
            base.fingerprint,
            self._longest,
        )

    async def alive(self, client: str) -> None:
        """The client lives. Clears away what clients that fell silent have left."""
        now = time.monotonic()
        self._client(client).seen = now
        for name, entry in list(self._clients.items()):
            if now - entry.seen > CLIENT_SECONDS:
                await self.leave(name)

    async def leave(self, client: str) -> None:
        """The client is gone: its jobs are closed and its adapters dropped."""
        entry = self._clients.pop(client, _Client(0.0))
        for job in list(entry.jobs):
            self._results.pop(job, None)
            await asyncio.wrap_future(self._engine.close_job(job))
        for adapter in entry.adapters:
            await asyncio.wrap_future(self._engine.drop_adapter(adapter))

    async def stats(self) -> tuple[DeviceStats, dict[str, TenantStats]]:
        return await asyncio.wrap_future(self._engine.stats())

    # Sampling

    async def generate(self, request: SamplingRequest) -> Sample:
        try:
            return await asyncio.wrap_future(self._engine.generate(request))
        except asyncio.CancelledError:
            self._engine.cancel(request)
            raise

    async def add_adapter(self, client: str, name: str, shape: AdapterShape, vector: torch.Tensor) -> None:
        self._client(client).adapters.add(name)
        await asyncio.wrap_future(self._engine.add_adapter(name, shape, vector))

    async def add_files(self, client: str, name: str, files: Mapping[str, bytes]) -> None:
        layout, vector = await asyncio.to_thread(import_peft, files, self._engine.base.transformer)
        await self.add_adapter(client, name, layout.shape, vector)

    async def drop_adapter(self, client: str, name: str) -> None:
        self._client(client).adapters.discard(name)
        await asyncio.wrap_future(self._engine.drop_adapter(name))

    async def drop_requests(self, job: str) -> None:
        await asyncio.wrap_future(self._engine.drop_requests(job))

    async def end_session(self, session: str) -> None:
        self._engine.end_session(session)

    async def set_quota(self, tenant: str, quota: QuotaSpec) -> None:
        await asyncio.wrap_future(self._engine.set_quota(tenant, quota))

    # Training

    async def open_job(self, client: str, job: str, spec: TenantSpec, state: JobState | None) -> Trained | str:
        """Takes a job in, or says why it has to wait."""
        for other, entry in self._clients.items():
            if job in entry.jobs and other != client:
                return f"waits for its other runner, which was here {time.monotonic() - entry.seen:.0f} s ago"
        outcome = await asyncio.wrap_future(self._engine.open(job, spec, state))
        if isinstance(outcome, str):
            return outcome
        self._client(client).jobs.add(job)
        await asyncio.wrap_future(self._engine.set_quota(spec.name, spec.quota))
        return await self._trained(job)

    async def close_job(self, client: str, job: str) -> None:
        self._client(client).jobs.discard(job)
        self._results.pop(job, None)
        await asyncio.wrap_future(self._engine.close_job(job))

    async def update(self, batch: TrainingBatch, version: int) -> tuple[UpdateResult, Trained]:
        """One optimizer step from `version`. Asked again for one that was made, it answers what it did then."""
        async with self._updating[batch.job]:
            result = self._results.get(batch.job)
            if result is None or result.version != version + 1:
                result = self._results[batch.job] = await asyncio.wrap_future(self._engine.update(batch))
            return result, await self._trained(batch.job)

    async def export(self, job: str) -> dict[str, bytes]:
        return await asyncio.wrap_future(self._engine.export(job))

    async def jobs(self) -> int:
        """How many jobs are open."""
        return len(self._engine.trainer)

    async def _trained(self, job: str) -> Trained:
        shape, weights = await asyncio.wrap_future(self._engine.weights(job))
        return Trained(shape, weights, await asyncio.wrap_future(self._engine.state(job)))

    def _client(self, client: str) -> _Client:
        return self._clients.setdefault(client, _Client(time.monotonic()))


def ray_module() -> Any:
    """Ray, which is an extra. Raises MarlaasError that says how to get it."""
    try:
        import ray
    except ImportError as error:
        raise MarlaasError("a Ray pool needs Ray; install it with: pip install 'marlaas[ray]'") from error
    return ray
