import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from marlaas.services import (
    ServiceError,
    Services,
    running_services,
    service_status,
    start_services,
    stop_services,
)
from marlaas.specs import ServicesSpec

START = """
import sys
from marlaas.services import start_services
from marlaas.specs import ServicesSpec
spec = ServicesSpec(state=sys.argv[1], prefect_api_url=sys.argv[2], database=sys.argv[3])
start_services(spec, lambda line: print(line, flush=True), keep_running="keep" in sys.argv)
print("started", flush=True)
if "keep" not in sys.argv:
    sys.stdin.read()
"""


def processes_of(folder: Path) -> list[list[str]]:
    """Command lines of the live processes that work in or for a state folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        info = process.info
        places = [*(info["cmdline"] or []), info["cwd"] or ""]
        if any(str(folder) in place for place in places) and info["status"] != psutil.STATUS_ZOMBIE:
            found.append(info["cmdline"])
    return found


def wait_until_clean(folder: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def mlflow_only(folder: Path, services: Services) -> ServicesSpec:
    """A session of its own with as little to start as possible: the rest is taken from `services`."""
    assert services.database_url is not None
    return ServicesSpec(state=folder, prefect_api_url=services.prefect_api_url, database=services.database_url)


def start_elsewhere(spec: ServicesSpec, *arguments: str) -> subprocess.Popen[str]:
    """A process that starts services, says so, and waits."""
    assert spec.prefect_api_url is not None
    command = [sys.executable, "-c", START, str(spec.state), spec.prefect_api_url, spec.database, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for printed in process.stdout:
        if line in printed:
            return
    pytest.fail(f"ended without printing {line!r}")


def test_started_services_answer_and_list_themselves(services: Services, services_spec: ServicesSpec) -> None:
    statuses = service_status(services_spec)
    assert [status.name for status in statuses] == ["postgres", "prefect", "mlflow"]
    for status in statuses:
        assert status.healthy
        assert status.pid is not None
        assert psutil.pid_exists(status.pid)
        assert status.log is not None
        assert status.log.exists()
    assert services.owned
    assert statuses[1].url == services.prefect_api_url
    assert statuses[2].url == services.mlflow_tracking_uri


def test_prefect_writes_to_postgresql(services: Services) -> None:
    body = json.dumps({"name": "written-by-test"}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{services.prefect_api_url}/flows/", body, headers)
    with urllib.request.urlopen(request) as reply:
        created = json.load(reply)
    with urllib.request.urlopen(f"{services.prefect_api_url}/flows/name/written-by-test") as reply:
        assert json.load(reply)["id"] == created["id"]


def test_servers_listen_on_loopback_only(services: Services, services_spec: ServicesSpec) -> None:
    addresses = set()
    for status in service_status(services_spec):
        leader = psutil.Process(status.pid)
        for process in [leader, *leader.children(recursive=True)]:
            listening = (c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN)
            addresses |= {connection.laddr.ip for connection in listening}
    assert addresses == {"127.0.0.1"}


def test_client_environment_reaches_the_servers_and_is_quiet(services: Services) -> None:
    environment = services.environment()
    assert environment["PREFECT_API_URL"] == services.prefect_api_url
    assert environment["MLFLOW_TRACKING_URI"] == services.mlflow_tracking_uri
    assert Path(environment["PREFECT_HOME"]).parent == services.folder
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert "127.0.0.1" in environment["NO_PROXY"]


def test_second_start_attaches_and_leaves_them_running(services: Services, services_spec: ServicesSpec) -> None:
    lines: list[str] = []
    with start_services(services_spec, lines.append) as attached:
        assert not attached.owned
        assert attached.prefect_api_url == services.prefect_api_url
    assert lines == ["using the services that are running already"]
    found = running_services(services_spec)
    assert found is not None
    assert found.mlflow_tracking_uri == services.mlflow_tracking_uri


def test_busy_server_is_waited_for_and_not_restarted(services: Services, services_spec: ServicesSpec) -> None:
    mlflow = next(status for status in service_status(services_spec) if status.name == "mlflow")
    [worker] = psutil.Process(mlflow.pid).children()
    worker.suspend()
    try:
        assert running_services(services_spec) is None
        threading.Timer(1, worker.resume).start()
        assert not start_services(services_spec).owned
    finally:
        worker.resume()
    assert psutil.Process(mlflow.pid).children() == [worker]


def test_another_configuration_on_running_services_is_refused(services: Services) -> None:
    spec = ServicesSpec(state=services.folder, database="postgresql://elsewhere/x")
    with pytest.raises(ServiceError, match=r"another configuration.*marlaas down"):
        start_services(spec)


def test_given_url_that_does_not_answer_is_named(state_folder: Path) -> None:
    spec = ServicesSpec(state=state_folder, prefect_api_url="http://127.0.0.1:9/api")
    with pytest.raises(ServiceError, match=r"services\.prefect_api_url: http://127\.0\.0\.1:9/api/health"):
        start_services(spec)
    assert service_status(spec)[-1].healthy is False


def test_state_that_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ServiceError, match=r"services\.state: cannot make the folder .*file"):
        start_services(ServicesSpec(state=tmp_path / "file"))


def test_only_given_servers_start_nothing(services: Services, state_folder: Path) -> None:
    given = {"prefect_api_url": services.prefect_api_url, "mlflow_tracking_uri": services.mlflow_tracking_uri}
    spec = ServicesSpec(state=state_folder, **given)
    with start_services(spec) as attached:
        assert attached.database_url is None
        assert processes_of(state_folder) == []
        assert [(status.name, status.healthy) for status in service_status(spec)] == [
            ("prefect", True),
            ("mlflow", True),
        ]


def test_concurrent_starts_share_one_session_and_its_urls_survive_restarts(
    services: Services, state_folder: Path
) -> None:
    spec = mlflow_only(state_folder, services)
    started: list[Services] = []
    threads = [threading.Thread(target=lambda: started.append(start_services(spec))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.owned for entry in started) == [False, True]
    assert started[0].mlflow_tracking_uri == started[1].mlflow_tracking_uri

    mlflow = next(status for status in service_status(spec) if status.name == "mlflow")
    os.kill(mlflow.pid or 0, signal.SIGKILL)
    while running_services(spec) is not None:
        time.sleep(0.05)
    with start_services(spec) as again:  # the broken session is replaced, the orphaned worker included
        assert again.owned
        assert again.mlflow_tracking_uri == mlflow.url
        assert running_services(spec) is not None
    assert running_services(spec) is None
    wait_until_clean(state_folder)
    for entry in started:
        entry.stop()  # their session is over: nothing to stop


def test_kept_services_outlive_their_starter_until_stopped(services: Services, state_folder: Path) -> None:
    process = start_elsewhere(mlflow_only(state_folder, services), "keep")
    assert process.wait(90) == 0
    spec = ServicesSpec(state=state_folder, prefect_api_url=services.prefect_api_url, database=services.database_url)
    attached = running_services(spec)
    assert attached is not None
    with attached:
        assert not attached.owned
    assert running_services(spec) is not None
    assert stop_services(spec)
    assert not stop_services(spec)
    wait_until_clean(state_folder)


@pytest.mark.parametrize(
    ("line", "number"), [("starting MLflow", signal.SIGINT), ("started", signal.SIGKILL)], ids=["ctrl-c", "kill-9"]
)
def test_interrupted_owner_leaves_nothing_behind(
    services: Services, state_folder: Path, line: str, number: signal.Signals
) -> None:
    spec = ServicesSpec(state=state_folder, prefect_api_url=services.prefect_api_url)
    process = start_elsewhere(spec)
    read_until(process, line)
    os.kill(process.pid, number)
    process.communicate(timeout=60)
    wait_until_clean(state_folder)


def test_start_that_takes_too_long_names_the_service_and_leaves_nothing(services: Services, state_folder: Path) -> None:
    spec = ServicesSpec(state=state_folder, prefect_api_url=services.prefect_api_url, max_start_seconds=2)
    with pytest.raises(ServiceError, match=r"MLflow did not answer within services\.max_start_seconds=2"):
        start_services(spec)
    wait_until_clean(state_folder)
