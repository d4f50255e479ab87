"""Processes that a benchmark measures in: one a side, all of them open, so that their runs can alternate.

A worker is a Python module of ours or of a peer. It gets the path of a job file, says a line of JSON when it is ready,
and then answers lines of JSON with lines of JSON. `bench/peers/serve.py` is its side of this.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The same allocator settings as the engine's own, for every side.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_LAST = 2000  # characters of standard error that a failure shows


class WorkerFailed(RuntimeError):
    """A worker that ended; the message has the end of what it wrote on standard error."""


class Worker:
    """A running worker, as a context manager. `ready` is what it said first."""

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        threads: int,
        python: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts `python -m module` and waits until it is ready. Raises WorkerFailed."""
        self.module = module
        self._job = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        json.dump(job, self._job)
        self._job.flush()
        of_threads = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-m", module, self._job.name],
            cwd=ROOT,
            env={**os.environ, **ALLOCATOR, **of_threads, **(variables or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.ready = self._read()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer. Raises WorkerFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading says why
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        raise WorkerFailed(f"{self.module} ended with {code}:\n{self._errors.read()[-_LAST:]}")

    def close(self) -> None:
        """Ends the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._job.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
