"""The process that runs code which may hang, crash or eat memory, so that it can be ended: `python -m` this.

It serves the public methods of one object over JSON lines. The first line on stdin is
`{"entry": "module:Class", "arguments": {}, "path": str | null, "memory_mb": int, "threads": int}`; the answer is
`{"ready": true}` or `{"error": str}`. Then each line is a call `{"id": int, "method": str, "arguments": []}`,
answered in any order by `{"id": int, "result": ...}` or `{"id": int, "error": str}`. Coroutine methods run on one
event loop, others in threads. These are limits against accidents and not a sandbox against malice.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import resource
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from marlaas.errors import EnvironmentFailure, MarlaasError

LINE_LIMIT = 64 * 2**20  # bytes of one message
_THREAD_STACK = 2 * 2**20  # bytes; stacks count against the memory limit


def resolve(entry: str) -> Any:
    """The object that `module:name` names. Raises EnvironmentFailure with the reason it does not import."""
    module, _, name = entry.partition(":")
    try:
        found = importlib.import_module(module)
    except BaseException as error:  # whatever a module raises at import is its user's to know
        raise EnvironmentFailure(f"{entry!r} does not import: {describe(error)}") from error
    if not hasattr(found, name):
        raise EnvironmentFailure(f"{entry!r} does not import: module {module} has no {name}")
    return getattr(found, name)


def describe(error: BaseException) -> str:
    """An exception in one line, with the last place in its traceback that is not of this package's."""
    if isinstance(error, MarlaasError):
        return str(error)
    if isinstance(error, MemoryError):
        return "ran out of memory_mb"
    text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    here = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not Path(f.filename).is_relative_to(here)]
    frames = [f for f in frames if not f.filename.startswith("<frozen importlib") and "importlib" not in f.filename]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def _line(message: dict[str, Any]) -> bytes:
    line = json.dumps(message).encode() + b"\n"
    if len(line) > LINE_LIMIT:
        raise EnvironmentFailure(f"answered with more than {LINE_LIMIT} bytes")
    return line


def _send(out: IO[bytes], line: bytes) -> None:
    out.write(line)
    out.flush()


class _Server:
    def __init__(self, served: Any, out: IO[bytes]) -> None:
        self._served, self._out = served, out
        self._lock = threading.Lock()

    async def call(self, id: int, method: str, arguments: list[Any]) -> None:
        function = getattr(self._served, method)
        try:
            if inspect.iscoroutinefunction(function):
                result = await function(*arguments)
            else:
                result = await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
            line = _line({"id": id, "result": result})
        except BaseException as error:  # the isolation boundary: what served code raises becomes an answer
            line = _line({"id": id, "error": describe(error)})
        with self._lock:
            _send(self._out, line)


async def _serve(server: _Server, requests: IO[bytes], threads: int) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(threads))
    running: set[asyncio.Task[None]] = set()

    def begin(message: dict[str, Any]) -> None:
        task = loop.create_task(server.call(**message))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(begin, json.loads(line))
        os._exit(0)  # the parent is gone or done; calls that hang must not keep this process

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


def _own_streams() -> tuple[IO[bytes], IO[bytes]]:
    """The protocol's pipes; fd 0 becomes empty and fd 1 stderr, so that prints of served code do no harm."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return requests, answers


def _limit_memory(megabytes: int) -> None:
    # Not RLIMIT_AS: address space that is only reserved, as by malloc's arenas, would count.
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_THREAD_STACK)


def main() -> None:
    """Serves until stdin ends."""
    requests, answers = _own_streams()
    opening = json.loads(requests.readline())
    _limit_memory(opening["memory_mb"])
    if opening["path"] is not None:
        sys.path.insert(0, opening["path"])
    try:
        served = resolve(opening["entry"])(**opening["arguments"])
    except BaseException as error:  # the isolation boundary
        _send(answers, _line({"error": describe(error)}))
        return
    _send(answers, _line({"ready": True}))
    asyncio.run(_serve(_Server(served, answers), requests, opening["threads"]))


if __name__ == "__main__":
    main()
