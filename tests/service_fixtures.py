"""Real services for tests: PostgreSQL, Prefect and MLflow, started once a test session."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from marlaas.services import Services, start_services
from marlaas.specs import ServicesSpec

# Not under pytest's temporary folder: every pytest that starts closes that folder to other users again, and then
# the PostgreSQL of a test session that runs as root, under a user of its own, loses its data.
PREFIX = "marlaas-test-"


@pytest.fixture(scope="session")
def services_spec() -> Iterator[ServicesSpec]:
    """What the session's services were asked to be; its state folder is fresh."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        yield ServicesSpec(state=Path(folder))


@pytest.fixture(scope="session")
def services(services_spec: ServicesSpec) -> Iterator[Services]:
    """The running services; they take 15 s to start and are shared, so tests use names of their own."""
    with start_services(services_spec) as running:
        yield running


@pytest.fixture
def state_folder() -> Iterator[Path]:
    """A fresh state folder for services of the test's own."""
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        yield Path(folder).resolve()
