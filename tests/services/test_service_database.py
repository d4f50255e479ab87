import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import psycopg2
import pytest

from marlaas.services import ServiceError, Services, start_services
from marlaas.services.database import answers, display_url, driver_url, ensure_databases, redact
from marlaas.services.processes import ProcessRecord, find
from marlaas.services.session import SessionStart, end_session
from marlaas.services.state import SessionState, locked
from marlaas.specs import ServicesSpec


def execute(url: str, statement: str) -> None:
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        connection.cursor().execute(statement)


def start_postgres(folder: Path) -> tuple[SessionState, str]:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    state = SessionState(token="test")
    return state, SessionStart(state, folder, lambda line: None, 60).start_postgres()


def named(url: str, database: str, login: str = "postgres") -> str:
    return url.replace("//postgres@/", f"//{login}@/{database}")


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL server that plays somebody else's."""
    with tempfile.TemporaryDirectory(prefix="marlaas-test-") as folder:
        state, url = start_postgres(Path(folder))
        yield url
        assert end_session(state, Path(folder))


def test_display_url_has_no_password() -> None:
    url = "postgresql://ann:s%40cret@db.example:5433/x?password=s%40cret&sslmode=require"
    assert display_url(url) == "postgresql://ann@db.example:5433/x?sslmode=require"
    assert redact("no s@cret, no s%40cret", url) == "no ***, no ***"


def test_driver_urls_keep_login_and_options() -> None:
    url = "postgresql://ann:pw@db:5433/x?sslmode=require"
    assert driver_url(url, "prefect") == "postgresql+asyncpg://ann:pw@db:5433/prefect?ssl=require"
    assert driver_url(url, "mlflow") == "postgresql+psycopg2://ann:pw@db:5433/mlflow?sslmode=require"


def test_missing_databases_are_created_once(postgres_url: str) -> None:
    ensure_databases(postgres_url, ["first"])
    ensure_databases(postgres_url, ["first", "second"])
    assert answers(named(postgres_url, "first"))
    assert answers(named(postgres_url, "second"))


def test_database_that_cannot_be_created_is_named(postgres_url: str) -> None:
    execute(postgres_url, "CREATE ROLE guest LOGIN PASSWORD 'hidden'")
    url = named(postgres_url, "postgres", "guest:hidden")
    with pytest.raises(ServiceError, match=r"'third' is missing.*permission denied") as caught:
        ensure_databases(url, ["third"])
    assert "hidden" not in str(caught.value)


def test_unreachable_database_is_an_error_without_password(state_folder: Path) -> None:
    spec = ServicesSpec(state=state_folder, database="postgresql://ann:hidden@127.0.0.1:9/x")
    with pytest.raises(ServiceError, match=r"services\.database: cannot connect to .*ann@127") as caught:
        start_services(spec)
    assert "hidden" not in str(caught.value)


def test_given_database_is_used_and_its_password_kept_secret(
    services: Services, postgres_url: str, state_folder: Path
) -> None:
    spec = ServicesSpec(
        state=state_folder,
        database=named(postgres_url, "postgres", "postgres:hidden"),
        prefect_api_url=services.prefect_api_url,
    )
    with start_services(spec) as started:
        assert started.database_url is not None
        assert "hidden" not in started.database_url
        execute(named(postgres_url, "mlflow"), "SELECT * FROM experiments")
        assert not (state_folder / "postgres").exists()
        commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        assert not any("hidden" in command for command in commands)
    written = [path.read_text() for path in state_folder.rglob("*") if path.is_file() and path.suffix != ".sock"]
    assert not any("hidden" in text for text in written)


def test_server_that_refuses_its_database_is_named_with_its_log(
    services: Services, postgres_url: str, state_folder: Path
) -> None:
    execute(postgres_url, "DROP DATABASE IF EXISTS mlflow WITH (FORCE)")
    execute(postgres_url, "CREATE DATABASE mlflow")
    execute(named(postgres_url, "mlflow"), "CREATE TABLE alembic_version (version_num varchar(32))")
    execute(named(postgres_url, "mlflow"), "INSERT INTO alembic_version VALUES ('from_the_future')")
    spec = ServicesSpec(state=state_folder, database=postgres_url, prefect_api_url=services.prefect_api_url)
    with pytest.raises(ServiceError, match="MLflow ended with exit code 1 while starting") as caught:
        start_services(spec)
    assert str(state_folder / "logs" / "mlflow.log") in str(caught.value)
    assert "from_the_future" in str(caught.value)


def test_data_folder_with_a_long_or_odd_path_works_and_is_found_again(state_folder: Path) -> None:
    folder = state_folder / ("long %20 path é' " + "x" * 100)
    state, url = start_postgres(folder)
    ensure_databases(url, ["mlflow"])
    forgotten, url = start_postgres(folder)  # nothing remembers the first server: it is stopped and replaced
    assert find(state.processes["postgres"]) is None
    assert answers(named(url, "mlflow"))
    assert end_session(forgotten, folder)
    assert forgotten.socket_folder is not None
    assert not Path(forgotten.socket_folder).exists()
    end_session(state, folder)


def test_reused_pid_is_never_stopped(state_folder: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    create_time = psutil.Process(sleeper.pid).create_time()
    try:
        same = ProcessRecord("mlflow", sleeper.pid, create_time, "http://127.0.0.1:9", "log")
        other = ProcessRecord("mlflow", sleeper.pid, create_time - 100, "http://127.0.0.1:9", "log")
        assert find(same) is not None
        assert find(other) is None
        assert not end_session(SessionState(token="test", processes={"mlflow": other}), state_folder)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_busy_lock_times_out_with_the_folder(state_folder: Path) -> None:
    with locked(state_folder, 1):
        began = time.monotonic()
        with pytest.raises(ServiceError, match=str(state_folder)), locked(state_folder, 0.3):
            pytest.fail("took a lock that is held")
        assert 0.2 < time.monotonic() - began < 5


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_postgres_of_root_runs_as_another_user(postgres_url: str) -> None:
    data_folder = Path(postgres_url.partition("host=")[2].partition("&")[0])
    assert data_folder.stat().st_uid != 0
    assert data_folder.stat().st_mode & 0o077 == 0
