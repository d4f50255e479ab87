"""What the services of a state folder remember between processes, and the lock that orders their changes."""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from marlaas.services.processes import ProcessRecord, ServiceError

_LOCK_POLL_SECONDS = 0.1
_PORTS = range(20000, 32000)  # below the range that outgoing connections use


@dataclass
class SessionState:
    """One start of the services.

    Attributes:
        token: names the start; whoever stops "its" services compares it first.
        kept: true after `marlaas up`: the services stay when the process that started them ends.
        complete: all of its services were ready once.
        database: the database's URL without password.
        ports: last port of each server; survives a stop so that URLs stay the same.
        socket_folder: temporary folder of PostgreSQL's socket, if the data folder's path is too long for it.
    """

    token: str = ""
    kept: bool = False
    complete: bool = False
    database: str = ""
    processes: dict[str, ProcessRecord] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    socket_folder: str | None = None

    @classmethod
    def load(cls, folder: Path) -> SessionState:
        """The state in `folder`; an empty one when nothing was ever started there."""
        path = _state_path(folder)
        if not path.exists():
            return cls()
        values = json.loads(path.read_text())
        records = {name: ProcessRecord(**record) for name, record in values.pop("processes").items()}
        return cls(processes=records, **values)

    def save(self, folder: Path) -> None:
        """Replace the state file in one step."""
        path = _state_path(folder)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(path)

    def port(self, name: str) -> int:
        """The remembered port of a server if it is free, else a new free one, remembered from now on."""
        remembered = self.ports.get(name)
        if remembered is None or not _port_is_free(remembered):
            taken = set(self.ports.values())
            candidates = (port for port in random.sample(_PORTS, len(_PORTS)) if port not in taken)
            self.ports[name] = next(port for port in candidates if _port_is_free(port))
        return self.ports[name]


def _state_path(folder: Path) -> Path:
    return folder / "services.json"


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the folder's lock. The system frees it when its holder dies.

    Raises:
        ServiceError: somebody else held it for longer than `seconds`, or the folder is another user's.
    """
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError as error:
        raise ServiceError(f"services.state: {folder} belongs to somebody else: {error}") from None
    try:
        _acquire(descriptor, folder, seconds)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                text = "another process has been starting or stopping the services in"
                raise ServiceError(f"{text} {folder} for {seconds:.0f} s") from None
        time.sleep(_LOCK_POLL_SECONDS)
