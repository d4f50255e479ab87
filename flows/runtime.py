"""What the flow runs of one process share: the pool, the tracker, and the progress board."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field

from prefect.events.worker import EventsWorker

from marlaas.errors import MarlaasError, PoolClosed
from marlaas.metrics import PoolCollector, serve
from marlaas.models import Progress
from marlaas.pool import Pool, open_pool
from marlaas.pool.stats import PoolStats
from marlaas.progress import Board
from marlaas.specs import ModelSpec, PoolSpec
from marlaas.tracking import Tracker

_STATS_SECONDS = 5


@dataclass
class _Shared:
    """A pool, None until it is open, and its users' event loops. `served` closes what serves its metrics."""

    opening: Future[Pool] = field(init=False)
    pool: Pool | None = None
    users: list[asyncio.AbstractEventLoop] = field(default_factory=list)
    served: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def open(self, model: ModelSpec, spec: PoolSpec, progress: Progress) -> Pool:
        """Opens the pool. The metrics' port comes first: one that is taken is known before the model is loaded."""
        if spec.metrics_port is not None:
            self.served.enter_context(serve(PoolCollector(self.stats), spec.metrics_port))
        self.pool = open_pool(model, spec, progress)
        return self.pool

    def stats(self) -> PoolStats:
        """What the pool says of itself, for a thread outside of any event loop. Raises PoolClosed, TimeoutError."""
        loop = next(iter(self.users), None)
        if self.pool is None or loop is None:
            raise PoolClosed("the pool is opening or closing")
        asked = asyncio.run_coroutine_threadsafe(self.pool.stats(), loop)
        try:
            return asked.result(_STATS_SECONDS)
        finally:
            asked.cancel()


@dataclass
class Runtime:
    """One a process, for flows in any of its event loops. `progress` gets the lines that say what is prepared."""

    board: Board = field(default_factory=Board)
    progress: Progress = lambda line: None
    _pools: dict[str, _Shared] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _opener: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "marlaas-opening"))

    @contextlib.asynccontextmanager
    async def pool(self, model: ModelSpec, spec: PoolSpec) -> AsyncIterator[Pool]:
        """The process's pool for this base model; made for its first user, closed after its last.

        The first user's `metrics_port` counts; the pool is the same whatever it is. Raises MarlaasError if it is taken.
        """
        key = model.model_dump_json() + spec.model_dump_json(exclude={"metrics_port"})
        loop = asyncio.get_running_loop()
        with self._lock:
            if key not in self._pools:
                opened = self._pools[key] = _Shared()
                opened.opening = self._opener.submit(opened.open, model, spec, self.progress)
            shared = self._pools[key]
            shared.users.append(loop)
        try:
            yield await asyncio.shield(asyncio.wrap_future(shared.opening))
        finally:
            with self._lock:
                shared.users.remove(loop)
                if last := not shared.users:
                    del self._pools[key]
                    # By the opener, which then opens no later pool that wants the port before it is free.
                    unserved = self._opener.submit(shared.served.close)
            if last:
                await asyncio.wrap_future(unserved)
                if shared.pool is not None:
                    await shared.pool.close()


RUNTIME = Runtime()

STARTED: ContextVar[Callable[[], None]] = ContextVar("marlaas_started", default=lambda: None)
"""What a tenant's flow calls when its job is open, or waits to be admitted; once or more."""


def send_events(seconds: float) -> None:
    """Sends the events still queued while their server is there, and lets its connection go.

    A server that is told to end waits for open connections.
    """
    EventsWorker.drain_all(timeout=seconds)


@contextlib.contextmanager
def tracker() -> Iterator[Tracker]:
    """A tracker of the MLflow server that MLFLOW_TRACKING_URI names. Raises MarlaasError if it names none."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise MarlaasError("MLFLOW_TRACKING_URI is not set; flows need an MLflow server to track adapters in")
    with Tracker(uri) as opened:
        yield opened
