"""Real services for tests: PostgreSQL, Prefect and MLflow, started once a test session."""

from collections.abc import Iterator

import pytest

from marlaas.services import Services, start_services
from marlaas.specs import ServicesSpec


@pytest.fixture(scope="session")
def services_spec(tmp_path_factory: pytest.TempPathFactory) -> ServicesSpec:
    """What the session's services were asked to be; its state folder is fresh."""
    return ServicesSpec(state=tmp_path_factory.mktemp("services"))


@pytest.fixture(scope="session")
def services(services_spec: ServicesSpec) -> Iterator[Services]:
    """The running services; they take 15 s to start and are shared, so tests use names of their own."""
    with start_services(services_spec) as running:
        yield running
