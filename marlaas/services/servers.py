"""How the Prefect and MLflow servers are started, configured and asked for their health."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from marlaas.services.processes import TOKEN_VARIABLE

HOST = "127.0.0.1"
_HEALTH_SECONDS = 3

# Batches cut the server's CPU from 46 to 20 ms a task.
_PREFECT_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
}
_QUIET = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
}
_MLFLOW_WORKERS = 1  # its requests are short, and each worker holds 300 MB


def base_url(name: str, port: int) -> str:
    """What clients are given: Prefect's API URL or MLflow's tracking URI."""
    return f"http://{HOST}:{port}" + ("/api" if name == "prefect" else "")


def health_error(url: str) -> str | None:
    """None when the server behind a Prefect API URL or an MLflow tracking URI is well, else what is wrong.

    Proxies are bypassed for the embedded servers and used for other people's.
    """
    embedded = url.startswith(f"http://{HOST}:")
    opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if embedded else []))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=_HEALTH_SECONDS) as reply:
            return None if reply.status == 200 else f"HTTP {reply.status}"
    except (OSError, ValueError) as error:  # URLError and timeouts are OSErrors
        return str(error)


def command(name: str, port: int, folder: Path) -> list[str]:
    """The command line of a server. It holds no secret, since others can read it."""
    address = ["--host", HOST, "--port", str(port)]
    if name == "prefect":
        return [sys.executable, "-P", "-m", "prefect", "server", "start", *address]
    artifacts = (folder / "mlflow" / "artifacts").as_uri()
    options = ["--workers", str(_MLFLOW_WORKERS), "--uvicorn-opts=--no-access-log"]
    options += ["--artifacts-destination", artifacts]
    return [sys.executable, "-P", "-m", "mlflow", "server", *address, *options]


def server_environment(name: str, database: str, port: int, folder: Path, token: str) -> dict[str, str]:
    """The environment of a server: ours alone decides, whatever PREFECT_* and MLFLOW_* the user has set.

    Args:
        database: its SQLAlchemy URL, password included.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment = inherited | _QUIET | {TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}
    if name == "prefect":
        environment |= _PREFECT_SETTINGS | {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": base_url(name, port),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": database,
        }
    else:
        environment |= {
            "MLFLOW_BACKEND_STORE_URI": database,
            # Forty server threads may each hold two connections; with the default of 15 they deadlock.
            "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": "10",
            "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": "80",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its job runners, which nothing here uses
        }
    return environment


def client_environment(prefect_api_url: str, mlflow_tracking_uri: str, folder: Path) -> dict[str, str]:
    """What a process needs in its environment to use the servers, before it imports prefect or mlflow."""
    return _QUIET | {
        "PREFECT_API_URL": prefect_api_url,
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",
        "MLFLOW_TRACKING_URI": mlflow_tracking_uri,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",  # 14 s of patience instead of 4 minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "60",
        "MLFLOW_HTTP_POOL_MAXSIZE": "64",  # one connection a tenant's thread
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        **_no_proxy(),
    }


def _no_proxy() -> dict[str, str]:
    """Clients reach loopback directly even where the user has a proxy set."""
    hosts = [host for host in os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")).split(",") if host]
    value = ",".join(dict.fromkeys([*hosts, HOST, "localhost"]))
    return {"NO_PROXY": value, "no_proxy": value}
