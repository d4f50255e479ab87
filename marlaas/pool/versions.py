"""Which adapter versions are alive: each job's newest, and those that somebody holds."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable

from marlaas.errors import JobNotOpen
from marlaas.pool.protocol import AdapterLease, adapter_name


class Versions:
    """Safe to use from any thread. What methods return are the names that nobody needs any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()
        self._newest: dict[str, AdapterLease] = {}

    def publish(self, job: str, version: int) -> list[str]:
        """The job has a new version."""
        with self._lock:
            before = self._newest.get(job)
            self._newest[job] = AdapterLease(adapter_name(job, version), version)
            return self._unneeded(before.name) if before is not None else []

    def hold(self, job: str) -> AdapterLease:
        """Holds the job's newest version. Raises JobNotOpen if the job is not open."""
        with self._lock:
            if job not in self._newest:
                raise JobNotOpen(f"{job} is not open in this pool")
            newest = self._newest[job]
            self._held[newest.name] += 1
            return newest

    def hold_named(self, name: str) -> bool:
        """Holds a version by its name; True if nobody held it and it is no job's newest."""
        with self._lock:
            fresh = name not in self._held and all(lease.name != name for lease in self._newest.values())
            self._held[name] += 1
            return fresh

    def release(self, name: str) -> list[str]:
        """Gives back what `hold` or `hold_named` took."""
        with self._lock:
            self._held[name] -= 1
            if self._held[name] == 0:
                del self._held[name]
            return self._unneeded(name)

    @contextlib.asynccontextmanager
    async def lease(self, job: str, drop: Callable[[list[str]], None]) -> AsyncIterator[AdapterLease]:
        """Holds the job's newest version; `drop` gets what nobody needs any more after that. Raises JobNotOpen."""
        held = self.hold(job)
        try:
            yield held
        finally:
            drop(self.release(held.name))

    def close(self, job: str) -> list[str]:
        """The job is gone."""
        with self._lock:
            newest = self._newest.pop(job, None)
            return self._unneeded(newest.name) if newest is not None else []

    def alive(self) -> list[str]:
        """All versions that are needed."""
        with self._lock:
            return list(dict.fromkeys([*(lease.name for lease in self._newest.values()), *self._held]))

    def _unneeded(self, name: str) -> list[str]:
        if name in self._held or any(lease.name == name for lease in self._newest.values()):
            return []
        return [name]
