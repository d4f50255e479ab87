"""Background processes that survive a terminal's Ctrl-C, are recognised later, and stop without a trace.

Every process leads a session of its own, and servers carry a token in their environment. A remembered
process is the same one only if its creation time matches, so a reused pid is never taken for ours. A server
that was started but never remembered (an interrupt in between) is still found by its token.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from marlaas.errors import MarlaasError

TOKEN_VARIABLE = "MARLAAS_SERVICES_SESSION"
_CLOCK_TOLERANCE_SECONDS = 1.0
_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0


class ServiceError(MarlaasError):
    """A service that cannot be started, reached or stopped; the text names it and says where its log is."""


@dataclass(frozen=True)
class ProcessRecord:
    """What is remembered of a started service.

    Attributes:
        name: "postgres", "prefect" or "mlflow".
        url: where it answers; never contains a password.
        create_time: seconds since the epoch, as psutil reports it; tells a reused pid apart.
    """

    name: str
    pid: int
    create_time: float
    url: str
    log: str


def launch(
    name: str,
    command: Sequence[str],
    *,
    url: str,
    log: Path,
    environment: Mapping[str, str],
    folder: Path,
    user: int | None = None,
) -> tuple[ProcessRecord, subprocess.Popen[bytes]]:
    """Start `command` in a new session with its output in `log`; the log of the last start is kept beside it.

    Args:
        user: numeric id of the user (and group) to run as, for a parent that is root.
    """
    if log.exists():
        log.replace(log.with_suffix(".previous.log"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            cwd=folder,
            start_new_session=True,
            **identity(user),
        )
    try:
        create_time = psutil.Process(process.pid).create_time()
    except psutil.NoSuchProcess:  # ended already: nothing to recognise later
        create_time = 0.0
    return ProcessRecord(name, process.pid, create_time, url, str(log)), process


def identity(user: int | None) -> dict[str, Any]:
    """The options of `subprocess` that make a child run as that user, in its group alone."""
    if user is None:
        return {}
    return {"user": user, "group": pwd.getpwuid(user).pw_gid, "extra_groups": []}


def find(record: ProcessRecord) -> psutil.Process | None:
    """The remembered process, or None when it ended, even if something else has its pid now."""
    try:
        process = psutil.Process(record.pid)
        if abs(process.create_time() - record.create_time) > _CLOCK_TOLERANCE_SECONDS:
            return None
    except psutil.NoSuchProcess:
        return None
    return None if _gone(process) else process


def family(records: Iterable[ProcessRecord], token: str) -> list[psutil.Process]:
    """Live processes in the sessions led by `records`, and all others that carry `token`."""
    leaders = {record.pid for record in records if find(record) is not None}
    return [process for process in psutil.process_iter() if _belongs(process, leaders, token)]


def _belongs(process: psutil.Process, leaders: set[int], token: str) -> bool:
    try:
        if os.getsid(process.pid) in leaders:
            return True
        return process.environ().get(TOKEN_VARIABLE) == token
    except (psutil.Error, OSError):  # ended meanwhile, or another user's: not ours
        return False


def end(processes: Sequence[psutil.Process], first: signal.Signals, grace_seconds: float) -> None:
    """Send `first` to all, wait up to `grace_seconds`, then SIGKILL what is left and wait for that too."""
    for process in processes:
        _send(process, first)
    remaining = _wait_gone(processes, grace_seconds)
    for process in remaining:
        _send(process, signal.SIGKILL)
    if stuck := _wait_gone(remaining, _KILL_SECONDS):
        raise ServiceError(f"processes {[process.pid for process in stuck]} do not end, even after SIGKILL")


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _wait_gone(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    remaining = [process for process in processes if not _gone(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        remaining = [process for process in remaining if not _gone(process)]
    return remaining


def _gone(process: psutil.Process) -> bool:
    """Whether it ended; a zombie counts as ended, and is reaped when it is a child of this process."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log, for an error message."""
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) or "(the log is empty)"
