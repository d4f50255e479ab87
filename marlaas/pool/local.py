"""The pool inside one process: one device thread that samples and trains on one copy of the base weights."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from marlaas.errors import AdapterError, MarlaasError, ModelError, PoolClosed, RequestError
from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, export_peft, import_peft
from marlaas.models import BaseModel, Progress, load_base_model
from marlaas.pool.policy import DeviceLoad, should_train
from marlaas.pool.protocol import AdapterLease, adapter_name
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.specs import TARGETS, VERSIONS_A_JOB, ModelSpec, PoolSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.trainer import JobState, Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class _PendingUpdate:
    batch: TrainingBatch
    future: Future[UpdateResult]
    since: float


class LocalPool:
    """See `Pool`. Everything that touches tensors runs on the device thread, in the order it was asked for."""

    def __init__(self, model: ModelSpec, pool: PoolSpec, progress: Progress = lambda line: None) -> None:
        """Starts the device thread and loads the base model on it. Raises ModelError."""
        self._spec = pool
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._updates: list[_PendingUpdate] = []
        self._leases: dict[str, int] = defaultdict(int)
        self._newest: dict[str, AdapterLease] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="marlaas-device", daemon=True)
        self._thread.start()
        self._base: BaseModel
        self._sampler: NativeSampler
        self._trainer: Trainer
        try:
            self._submit(lambda: self._load(model, progress)).result()
        except BaseException:
            self._calls.put(None)
            raise

    @property
    def tokenizer(self) -> Any:
        return self._base.tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._base.stop_ids

    @property
    def base_name(self) -> str:
        return self._base.name

    @property
    def base_fingerprint(self) -> str:
        return self._base.fingerprint

    async def open_job(self, job: str, spec: TenantSpec, state: JobState | None = None) -> int:
        return await self._call(lambda: self._open(job, spec, state))

    async def close_job(self, job: str) -> None:
        await self._call(lambda: self._close_job(job))

    @contextlib.asynccontextmanager
    async def lease(self, job: str) -> AsyncIterator[AdapterLease]:
        held = await self._call(lambda: self._hold(job))
        try:
            yield held
        finally:
            self._submit(lambda: self._release(held.name))

    @contextlib.asynccontextmanager
    async def lease_files(self, name: str, files: Mapping[str, bytes]) -> AsyncIterator[AdapterLease]:
        held = await self._call(lambda: self._hold_files(name, files))
        try:
            yield held
        finally:
            self._submit(lambda: self._release(held.name))

    async def generate(self, request: SamplingRequest) -> Sample:
        future: Future[Sample] = Future()

        def on_done(outcome: Sample | MarlaasError) -> None:
            _settle(future, outcome)

        await self._call(lambda: self._sampler.submit(request, on_done))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            dropped = RequestError(f"{request.owner}: the request was cancelled")
            self._submit(lambda: self._sampler.cancel(lambda r: r is request, dropped))
            raise

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        future: Future[UpdateResult] = Future()
        await self._call(lambda: self._updates.append(_PendingUpdate(batch, future, time.monotonic())))
        return await asyncio.wrap_future(future)

    async def state(self, job: str) -> JobState:
        return await self._call(lambda: self._trainer.state(job))

    async def export(self, job: str) -> dict[str, bytes]:
        return await self._call(lambda: self._export(job))

    async def close(self) -> None:
        self._closed = True
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    # Calls into the device thread

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        if self._closed:
            raise PoolClosed("the pool is closed")
        future: Future[T] = Future()

        def run() -> None:
            try:
                outcome: T | Exception = function()
            except Exception as error:  # whoever asked gets it; the device thread goes on
                outcome = error
            _settle(future, outcome)

        self._calls.put(run)
        return future

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(function))

    # The device thread

    def _run(self) -> None:
        while True:
            busy = bool(self._updates) or (hasattr(self, "_sampler") and self._sampler.busy)
            if not self._run_calls(wait=not busy):
                break
            if self._updates and should_train(self._load_now(), self._spec.coalesce_seconds):
                self._train()
            elif busy and self._sampler.busy:
                self._sample()
            elif self._updates:
                time.sleep(0.001)
        self._end()

    def _run_calls(self, wait: bool) -> bool:
        """Runs what was asked for, waiting for the first if there is nothing else to do; False: close."""
        try:
            call = self._calls.get(block=wait)
            while True:
                if call is None:
                    return False
                call()
                call = self._calls.get(block=False)
        except queue.Empty:
            return True

    def _load_now(self) -> DeviceLoad:
        oldest = time.monotonic() - self._updates[0].since
        return DeviceLoad(len(self._updates), len(self._newest), oldest, self._sampler.busy)

    def _sample(self) -> None:
        try:
            self._sampler.step()
        except Exception as error:  # not one tenant's fault that we know of: all in the batch learn why
            failure = RequestError(f"the sampler failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._sampler.cancel(lambda request: True, failure)

    def _train(self) -> None:
        first: dict[str, _PendingUpdate] = {}
        later = []
        for pending in self._updates:
            if pending.batch.job in first:
                later.append(pending)
            else:
                first[pending.batch.job] = pending
        self._updates = later
        try:
            results = self._trainer.update([p.batch for p in first.values()])
        except Exception as error:  # nothing was applied: optimizers step only after all passes
            for pending in first.values():
                _settle(pending.future, error)
            return
        for job, pending in first.items():
            outcome = results[job]
            if isinstance(outcome, UpdateResult):
                try:
                    self._publish(job, outcome.version)
                except AdapterError as error:  # no slot left: this job's to know, the others go on
                    outcome = error
            _settle(pending.future, outcome)

    def _end(self) -> None:
        closed = PoolClosed("the pool was closed")
        if hasattr(self, "_sampler"):
            self._sampler.cancel(lambda request: True, closed)
        for pending in self._updates:
            _settle(pending.future, closed)
        while self._run_calls(wait=False) is False:
            pass

    # What runs there

    def _load(self, model: ModelSpec, progress: Progress) -> None:
        if self._spec.threads is not None:
            torch.set_num_threads(self._spec.threads)
        self._base = load_base_model(model, progress)
        t, spec = self._base.transformer, self._spec
        if spec.max_sequence_tokens > t.geometry.max_positions:
            raise ModelError(
                f"pool.max_sequence_tokens: {spec.max_sequence_tokens} must be at most {t.geometry.max_positions}, "
                f"the longest context of {model.source}"
            )
        size = AdapterLayout(t, AdapterShape(spec.max_rank, 1.0, TARGETS)).size
        bank = AdapterBank(VERSIONS_A_JOB * spec.max_adapters, size, t.dtype, t.device)
        self._trainer = Trainer(self._base, spec.max_adapters, size, spec.train_tokens)
        self._sampler = NativeSampler(self._base, bank, spec.max_sequences, spec.max_sequence_tokens)

    def _open(self, job: str, spec: TenantSpec, state: JobState | None) -> int:
        if job in self._trainer:
            raise AdapterError(f"{job} is open already; a job is trained by one flow at a time")
        entry = self._trainer.open(job, spec, state)
        self._sampler.queue.set_share(spec.name, spec.quota.weight, spec.quota.max_sequences)
        self._publish(job, entry.version)
        return entry.version

    def _close_job(self, job: str) -> None:
        if job not in self._trainer:
            return
        gone = RequestError(f"{job} was closed")
        prefix = job + "/"
        self._sampler.cancel(lambda r: r.adapter is not None and r.adapter.startswith(prefix), gone)
        for pending in [p for p in self._updates if p.batch.job == job]:
            self._updates.remove(pending)
            _settle(pending.future, gone)
        self._retire(self._newest.pop(job))
        self._sampler.queue.forget(self._trainer[job].spec.name)
        self._trainer.close(job)

    def _publish(self, job: str, version: int) -> None:
        """Copies the job's weights into a sampling slot of their own and retires the version before."""
        entry = self._trainer[job]
        lease = AdapterLease(adapter_name(job, version), version)
        self._sampler.adapters.add(lease.name, entry.resident.layout).vector.copy_(entry.weights)
        before = self._newest.get(job)
        self._newest[job] = lease
        if before is not None:
            self._retire(before)

    def _hold(self, job: str) -> AdapterLease:
        if job not in self._newest:
            raise AdapterError(f"{job} is not open in this pool")
        newest = self._newest[job]
        self._leases[newest.name] += 1
        return newest

    def _hold_files(self, name: str, files: Mapping[str, bytes]) -> AdapterLease:
        if name not in self._sampler.adapters:
            layout, vector = import_peft(files, self._base.transformer)
            self._sampler.adapters.add(name, layout).vector.copy_(vector)
        self._leases[name] += 1
        return AdapterLease(name, int(name.rsplit("/v", 1)[1]))

    def _release(self, name: str) -> None:
        self._leases[name] -= 1
        if self._leases[name] == 0:
            del self._leases[name]
            if all(lease.name != name for lease in self._newest.values()):
                self._drop(name)

    def _retire(self, lease: AdapterLease) -> None:
        if lease.name not in self._leases:
            self._drop(lease.name)

    def _drop(self, name: str) -> None:
        """Frees the slot of a version that nobody holds; requests that still name it are cancelled first."""
        self._sampler.cancel(lambda r: r.adapter == name, RequestError(f"{name} was retired"))
        self._sampler.adapters.remove(name)

    def _export(self, job: str) -> dict[str, bytes]:
        entry = self._trainer[job]
        return export_peft(entry.resident.layout, entry.weights, self._base.transformer, self._base.name)


def _settle(future: Future[Any], outcome: Any) -> None:
    """Answers whoever asked, unless they have gone: a cancelled call must not end the device thread."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
