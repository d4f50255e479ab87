"""What the flow runs of one process share: the pool, the tracker, and the progress board."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from prefect.events.worker import EventsWorker

from marlaas.errors import MarlaasError
from marlaas.models import Progress
from marlaas.pool import LocalPool, Pool
from marlaas.progress import Board
from marlaas.specs import ModelSpec, PoolSpec
from marlaas.tracking import Tracker


@dataclass
class _Shared:
    opening: Future[Pool]
    users: int = 0


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
        """The process's pool for this base model; made for its first user, closed after its last."""
        key = model.model_dump_json() + spec.model_dump_json()
        with self._lock:
            if key not in self._pools:
                self._pools[key] = _Shared(self._opener.submit(LocalPool, model, spec, self.progress))
            shared = self._pools[key]
            shared.users += 1
        try:
            yield await asyncio.shield(asyncio.wrap_future(shared.opening))
        finally:
            with self._lock:
                shared.users -= 1
                if last := shared.users == 0:
                    del self._pools[key]
            if last and await asyncio.to_thread(shared.opening.exception) is None:
                await shared.opening.result().close()


RUNTIME = Runtime()


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
