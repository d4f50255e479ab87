"""The services as flows see them, and how a test runs a flow."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fleets import GAMES, JOB, MODEL, POOL, SMALL, Trained, game
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_LOGGING_TO_API_ENABLED,
    PREFECT_SERVER_EPHEMERAL_ENABLED,
    temporary_settings,
)

from flows.train_fleet import train_fleet
from marlaas.fleet_files import parse_fleet
from marlaas.services import Services
from marlaas.specs import FleetSpec
from marlaas.tracking import Tracker


@pytest.fixture(scope="session")
def variables(services: Services) -> dict[str, str]:
    """The environment of a process that uses the session's services, with one torch thread."""
    return {**os.environ, **services.environment(), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="session")
def run_flow(services: Services, variables: dict[str, str]) -> Callable[..., Any]:
    """Runs a flow's coroutine in this process, on the session's services."""

    def run(coroutine: Any) -> Any:
        settings = {
            PREFECT_API_URL: services.prefect_api_url,
            PREFECT_LOGGING_TO_API_ENABLED: False,
            PREFECT_SERVER_EPHEMERAL_ENABLED: False,
        }
        with pytest.MonkeyPatch.context() as patch, temporary_settings(settings):
            for name, value in variables.items():
                patch.setenv(name, value)
            return asyncio.run(coroutine)

    return run


@pytest.fixture(scope="session")
def prefect_client(services: Services) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: services.prefect_api_url}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="session")
def tracker(services: Services) -> Iterator[Tracker]:
    with Tracker(services.mlflow_tracking_uri) as opened:
        yield opened


@pytest.fixture(scope="session")
def fleet_of(model_cache: Path, services: Services) -> Callable[..., FleetSpec]:
    """Builds a fleet on the tiny random model: fleet_of(name, store url, tenants, defaults)."""

    def build(name: str, store: str | Path, tenants: list[dict[str, Any]], **defaults: Any) -> FleetSpec:
        document = {
            "name": name,
            "model": {**MODEL, "cache": str(model_cache)},
            "pool": POOL,
            "store": store if isinstance(store, dict) else {"url": str(store)},
            "services": {
                "prefect_api_url": services.prefect_api_url,
                "mlflow_tracking_uri": services.mlflow_tracking_uri,
            },
            "defaults": defaults,
            "tenants": tenants,
        }
        return parse_fleet(document)

    return build


@pytest.fixture
def marlaas(variables: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the command in the test's folder; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "marlaas.cli", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, start_new_session=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def trained(tmp_path_factory, fleet_of, run_flow) -> Trained:
    """A fleet of five tenants, trained once; two of them fail. Tests leave its store as it is."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "games.py").write_text(GAMES)
    letters = game("Letters", folder)
    tenants = [
        {
            "name": "narrow",
            "steps": 4,
            "max_staleness": 0,
            "environment": letters,
            "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]},
        },
        {"name": "wide", "steps": 5, "max_staleness": 2, "lora": {"rank": 8}, "keep_checkpoints": 3, "seed": 5},
        {
            "name": "judged",
            "steps": 3,
            "environment": letters,
            "publish_every": 10,
            "keep_checkpoints": 1,
            "algorithm": {"kl_coefficient": 0.1},
        },
        {"name": "raises", "steps": 3, "environment": game("Raises", folder)},
        {"name": "nan", "steps": 3, "environment": game("Nan", folder)},
    ]
    fleet = fleet_of(JOB, folder / "store", tenants, publish_every=2, **SMALL)
    rows = run_flow(train_fleet(fleet))
    return Trained(fleet, folder, fleet.store.open(), {row["tenant"]: row for row in rows})
