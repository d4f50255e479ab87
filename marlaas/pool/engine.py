"""One device: a thread that samples, trains, or does both, on one copy of the base weights."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from marlaas.devices import reuse_freed_memory
from marlaas.errors import AdapterError, BatchError, JobNotOpen, MarlaasError, ModelError, PoolClosed, RequestError
from marlaas.lora import AdapterBank, AdapterLayout, AdapterShape, PagedAdapters, export_peft, targets_of
from marlaas.models import BaseModel, Progress, load_base_model
from marlaas.pool.policy import DeviceLoad, should_train
from marlaas.pool.stats import DeviceStats, TenantStats
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.specs import VERSIONS_A_JOB, ModelSpec, PoolSpec, QuotaSpec, TenantSpec
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.trainer import JobState, Trainer, TrainingJob

T = TypeVar("T")

_FORGET_WAITING_SECONDS = 5.0  # a job that waits for admission asks again more often than this
_REMEMBERED_UPDATES = 64


@dataclass(frozen=True, eq=False)
class _PendingUpdate:
    batch: TrainingBatch
    future: Future[UpdateResult]
    since: float


@dataclass
class _Line:
    """A job that waits to be admitted."""

    rank: tuple[int, float]
    asked: float


class Engine:
    """Everything that touches tensors runs on the device thread, in the order it was asked for.

    Methods that return a Future may be called from any thread.
    """

    def __init__(
        self,
        model: ModelSpec,
        pool: PoolSpec,
        progress: Progress = lambda line: None,
        name: str = "device",
        samples: bool = True,
        trains: bool = True,
    ) -> None:
        """Starts the device thread and loads the base model on it. Raises ModelError.

        samples, trains: what it sets memory aside for; it is asked for nothing else.
        """
        self.name = name
        self._spec = pool
        self._samples, self._trains = samples, trains
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[_PendingUpdate] = []
        self._under_way: dict[str, _PendingUpdate] = {}
        self._line: dict[str, _Line] = {}
        self._usual: deque[float] = deque(maxlen=_REMEMBERED_UPDATES)
        self._trained_tokens: Counter[str] = Counter()
        self._training_seconds: dict[str, float] = defaultdict(float)
        self._sampling_seconds = 0.0
        self._scheduling_seconds = 0.0
        self._closed = False
        self.base: BaseModel
        self.sampler: NativeSampler
        self.trainer: Trainer
        loaded: Future[None] = Future()
        run = (model, progress, loaded)
        self._thread = threading.Thread(target=self._run, args=run, name=f"marlaas-{name}", daemon=True)
        self._thread.start()
        loaded.result()
        self._started = time.perf_counter()

    # Calls into the device thread

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function on the device thread."""
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

    def generate(self, request: SamplingRequest) -> Future[Sample]:
        """One completion. Raises RequestError from the future."""
        done: Future[Sample] = Future()

        def ask() -> None:
            with self._scheduling():
                try:
                    self.sampler.submit(request, lambda outcome: _settle(done, outcome))
                except MarlaasError as error:
                    _settle(done, error)

        self.submit(ask)
        return done

    def cancel(self, request: SamplingRequest) -> None:
        """Drops a request that was asked for by `generate`."""
        dropped = RequestError(f"{request.owner}: the request was cancelled")
        self.submit(lambda: self.sampler.cancel(lambda r: r is request, dropped))

    def end_session(self, session: str) -> None:
        """A conversation is over: what is kept of it goes."""
        self.submit(lambda: self.sampler.prefixes.drop_session(session))

    def add_adapter(self, name: str, shape: AdapterShape, vector: torch.Tensor) -> Future[None]:
        """Makes a version available for sampling; a version that is there already stays as it is."""

        def add() -> None:
            if name not in self.sampler.adapters:
                self.sampler.adapters.add(name, AdapterLayout(self.base.transformer, shape), vector)

        return self.submit(add)

    def drop_adapter(self, name: str) -> Future[None]:
        """Forgets a version; requests that still name it are cancelled."""

        def drop() -> None:
            if name in self.sampler.adapters:
                self.sampler.drop_adapter(name, RequestError(f"{name} was retired"))

        return self.submit(drop)

    def set_quota(self, tenant: str, quota: QuotaSpec) -> Future[None]:
        """A tenant's share of sampling and training."""

        def apply() -> None:
            self.sampler.queue.set_share(tenant, quota.weight, quota.max_sequences, quota.priority)
            self.sampler.adapter_caps[tenant] = quota.max_adapters

        return self.submit(apply)

    def open(self, job: str, spec: TenantSpec, state: JobState | None) -> Future[int | str]:
        """Takes a job in for training and returns its version, or says why it has to wait; ask again then."""
        return self.submit(lambda: self._open(job, spec, state))

    def close_job(self, job: str) -> Future[None]:
        """Lets a job go; its updates get an error."""
        return self.submit(lambda: self._close_job(job))

    def drop_requests(self, job: str) -> Future[None]:
        """Cancels the requests for a job's versions, and forgets its tenant if nothing else of it is here."""

        def drop() -> None:
            prefix, gone = job + "/", RequestError(f"{job} was closed")
            self.sampler.cancel(lambda r: r.adapter is not None and r.adapter.startswith(prefix), gone)
            tenant = job.split("/")[0]
            if not any(name.startswith(tenant + "/") for name in self.sampler.adapters):
                self.sampler.queue.forget(tenant)

        return self.submit(drop)

    def update(self, batch: TrainingBatch) -> Future[UpdateResult]:
        """One optimizer step. Raises BatchError from the future."""
        done: Future[UpdateResult] = Future()

        def ask() -> None:
            try:
                self.sampler.queue.begin_work(self._job(batch.job).spec.name)
            except JobNotOpen as error:
                _settle(done, error)
                return
            self._waiting.append(_PendingUpdate(batch, done, time.monotonic()))

        self.submit(ask)
        return done

    def state(self, job: str) -> Future[JobState]:
        """The job's training state. Raises JobNotOpen."""
        return self.submit(lambda: self.trainer.state(self._job(job).name))

    def weights(self, job: str) -> Future[tuple[AdapterShape, torch.Tensor]]:
        """The job's shape and a copy of its fp32 weights. Raises JobNotOpen."""
        return self.submit(lambda: (self._job(job).layout.shape, self._job(job).stored_weights()))

    def export(self, job: str) -> Future[dict[str, bytes]]:
        """The job's newest version as PEFT files, fp32. Raises JobNotOpen."""

        def export() -> dict[str, bytes]:
            entry = self._job(job)
            return export_peft(entry.layout, entry.stored_weights(), self.base.transformer, self.base.name)

        return self.submit(export)

    def stats(self) -> Future[tuple[DeviceStats, dict[str, TenantStats]]]:
        """What the device has done, and for whom."""
        return self.submit(self._stats)

    def close(self) -> None:
        """Ends the thread; waiting work gets PoolClosed."""
        self._closed = True
        self._calls.put(None)
        self._thread.join()

    # The device thread

    def _run(self, model: ModelSpec, progress: Progress, loaded: Future[None]) -> None:
        try:
            self._load(model, progress)
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        while self._run_calls(wait=not self._waiting and not self._under_way and not self.sampler.busy):
            train = False
            if self._waiting or self._under_way:
                with self._scheduling():
                    train = should_train(self._load_now(), self._spec.coalesce_seconds)
            if train:
                self._train()
            elif self.sampler.busy:
                self._sample()
            elif self._waiting:
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

    @contextlib.contextmanager
    def _scheduling(self) -> Iterator[None]:
        """Counts the time as spent in deciding."""
        started = time.perf_counter()
        yield
        self._scheduling_seconds += time.perf_counter() - started

    def _load_now(self) -> DeviceLoad:
        queue, now = self.sampler.queue, time.monotonic()
        names = [self._owner(job) for job in self.trainer.active or [p.batch.job for p in self._waiting]]
        return DeviceLoad(
            waiting=len(self._waiting),
            open_jobs=len(self.trainer),
            oldest_seconds=now - self._waiting[0].since if self._waiting else 0.0,
            under_way=len(self._under_way),
            sampling=self.sampler.busy,
            lead_seconds=min(map(queue.lead, names), default=0.0),
            usual_seconds=statistics.median(self._usual) if self._usual else 0.0,
        )

    def _job(self, job: str) -> TrainingJob:
        if job not in self.trainer:
            raise JobNotOpen(f"{job} is not open in this pool")
        return self.trainer[job]

    def _owner(self, job: str) -> str:
        return self.trainer[job].spec.name

    def _sample(self) -> None:
        started, deciding = time.perf_counter(), self.sampler.scheduling_seconds
        try:
            self.sampler.step()
        except Exception as error:  # not one tenant's fault that we know of: all in the batch learn why
            failure = RequestError(f"the sampler failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.sampler.cancel(lambda request: True, failure)
        deciding = self.sampler.scheduling_seconds - deciding
        self._sampling_seconds += time.perf_counter() - started - deciding
        self._scheduling_seconds += deciding

    def _train(self) -> None:
        """Begins what waits, and runs one pass for those whose turn it is."""
        for pending in list(self._waiting):
            job = pending.batch.job
            if job in self._under_way:
                continue
            try:
                if not self.trainer.begin(pending.batch):
                    continue  # every slot is taken by an update under way
                self._under_way[job] = pending
            except MarlaasError as error:
                self._finish(pending, error)
            except Exception as error:  # whoever asked gets it; the device thread goes on
                failure = BatchError(f"{job}: the update did not begin: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._finish(pending, failure)
            self._waiting.remove(pending)
        with self._scheduling():
            jobs_of: dict[str, list[str]] = {}
            for job in self.trainer.active:
                jobs_of.setdefault(self._owner(job), []).append(job)
            order = [job for owner in self.sampler.queue.order(list(jobs_of)) for job in jobs_of[owner]]
        step = self.trainer.step(order)
        for job, seconds in step.seconds.items():
            owner = self._owner(job)
            self.sampler.queue.charge(owner, seconds)
            self._training_seconds[owner] += seconds
        for job, outcome in step.results.items():
            if isinstance(outcome, UpdateResult):
                self._usual.append(outcome.device_seconds)
                self._trained_tokens[self._owner(job)] += int(outcome.metrics["sampled_tokens"])
            self._finish(self._under_way.pop(job), outcome)

    def _finish(self, pending: _PendingUpdate, outcome: UpdateResult | MarlaasError) -> None:
        self.sampler.queue.end_work(self._owner(pending.batch.job))
        _settle(pending.future, outcome)

    def _end(self) -> None:
        closed = PoolClosed("the pool was closed")
        self.sampler.cancel(lambda request: True, closed)
        for pending in [*self._waiting, *self._under_way.values()]:
            _settle(pending.future, closed)
        while self._run_calls(wait=False) is False:
            pass

    # What runs there

    def _load(self, model: ModelSpec, progress: Progress) -> None:
        if self._spec.threads is not None:
            torch.set_num_threads(self._spec.threads)
        base = load_base_model(model, progress)
        t, spec = base.transformer, self._spec
        if t.device.type == "cpu":
            reuse_freed_memory()
        if spec.max_sequence_tokens > t.geometry.max_positions:
            raise ModelError(
                f"pool.max_sequence_tokens: {spec.max_sequence_tokens} must be at most {t.geometry.max_positions}, "
                f"the longest context that {model.source} runs with"
            )
        size = AdapterLayout(t, AdapterShape(spec.max_rank, 1.0, targets_of(t))).size
        slots = VERSIONS_A_JOB * spec.max_adapters if self._samples else 0
        adapters = PagedAdapters(AdapterBank(slots, size, t.dtype, t.device))
        rows = spec.max_sequences if self._samples else 0
        self.base = base
        self.sampler = NativeSampler(base, adapters, rows, spec.max_sequence_tokens, spec.kept_tokens)
        if self._samples:
            self.sampler.calibrate()
        self.trainer = Trainer(base, spec.max_adapters if self._trains else 0, size, spec.train_tokens)

    def _open(self, job: str, spec: TenantSpec, state: JobState | None) -> int | str:
        if job in self.trainer:
            raise AdapterError(f"{job} is open already; a job is trained by one flow at a time")
        now = time.monotonic()
        self._line = {j: w for j, w in self._line.items() if now - w.asked < _FORGET_WAITING_SECONDS}
        mine = self._line.setdefault(job, _Line((-spec.quota.priority, now), now))
        mine.asked = now
        before = sum(w.rank < mine.rank for w in self._line.values())
        if before >= self._spec.max_jobs - len(self.trainer):
            return (
                f"waits to be admitted: {len(self.trainer)} jobs are open, pool.max_jobs is {self._spec.max_jobs}, "
                f"and {before} wait before it"
            )
        entry = self.trainer.open(job, spec, state)
        del self._line[job]
        return entry.version

    def _close_job(self, job: str) -> None:
        if job not in self.trainer:
            return
        gone = RequestError(f"{job} was closed")
        pending = [p for p in self._waiting if p.batch.job == job]
        if job in self._under_way:
            pending.append(self._under_way.pop(job))
        for update in pending:
            self._finish(update, gone)
        self._waiting = [p for p in self._waiting if p.batch.job != job]
        self.trainer.close(job)

    def _stats(self) -> tuple[DeviceStats, dict[str, TenantStats]]:
        sampler, trainer = self.sampler, self.trainer
        device = DeviceStats(
            name=self.name,
            uptime_seconds=time.perf_counter() - self._started,
            sampling_seconds=self._sampling_seconds,
            training_seconds=sum(self._training_seconds.values()),
            scheduling_seconds=self._scheduling_seconds,
            batch_fill=sampler.fill,
            resident_adapters=sampler.adapters.resident,
            paged_adapters=sampler.adapters.paged + trainer.paged,
        )
        updates = Counter(self._owner(p.batch.job) for p in [*self._waiting, *self._under_way.values()])
        parked = Counter(session.split("/")[0] for session in sampler.prefixes.sessions())
        seconds, tenants = self._training_seconds, {}
        for name in {*sampler.queue.owners(), *sampler.counts, *self._trained_tokens}:
            counts = sampler.counts[name]
            tenants[name] = TenantStats(
                waiting=sampler.queue.waiting(name),
                running=sampler.queue.running(name),
                parked=parked[name],
                updates_waiting=updates[name],
                sampled_tokens=counts.sampled,
                prefilled_tokens=counts.prefilled,
                reused_tokens=counts.reused,
                trained_tokens=self._trained_tokens[name],
                device_seconds=counts.device_seconds + seconds[name],
            )
        return device, tenants


def _settle(future: Future[Any], outcome: Any) -> None:
    """Answers whoever asked, unless they have gone: a cancelled call must not end the device thread."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
