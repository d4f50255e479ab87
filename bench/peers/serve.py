"""The side of a worker in the protocol of `bench/workers.py`. Imports nothing but the standard library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(prepare: Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]) -> None:
    """Reads the job of the file named on the command line, then answers requests, a line of JSON each, until the input ends.

    prepare: from the job to what is said when all is ready, and the function that answers a request. Standard output
    is for answers only; what libraries print goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    ready, answer = prepare(json.loads(Path(sys.argv[1]).read_text()))
    say(ready)
    for line in sys.stdin:
        say(answer(json.loads(line)))


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
