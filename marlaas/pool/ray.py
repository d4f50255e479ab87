"""The pool on Ray: rollout and trainer actors, each with a device of its own, shared by any number of processes.

Ray replaces an actor that dies. What it was doing is asked again: requests name their seed and updates start from the
state that the client has kept, so the answer is the one that was lost. A replaced actor gets the adapters and jobs
that it lacks when somebody asks for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

import tenacity

from marlaas.errors import AdapterMissing, JobNotOpen, MarlaasError, PoolClosed
from marlaas.models import Progress
from marlaas.pool.actors import CLIENT_SECONDS, DeviceInfo, Trained, ray_module
from marlaas.pool.protocol import ADMISSION_SECONDS, AdapterLease, adapter_name
from marlaas.pool.stats import PoolStats, TenantStats
from marlaas.pool.versions import Versions
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.specs import ModelSpec, PoolSpec, QuotaSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.trainer import JobState

logger = logging.getLogger(__name__)

NAMESPACE = "marlaas"
ROLES = ("rollout", "train")
_CONNECT_ATTEMPTS = 3
_RETURN_SECONDS = 300.0  # for an actor to be replaced, its base model loaded
_POLL_SECONDS = 0.25


class _Lost(Exception):
    """The actor died, or cannot be reached, under a call."""


class _Device:
    """One actor. Its handle stays good when Ray replaces its process."""

    def __init__(self, ray: Any, name: str) -> None:
        self.name = name
        self._ray = ray
        self._handle = ray.get_actor(name, namespace=NAMESPACE)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the method answers or raises; _Lost if the actor dies under it."""
        reference = getattr(self._handle, method).remote(*arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayActorError as error:
            raise _Lost(str(error)) from error

    def tell(self, method: str, *arguments: Any) -> None:
        """Asks for something whose answer nobody waits for."""
        getattr(self._handle, method).remote(*arguments)

    async def returned(self) -> None:
        """Waits until the actor answers again. Raises MarlaasError when it does not."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while time.monotonic() < deadline:
            try:
                await self.call("stats")
                return
            except _Lost:
                await asyncio.sleep(_POLL_SECONDS)
        raise MarlaasError(f"the pool's actor {self.name} died and was not back within {_RETURN_SECONDS:g} seconds")


@dataclass
class _OpenJob:
    """A job of this client: its trainer, and what it takes to open it there anew."""

    spec: TenantSpec
    trainer: _Device
    state: JobState


class RayPool:
    """See `Pool`. One a process; the actors are shared by all that connect to them."""

    def __init__(self, model: ModelSpec, pool: PoolSpec, progress: Progress = lambda line: None) -> None:
        """Connects to `pool.address`. Raises MarlaasError when there is no pool, or one of another base model."""
        assert pool.address is not None
        self._ray = ray_module()
        connect(pool.address)
        names = [
            entry["name"]
            for entry in self._ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE
        ]
        devices = {role: [_Device(self._ray, n) for n in sorted(names) if n.startswith(role + "-")] for role in ROLES}
        for role, found in devices.items():
            if not found:
                raise MarlaasError(f"pool.address: {pool.address} has no {role} actors; start some: marlaas pool up")
        self._rollouts, self._trainers = devices["rollout"], devices["train"]
        progress(f"connected to {pool.address}: {len(self._rollouts)} rollout, {len(self._trainers)} train")
        self._info: DeviceInfo = self._ray.get(self._rollouts[0]._handle.describe.remote())
        if self._info.base_name != model.source:
            raise MarlaasError(
                f"pool.address: {pool.address} runs the base model {self._info.base_name!r}; this fleet's is "
                f"{model.source!r}"
            )
        self._client = uuid.uuid4().hex
        self._versions = Versions()
        self._sources: dict[str, tuple[str, tuple[Any, ...]]] = {}
        self._adding: dict[tuple[str, str], Future[None]] = {}
        self._jobs: dict[str, _OpenJob] = {}
        self._quotas: dict[str, QuotaSpec] = {}
        self._outstanding: Counter[str] = Counter()
        self._where: dict[str, _Device] = {}
        self._lock = threading.Lock()
        self.asked_again = 0
        self._closed = threading.Event()
        threading.Thread(target=self._live, name="marlaas-alive", daemon=True).start()

    @property
    def tokenizer(self) -> Any:
        return self._info.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._info.stop_ids

    @property
    def longest(self) -> int:
        return self._info.longest

    @property
    def base_name(self) -> str:
        return self._info.base_name

    @property
    def base_fingerprint(self) -> str:
        return self._info.base_fingerprint

    # Jobs

    async def open_job(
        self,
        job: str,
        spec: TenantSpec,
        state: JobState | None = None,
        on_wait: Callable[[str], None] = lambda reason: None,
    ) -> int:
        open_jobs = await asyncio.gather(*(self._ask(trainer, "jobs") for trainer in self._trainers))
        trainer = self._trainers[open_jobs.index(min(open_jobs))]
        while isinstance(trained := await self._ask(trainer, "open_job", self._client, job, spec, state), str):
            on_wait(trained)
            await asyncio.sleep(ADMISSION_SECONDS)
        self._jobs[job] = _OpenJob(spec, trainer, trained.state)
        self._quotas[spec.name] = spec.quota
        for device in self._rollouts:
            await self._ask(device, "set_quota", spec.name, spec.quota)
        await self._publish(job, trained)
        return trained.state.version

    async def close_job(self, job: str) -> None:
        entry = self._jobs.pop(job, None)
        self._drop(self._versions.close(job))
        for device in self._rollouts:
            device.tell("drop_requests", job)
        if entry is not None:
            await self._ask(entry.trainer, "close_job", self._client, job)

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        entry = self._job(batch.job)
        result, trained = await self._ask_trainer(batch.job, "update", batch, entry.state.version)
        entry.state = trained.state
        await self._publish(batch.job, trained)
        return result

    async def state(self, job: str) -> JobState:
        return self._job(job).state

    async def export(self, job: str) -> dict[str, bytes]:
        return await self._ask_trainer(job, "export", job)

    async def _ask_trainer(self, job: str, method: str, *arguments: Any) -> Any:
        """Asks the job's trainer; opens the job there anew, from its last state, if the trainer was replaced."""
        entry = self._job(job)
        while True:
            try:
                return await self._ask(entry.trainer, method, *arguments)
            except JobNotOpen:
                self.asked_again += 1
                opened = await self._ask(entry.trainer, "open_job", self._client, job, entry.spec, entry.state)
                if isinstance(opened, str):
                    await asyncio.sleep(ADMISSION_SECONDS)

    def _job(self, job: str) -> _OpenJob:
        if job not in self._jobs:
            raise JobNotOpen(f"{job} is not open in this pool")
        return self._jobs[job]

    # Adapter versions

    def lease(self, job: str) -> contextlib.AbstractAsyncContextManager[AdapterLease]:
        return self._versions.lease(job, self._drop)

    @contextlib.asynccontextmanager
    async def lease_files(self, name: str, files: Mapping[str, bytes]) -> AsyncIterator[AdapterLease]:
        if self._versions.hold_named(name):
            self._sources[name] = ("add_files", (self._ray.put(dict(files)),))
        try:
            await asyncio.gather(*(self._add(device, name) for device in self._rollouts))
            yield AdapterLease(name, int(name.rsplit("/v", 1)[1]))
        finally:
            self._drop(self._versions.release(name))

    async def _publish(self, job: str, trained: Trained) -> None:
        """Sends the job's weights to the rollout actors, and retires the version before. If cancelled, does nothing."""
        name = adapter_name(job, trained.state.version)
        self._sources[name] = ("add_adapter", (trained.shape, self._ray.put(trained.weights)))
        self._versions.hold_named(name)
        try:
            await asyncio.gather(*(self._add(device, name) for device in self._rollouts))
            self._drop(self._versions.publish(job, trained.state.version))
        finally:
            self._drop(self._versions.release(name))

    async def _add(self, device: _Device, name: str) -> None:
        """Gives a rollout actor an adapter; whoever asks for the same meanwhile waits for that."""
        with self._lock:
            under_way = self._adding.get((device.name, name))
            if under_way is None:
                added = self._adding[device.name, name] = Future()
        if under_way is not None:
            await asyncio.wrap_future(under_way)
            return
        try:
            method, arguments = self._sources[name]
            await self._ask(device, method, self._client, name, *arguments)
        finally:
            with self._lock:
                del self._adding[device.name, name]
            added.set_result(None)

    def _drop(self, names: list[str]) -> None:
        for name in names:
            self._sources.pop(name, None)
            for device in self._rollouts:
                device.tell("drop_adapter", self._client, name)

    # Sampling

    async def generate(self, request: SamplingRequest) -> Sample:
        while True:
            device = self._route(request)
            self._outstanding[device.name] += 1
            try:
                return await device.call("generate", request)
            except _Lost:
                self._where.pop(request.session or "", None)
                await device.returned()
            except AdapterMissing:
                if request.adapter not in self._sources:
                    raise
                await self._ask(device, "set_quota", request.owner, self._quotas.get(request.owner, QuotaSpec()))
                await self._add(device, request.adapter)
            finally:
                self._outstanding[device.name] -= 1
            self.asked_again += 1

    def _route(self, request: SamplingRequest) -> _Device:
        """The actor that has the conversation's earlier turns, or the one with the least to do."""
        if request.session in self._where:
            return self._where[request.session]
        device = min(self._rollouts, key=lambda device: self._outstanding[device.name])
        if request.session is not None:
            self._where[request.session] = device
        return device

    def end_session(self, session: str) -> None:
        device = self._where.pop(session, None)
        if device is not None:
            device.tell("end_session", session)

    # The pool

    async def stats(self) -> PoolStats:
        found = await asyncio.gather(*(self._ask(d, "stats") for d in [*self._rollouts, *self._trainers]))
        tenants: dict[str, TenantStats] = {}
        for _, of_device in found:
            for name, stats in of_device.items():
                tenants[name] = _sum(tenants[name], stats) if name in tenants else stats
        return PoolStats([device for device, _ in found], tenants)

    async def close(self) -> None:
        self._closed.set()
        for device in [*self._rollouts, *self._trainers]:
            with contextlib.suppress(_Lost):
                await device.call("leave", self._client)
        disconnect()

    async def _ask(self, device: _Device, method: str, *arguments: Any) -> Any:
        """A call that may be made again: it is, when the actor dies under it."""
        while True:
            if self._closed.is_set():
                raise PoolClosed("the pool is closed")
            try:
                return await device.call(method, *arguments)
            except _Lost:
                self.asked_again += 1
                await device.returned()

    def _live(self) -> None:
        while not self._closed.wait(CLIENT_SECONDS / 4):
            for device in [*self._rollouts, *self._trainers]:
                try:
                    device.tell("alive", self._client)
                except Exception as error:  # Ray's client raises a bare Exception without its connection
                    logger.warning("the pool's actor %s was not reached: %s", device.name, error)


def _sum(one: TenantStats, other: TenantStats) -> TenantStats:
    return TenantStats(**{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(TenantStats)})


_connections = 0
_connecting = threading.Lock()


def connect(address: str) -> None:
    """Connects this process to a Ray cluster, once for all of its pools. Raises MarlaasError."""
    global _connections
    ray = ray_module()
    with _connecting:
        if _connections == 0 and not ray.is_initialized():
            try:
                _initialize(address)
            except Exception as error:  # Ray raises many kinds for an address where nothing answers
                first = str(error).strip().splitlines()[-1]
                raise MarlaasError(
                    f"pool.address: {address} is not a Ray cluster that can be reached: {first}"
                ) from error
        _connections += 1


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(ConnectionAbortedError),
    stop=tenacity.stop_after_attempt(_CONNECT_ATTEMPTS),
    before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
    reraise=True,
)
def _initialize(address: str) -> None:
    """Connects; a cluster under load answers, but aborts when its server for this client is late to start."""
    ray_module().init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")


def disconnect() -> None:
    """Gives back one `connect`."""
    global _connections
    with _connecting:
        _connections -= 1
        if _connections == 0:
            ray_module().shutdown()
