"""What the flow runs of one process share: the pool, the tracker, and the progress board."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from marlaas.errors import MarlaasError
from marlaas.models import Progress
from marlaas.pool import LocalPool, Pool
from marlaas.progress import Board
from marlaas.specs import ModelSpec, PoolSpec
from marlaas.tracking import Tracker


@dataclass
class _Shared:
    pool: Pool
    users: int = 0


@dataclass
class Runtime:
    """One a process. `progress` gets the lines that say what is being prepared."""

    board: Board = field(default_factory=Board)
    progress: Progress = lambda line: None
    _pools: dict[str, _Shared] = field(default_factory=dict)
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.asynccontextmanager
    async def pool(self, model: ModelSpec, spec: PoolSpec) -> AsyncIterator[Pool]:
        """The process's pool for this base model; made for its first user, closed after its last."""
        key = model.model_dump_json() + spec.model_dump_json()
        async with self._opening:
            if key not in self._pools:
                self._pools[key] = _Shared(await asyncio.to_thread(LocalPool, model, spec, self.progress))
            shared = self._pools[key]
            shared.users += 1
        try:
            yield shared.pool
        finally:
            shared.users -= 1
            if shared.users == 0:
                del self._pools[key]
                await shared.pool.close()


RUNTIME = Runtime()


@contextlib.contextmanager
def tracker() -> contextlib.AbstractContextManager[Tracker]:
    """A tracker of the MLflow server that MLFLOW_TRACKING_URI names. Raises MarlaasError if it names none."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise MarlaasError("MLFLOW_TRACKING_URI is not set; flows need an MLflow server to track adapters in")
    with Tracker(uri) as opened:
        yield opened  # type: ignore[misc]
