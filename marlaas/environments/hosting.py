"""The near side of a host process: calls with time limits, and a new process when one hangs or dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from marlaas.environments.host import LINE_LIMIT
from marlaas.errors import EnvironmentFailure

START_SECONDS = 120.0  # for a process to import and build what it serves
_SENDS = 2  # a call is sent again, once, when the process ends under it


@dataclass(frozen=True)
class Served:
    """What a host serves: `entry(**arguments)`, imported with `path` first."""

    entry: str
    arguments: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    memory_mb: int = 2048
    concurrency: int = 8

    def opening(self) -> bytes:
        """The first line that the process is given."""
        fields = {"entry": self.entry, "arguments": self.arguments, "path": self.path}
        return json.dumps({**fields, "memory_mb": self.memory_mb, "threads": self.concurrency}).encode() + b"\n"


def command() -> list[str]:
    """The command of a host process; only `Served.path` and installed packages are imported from."""
    return [sys.executable, "-P", "-m", "marlaas.environments.host"]


def variables() -> dict[str, str]:
    """Its environment variables: ours, this package found as here, and one thread a library."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def start_problem(served: Served, entry: str) -> str | None:
    """Why a process would not start to serve a user's entry, as `field: problem`, or None. It ends at once."""
    try:
        done = subprocess.run(
            command(), input=served.opening(), capture_output=True, env=variables(), timeout=START_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"entry: {entry!r} does not import within {START_SECONDS:g} seconds"
    if not done.stdout:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        return f"entry: {entry!r} does not import: its process ended with status {done.returncode}: {errors[-1:]}"
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer.get("error")


class _Ended(Exception):
    """The process ended; the text says why, after 'its process'."""


class _Running:
    """One process, from start to end."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.reason: str | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = 0
        self._errors: deque[str] = deque(maxlen=8)
        self._listening = asyncio.create_task(self._listen())
        self._reading_errors = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, served: Served) -> _Running:
        process = await asyncio.create_subprocess_exec(
            *command(),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=LINE_LIMIT,
            start_new_session=True,
            env=variables(),
        )
        running = cls(process)
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await running._ask(0, served.opening())
            if "error" in answer:
                raise EnvironmentFailure(answer["error"])
        except BaseException as error:
            running.end("did not start")
            await running.wait()
            if isinstance(error, TimeoutError):
                raise _Ended(f"did not start within {START_SECONDS:g} seconds") from None
            raise
        return running

    async def call(self, method: str, arguments: list[Any], seconds: float, what: str) -> dict[str, Any]:
        self._ids += 1
        line = json.dumps({"id": self._ids, "method": method, "arguments": arguments}).encode() + b"\n"
        try:
            async with asyncio.timeout(seconds):
                return await self._ask(self._ids, line)
        except TimeoutError:
            self.end(f"was ended because {what} took longer than {seconds:g} seconds")
            raise

    async def _ask(self, id: int, line: bytes) -> dict[str, Any]:
        if self.reason is not None:
            raise _Ended(self.reason)
        answer = self._answers[id] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line)
            return await answer
        finally:
            self._answers.pop(id, None)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        reason = "answered nonsense"
        try:
            async for line in self.process.stdout:
                message = json.loads(line)
                answer = self._answers.get(message.get("id", 0))
                if answer is not None and not answer.done():
                    answer.set_result(message)
            reason = await self._ending()
        finally:
            self.end(reason)

    async def _ending(self) -> str:
        """Why the process ended by itself. Its children may hold the pipes open, so the wait is limited."""
        await asyncio.wait([self._reading_errors], timeout=1)
        try:
            status = await asyncio.wait_for(self.process.wait(), 1)
        except TimeoutError:
            return "closed its output"
        ending = f"exited with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
        return f"{ending}: {self._errors[-1].strip()}" if self._errors else ending

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(65536):
            self._errors.extend(line for line in chunk.decode(errors="replace").splitlines() if line.strip())

    def end(self, reason: str) -> None:
        """Kills the process and its children; calls in flight raise _Ended with the first reason there was."""
        if self.reason is None:
            self.reason = reason
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(_Ended(self.reason))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self) -> None:
        """Returns when the process is gone."""
        await self.process.wait()
        await asyncio.gather(self._listening, self._reading_errors, return_exceptions=True)


class Host:
    """Calls to one served object, from one event loop. The process starts with the first call."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(served.concurrency)

    async def call(self, method: str, *arguments: Any, seconds: float, what: str) -> Any:
        """The result of `method(*arguments)`, JSON in and out; `what` names the environment and the call in failures.

        A call longer than `seconds` ends the process, and others in flight are sent again to a new one. Raises
        EnvironmentFailure when the call raises, takes too long, or its process ends twice.
        """
        async with self._slots:
            for send in range(_SENDS):
                try:
                    running = await self._process()
                    answer = await running.call(method, list(arguments), seconds, what)
                    break
                except TimeoutError:
                    raise EnvironmentFailure(f"{what} took longer than {seconds:g} seconds") from None
                except EnvironmentFailure as error:
                    raise EnvironmentFailure(f"{what} failed: {error}") from None
                except _Ended as error:
                    if send + 1 == _SENDS:
                        raise EnvironmentFailure(f"{what} failed: its process {error}") from None
        if "error" in answer:
            raise EnvironmentFailure(f"{what} failed: {answer['error']}")
        return answer["result"]

    async def _process(self) -> _Running:
        async with self._starting:
            if self._running is not None and self._running.reason is not None:
                await self._running.wait()
                self._running = None
            if self._running is None:
                self._running = await _Running.start(self._served)
            return self._running

    async def close(self) -> None:
        """Ends the process and waits until it is gone."""
        if self._running is not None:
            self._running.end("was closed")
            await self._running.wait()


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, tuple[Host, set[SharedHost]]]] = WeakKeyDictionary()


class SharedHost:
    """A host that all who name the same `served` on an event loop share; it ends with the last that closes."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def call(self, method: str, *arguments: Any, seconds: float, what: str) -> Any:
        """As `Host.call`."""
        hosts = _shared.setdefault(asyncio.get_running_loop(), {})
        if self._served.entry not in hosts:
            hosts[self._served.entry] = (Host(self._served), set())
        host, users = hosts[self._served.entry]
        users.add(self)
        return await host.call(method, *arguments, seconds=seconds, what=what)

    async def close(self) -> None:
        """Gives up this share."""
        hosts = _shared.get(asyncio.get_running_loop(), {})
        host, users = hosts.get(self._served.entry, (None, set()))
        users.discard(self)
        if host is not None and not users:
            del hosts[self._served.entry]
            await host.close()
