"""The side of a worker in the protocol of `bench/workers.py`. Imports nothing but the standard library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Channel:
    """What a worker is asked and what it says. Standard output is for that only; the rest goes to standard error."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, content: dict[str, Any]) -> None:
        """An answer, or that the worker is ready."""
        print(json.dumps(content), file=self._answers, flush=True)

    def hear(self) -> dict[str, Any] | None:
        """The next request; None: there will be none."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None


def serve(prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]) -> None:
    """Answers requests until there are no more.

    prepare: from the job to what is said when all is ready, and the function that answers a request.
    """
    channel = Channel()
    ready, answer = prepare(channel.job)
    channel.say(ready)
    while (request := channel.hear()) is not None:
        channel.say(answer(request))


def high_water_mark() -> int:
    """Bytes: the most memory that the process has held since `forget_high_water_mark`."""
    return _status("VmHWM")


def resident() -> int:
    """Bytes that the process holds now."""
    return _status("VmRSS")


def forget_high_water_mark() -> None:
    """From now on the peak is what is held now (Linux, proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
