"""The services of one machine: PostgreSQL, the Prefect server and the MLflow server, in one state folder.

Whoever starts the services owns them: they stop with its `Services` object or, at the latest, when its
process ends (a watchdog sees to it, also after kill -9). `marlaas up` starts them to stay. Everybody else
attaches to what runs.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from marlaas.services import database, servers
from marlaas.services.processes import ServiceError, find
from marlaas.services.session import SessionStart, end_session, health_error, start_watchdog
from marlaas.services.state import SessionState, locked

if TYPE_CHECKING:
    from marlaas.specs import ServicesSpec

__all__ = [
    "ServiceError",
    "ServiceStatus",
    "Services",
    "running_services",
    "service_status",
    "start_services",
    "stop_services",
]

_STOP_SECONDS = 120
_BUSY_SECONDS = 20

# By session token: this process's watchdogs, whose pipes must stay open until it ends, and what it started.
_watchdogs: dict[str, subprocess.Popen[bytes]] = {}
_started: dict[str, dict[str, subprocess.Popen[bytes]]] = {}


@dataclass(frozen=True)
class ServiceStatus:
    """One line of `marlaas status`.

    Attributes:
        pid: None when the service is somebody else's or not running.
        healthy: it answers right now.
        log: None when the service is somebody else's.
    """

    name: str
    url: str | None
    pid: int | None
    healthy: bool
    log: Path | None


@dataclass(frozen=True)
class Services:
    """Running services.

    Attributes:
        database_url: PostgreSQL's URL without password; None when both servers are somebody else's.
        owned: they were started by this call and stop with this object.
        folder: the state folder.
        token: the session they belong to; "" when all are somebody else's.
    """

    prefect_api_url: str
    mlflow_tracking_uri: str
    database_url: str | None
    owned: bool
    folder: Path
    token: str

    def environment(self) -> dict[str, str]:
        """What a client process needs in its environment, before it imports prefect or mlflow."""
        return servers.client_environment(self.prefect_api_url, self.mlflow_tracking_uri, self.folder)

    def stop(self) -> None:
        """Stop them, whoever owns them. Nothing happens when they were stopped already."""
        if self.token:
            _stop(self.folder, self.token, even_if_kept=True)

    def __enter__(self) -> Services:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop them if owned, unless a `marlaas up` has asked for them to stay in the meantime."""
        if self.owned and self.token:
            _stop(self.folder, self.token, even_if_kept=False)


def start_services(
    spec: ServicesSpec, progress: Callable[[str], None] | None = None, *, keep_running: bool = False
) -> Services:
    """Attach to the running services of `spec.state`, or start them.

    Args:
        progress: called with a short line for each thing that happens.
        keep_running: they stay when this process ends (`marlaas up`).

    Raises:
        ServiceError: a service did not start (nothing is left behind), one given by URL does not answer, or
            the running ones were started with another configuration.
    """
    _check_given(spec)
    progress = progress or (lambda line: None)
    folder = _folder(spec)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ServiceError(f"services.state: cannot make the folder {folder}: {error}") from None
    with locked(folder, 2 * spec.max_start_seconds):
        state = SessionState.load(folder)
        if _answers_soon(spec, state):
            state.kept = state.kept or keep_running
            state.save(folder)
            progress("using the services that are running already")
            return _services(spec, state)
        kept = (_clear(spec, state, folder, progress) and state.kept) or keep_running
        return _start(spec, state.ports, folder, progress, kept)


def running_services(spec: ServicesSpec) -> Services | None:
    """The running services, or None unless all of them answer."""
    state = SessionState.load(_folder(spec))
    given = filter(None, [spec.prefect_api_url, spec.mlflow_tracking_uri])
    if not _is_running(spec, state) or any(servers.health_error(url) for url in given):
        return None
    return _services(spec, state)


def stop_services(spec: ServicesSpec) -> bool:
    """Stop the services of `spec.state` and what is left of broken ones. True when something was running."""
    folder = _folder(spec)
    return folder.exists() and _stop(folder, None, even_if_kept=True)


def service_status(spec: ServicesSpec) -> list[ServiceStatus]:
    """One entry for each service that `spec` asks for, running or not."""
    state = SessionState.load(_folder(spec))
    given = {"prefect": spec.prefect_api_url, "mlflow": spec.mlflow_tracking_uri}
    statuses = []
    if spec.database != "embedded" and _local_servers(spec):
        shown, well = database.display_url(spec.database), database.answers(spec.database)
        statuses.append(ServiceStatus("postgres", shown, None, well, None))
    for name in [*_wanted(spec), *(name for name, url in given.items() if url)]:
        if url := given.get(name):
            statuses.append(ServiceStatus(name, url, None, servers.health_error(url) is None, None))
        elif record := state.processes.get(name):
            pid = record.pid if find(record) else None
            statuses.append(ServiceStatus(name, record.url, pid, health_error(record) is None, Path(record.log)))
        else:
            statuses.append(ServiceStatus(name, None, None, False, None))
    return statuses


def _start(
    spec: ServicesSpec, ports: dict[str, int], folder: Path, progress: Callable[[str], None], kept: bool
) -> Services:
    state = SessionState(token=uuid.uuid4().hex, ports=ports)
    starting = SessionStart(state, folder, progress, spec.max_start_seconds)
    try:
        state.save(folder)
        _started[state.token] = starting.children
        _watchdogs[state.token] = start_watchdog(folder, state.token)
        starting.run(None if spec.database == "embedded" else spec.database, _local_servers(spec))
        state.kept, state.complete = kept, True
        state.save(folder)
    except BaseException:  # also Ctrl-C: nothing may be left behind
        end_session(state, folder)
        _forget(state.token)
        raise
    if kept:
        _dismiss_watchdog(state.token)
    return replace(_services(spec, state), owned=not kept)


def _clear(spec: ServicesSpec, state: SessionState, folder: Path, progress: Callable[[str], None]) -> bool:
    """Stop what an earlier start left; true when something was. Another, living configuration is refused."""
    if any(find(record) for record in state.processes.values()):
        if state.complete and not _matches(spec, state):
            raise ServiceError(
                f"the services in {folder} were started with another configuration "
                f"({', '.join(state.processes)} on {state.database}): stop them first with `marlaas down`"
            )
        progress("stopping what an earlier start has left")
    stopped = end_session(state, folder)
    _forget(state.token)
    return stopped


def _stop(folder: Path, token: str | None, even_if_kept: bool) -> bool:
    """Stop the session named `token` (None: whichever there is)."""
    with locked(folder, _STOP_SECONDS):
        state = SessionState.load(folder)
        if (token is not None and state.token != token) or (state.kept and not even_if_kept):
            return False
        stopped = end_session(state, folder)
        _forget(state.token)
    return stopped


def _forget(token: str) -> None:
    """Drop what this process holds of a session that has ended."""
    _dismiss_watchdog(token)
    for process in _started.pop(token, {}).values():
        process.wait()


def _dismiss_watchdog(token: str) -> None:
    if process := _watchdogs.pop(token, None):
        process.communicate(b"dismissed")


def _folder(spec: ServicesSpec) -> Path:
    return spec.state.expanduser().resolve()


def _local_servers(spec: ServicesSpec) -> list[str]:
    given = {"prefect": spec.prefect_api_url, "mlflow": spec.mlflow_tracking_uri}
    return [name for name, url in given.items() if url is None]


def _wanted(spec: ServicesSpec) -> list[str]:
    local = _local_servers(spec)
    return ["postgres", *local] if local and spec.database == "embedded" else local


def _matches(spec: ServicesSpec, state: SessionState) -> bool:
    """Whether the remembered processes are what `spec` asks for, or more."""
    names = set(state.processes)
    if spec.database == "embedded" or not _local_servers(spec):
        return set(_wanted(spec)) <= names
    same_database = "postgres" not in names and state.database == database.display_url(spec.database)
    return same_database and set(_wanted(spec)) <= names


def _is_running(spec: ServicesSpec, state: SessionState) -> bool:
    wanted = _wanted(spec)
    return _matches(spec, state) and all(health_error(state.processes[name]) is None for name in wanted)


def _answers_soon(spec: ServicesSpec, state: SessionState) -> bool:
    """`_is_running`, with patience while all processes live: a busy machine is no reason to restart them."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while not _is_running(spec, state):
        alive = state.complete and _matches(spec, state) and all(map(find, state.processes.values()))
        if not alive or time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _services(spec: ServicesSpec, state: SessionState) -> Services:
    local = _local_servers(spec)
    return Services(
        prefect_api_url=spec.prefect_api_url or state.processes["prefect"].url,
        mlflow_tracking_uri=spec.mlflow_tracking_uri or state.processes["mlflow"].url,
        database_url=state.database if local else None,
        owned=False,
        folder=_folder(spec),
        token=state.token if local else "",
    )


def _check_given(spec: ServicesSpec) -> None:
    given = {"prefect_api_url": spec.prefect_api_url, "mlflow_tracking_uri": spec.mlflow_tracking_uri}
    for field, url in given.items():
        if url is not None and (wrong := servers.health_error(url)):
            raise ServiceError(f"services.{field}: {url}/health does not answer: {wrong}")
