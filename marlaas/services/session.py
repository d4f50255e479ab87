"""Starting and stopping the processes of one session; the folder's lock is held by the caller."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from marlaas.services import database, postgres, processes, servers
from marlaas.services.processes import ProcessRecord, ServiceError, find
from marlaas.services.state import SessionState

TITLES = {"postgres": "PostgreSQL", "prefect": "Prefect", "mlflow": "MLflow"}
_POLL_SECONDS = 0.1
_SERVER_GRACE_SECONDS = 10


class SessionStart:
    """One attempt to start services; remembers each process on disk as soon as it exists.

    Attributes:
        children: the processes started so far, by service.
    """

    def __init__(self, state: SessionState, folder: Path, progress: Callable[[str], None], seconds: float) -> None:
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._state, self._folder, self._progress = state, folder, progress
        self._seconds, self._began = seconds, time.monotonic()

    def run(self, database_url: str | None, names: list[str]) -> None:
        """Start what is named ("prefect", "mlflow"), and PostgreSQL first when no database is given.

        Raises:
            ServiceError: a service ended or did not answer in time; what was started still runs.
        """
        if not names:
            return
        url = database_url or self.start_postgres()
        self._state.database = database.display_url(url)
        database.ensure_databases(url, names)
        for name in names:
            self._start_server(name, url)
        self._wait(names, url)

    def start_postgres(self) -> str:
        """Start the embedded PostgreSQL and wait for it; its URL."""
        data = self._folder / "postgres"
        user = postgres.prepare(data, self._progress)
        postgres.end(postgres.leftover(data))
        socket_folder = postgres.socket_folder(data, user)
        self._state.socket_folder = str(socket_folder) if socket_folder != data else None
        url = postgres.socket_url(socket_folder)
        command = postgres.command(data, socket_folder)
        self._launch("postgres", command, url, postgres.environment(), user)
        self._wait(["postgres"], url)
        return url

    def _start_server(self, name: str, database_url: str) -> None:
        (self._folder / name).mkdir(exist_ok=True)
        port, url = self._state.port(name), database.driver_url(database_url, name)
        environment = servers.server_environment(name, url, port, self._folder, self._state.token)
        command = servers.command(name, port, self._folder)
        self._launch(name, command, servers.base_url(name, port), environment)

    def _launch(
        self, name: str, command: list[str], url: str, environment: Mapping[str, str], user: int | None = None
    ) -> None:
        self._progress(f"starting {TITLES[name]}")
        log = self._folder / "logs" / f"{name}.log"
        folder = Path("/") if user is not None else self._folder  # root's folders may be closed to that user
        record, self.children[name] = processes.launch(
            name, command, url=url, log=log, environment=environment, folder=folder, user=user
        )
        self._state.processes[name] = record
        self._state.save(self._folder)

    def _wait(self, names: list[str], database_url: str) -> None:
        """Until all answer; the first that ends or runs out of time raises."""
        waiting = list(names)
        while waiting:
            for name in list(waiting):
                record = self._state.processes[name]
                if (code := self.children[name].poll()) is not None:
                    raise self._failure(record, f"ended with exit code {code} while starting", database_url)
                if (wrong := health_error(record)) is None:
                    waiting.remove(name)
                    self._progress(f"{TITLES[name]} is ready ({time.monotonic() - self._began:.1f} s)")
                elif time.monotonic() - self._began > self._seconds:
                    text = f"did not answer within services.max_start_seconds={self._seconds:g} ({wrong})"
                    raise self._failure(record, text, database_url)
            time.sleep(_POLL_SECONDS)

    def _failure(self, record: ProcessRecord, text: str, database_url: str) -> ServiceError:
        end = database.redact(processes.tail(Path(record.log)), database_url)
        return ServiceError(f"{TITLES[record.name]} {text}. The end of its log {record.log}:\n{end}")


def start_watchdog(folder: Path, token: str) -> subprocess.Popen[bytes]:
    """Start the watchdog of this process: it acts when its `stdin` closes with nothing written to it."""
    root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with (folder / "logs" / "watchdog.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "marlaas.services.watchdog", str(folder), token],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": search_path},
            cwd=folder,
            start_new_session=True,
        )


def health_error(record: ProcessRecord) -> str | None:
    """None when the remembered process lives and answers, else what is wrong."""
    if find(record) is None:
        return f"process {record.pid} is gone"
    if record.name != "postgres":
        return servers.health_error(record.url)
    return None if database.answers(record.url) else "it refuses connections"


def end_session(state: SessionState, folder: Path) -> bool:
    """Stop everything of the session, servers first, and remember that. True when something was running."""
    records = dict(state.processes)
    postgres_record = records.pop("postgres", None)
    server_processes = processes.family(records.values(), state.token)
    processes.end(server_processes, signal.SIGTERM, _SERVER_GRACE_SECONDS)
    postgres_process = find(postgres_record) if postgres_record else postgres.leftover(folder / "postgres")
    postgres.end(postgres_process)
    if state.socket_folder is not None:
        shutil.rmtree(state.socket_folder, ignore_errors=True)
    SessionState(ports=state.ports, database=state.database).save(folder)
    return bool(server_processes or postgres_process)
