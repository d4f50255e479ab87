"""The deployments of prefect.yaml, on a worker: training publishes, and the event starts the evaluation."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleets import GAMES, SMALL, game
from prefect.client.schemas.filters import DeploymentFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun

from flows.evaluate_adapter import evaluate_adapter, evaluate_pending
from flows.train_fleet import train_fleet
from flows.train_tenant import train_tenant
from marlaas.errors import MarlaasError
from storage import JobLayout, open_store

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = {
    "train-fleet/train-fleet",
    "train-tenant/train-tenant",
    "evaluate-adapter/evaluate-adapter",
    "evaluate-pending/evaluate-pending",
}


def prefect(variables, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory, variables) -> Path:
    """The project as a user has it checked out, deployed."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "prefect.yaml", folder)
    shutil.copytree(ROOT / "flows", folder / "flows", ignore=shutil.ignore_patterns("__pycache__"))
    prefect(variables, "work-pool", "create", "marlaas", "--type", "process", cwd=folder)
    prefect(variables, "deploy", "--all", cwd=folder)
    return folder


@pytest.fixture
def worker(project, variables, tmp_path) -> Iterator[Path]:
    """A worker of the work pool; its log."""
    log = tmp_path / "worker.log"
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "marlaas"]
    with log.open("wb") as output:
        environment = {**variables, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        process = subprocess.Popen(command, cwd=project, env=environment, stdout=output, stderr=subprocess.STDOUT)
    yield log
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ended(client, name: str, log: Path, seconds: float = 120) -> FlowRun:
    """The flow run of that name, once there is one and it has ended; a flow gives itself its name when it starts."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        runs = client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": [name]}))
        if runs and runs[0].state.is_final():
            return runs[0]
        time.sleep(0.5)
    pytest.fail(f"no flow run {name!r} has ended within {seconds} s; the worker said:\n{log.read_text()}")


@pytest.mark.slow
def test_prefect_yaml_deploys_every_flow_with_its_trigger_and_schedule(project, prefect_client):
    found = {}
    for deployment in prefect_client.read_deployments(deployment_filter=DeploymentFilter(tags={"all_": ["marlaas"]})):
        flow = prefect_client.read_flow(deployment.flow_id)
        found[f"{flow.name}/{deployment.name}"] = deployment
    assert found.keys() == DEPLOYMENTS
    [schedule] = found["evaluate-pending/evaluate-pending"].schedules
    assert (schedule.active, schedule.schedule.cron) == (True, "0 3 * * *")
    automations = prefect_client.request("POST", "/automations/filter", json={}).json()
    assert [a["name"] for a in automations] == ["marlaas-adapter-published"]


@pytest.mark.slow
def test_a_published_adapter_is_evaluated_by_the_deployment_that_listens(
    project, worker, fleet_of, prefect_client, tmp_path, tracker
):
    (tmp_path / "games.py").write_text(GAMES)
    store = {"url": str(tmp_path / "store")}
    tenants = [{"name": "deployed", "steps": 2, "environment": game("Letters", tmp_path)}]
    fleet = fleet_of("by-event", store, tenants, publish_every=5, **SMALL)
    [deployment] = prefect_client.read_deployments(deployment_filter=DeploymentFilter(name={"any_": ["train-tenant"]}))
    parameters = {"fleet": fleet.model_dump(mode="json"), "tenant": "deployed"}
    prefect_client.create_flow_run_from_deployment(deployment.id, parameters=parameters)

    trained = ended(prefect_client, "train-deployed", worker)
    assert trained.state_name == "Completed", worker.read_text()
    evaluated = ended(prefect_client, "evaluate-deployed", worker)
    assert evaluated.state_name == "Completed", worker.read_text()

    assert evaluated.parameters["version"] == 2
    assert isinstance(evaluated.parameters["version"], int)
    assert (evaluated.parameters["tenant"], evaluated.parameters["job"]) == ("deployed", "by-event")
    assert evaluated.parameters["store"] == fleet.store.model_dump(mode="json")
    layout = JobLayout("deployed", "by-event")
    report = json.loads(open_store(store["url"]).get(layout.evaluation(2, "report.json")))
    [version] = tracker.versions("deployed", "by-event")
    assert set(version.aliases) == {"champion", "latest"}
    scores = {result["decoding"]: result["accuracy"]["share"] for result in report["results"]}
    assert version.scores["accuracy_cold"] == scores["cold"]


def test_pending_evaluation_finds_what_has_no_report_and_one_failure_stops_no_other(
    fleet_of, run_flow, tmp_path, prefect_client
):
    (tmp_path / "games.py").write_text(GAMES)
    tenants = [
        {"name": "damaged", "steps": 1},
        {"name": "pending", "steps": 2, "environment": game("Letters", tmp_path)},
        {"name": "unwanted", "steps": 1, "evaluation": {"enabled": False}},
    ]
    fleet = fleet_of("nightly", tmp_path / "store", tenants, publish_every=1, **SMALL)

    async def train_all():
        for tenant in fleet.tenants:
            await train_tenant(fleet, tenant.name)

    run_flow(train_all())
    store = fleet.store.open()
    weights = JobLayout("damaged", "nightly").adapter(1) + "/adapter_model.safetensors"
    intact = store.get(weights)
    store.put(weights, b"damaged")
    with pytest.raises(MarlaasError, match=r"^damaged/nightly: "):
        run_flow(evaluate_pending(fleet.store))
    reports = {p.parts[-5:-1] for p in (tmp_path / "store").rglob("report.json")}
    assert reports == {("pending", "nightly", "evaluations", "v2")}

    store.put(weights, intact)
    assert [row["tenant"] for row in run_flow(evaluate_pending(fleet.store))] == ["damaged"]
    assert run_flow(evaluate_pending(fleet.store)) == []


def test_an_evaluation_is_done_once_unless_it_is_forced(trained, run_flow):
    report = trained.path("wide") / "evaluations/v5/report.json"
    before = (report.stat().st_mtime_ns, report.read_bytes())
    again = run_flow(evaluate_adapter(trained.fleet.store, "wide", "whole"))
    assert again["greedy"] == trained.rows["wide"]["greedy"]
    assert (report.stat().st_mtime_ns, report.read_bytes()) == before


def test_a_forced_evaluation_gives_the_same_scores(fleet_of, run_flow, tmp_path):
    (tmp_path / "games.py").write_text(GAMES)
    tenants = [{"name": "forced", "steps": 1, "environment": game("Letters", tmp_path)}]
    fleet = fleet_of("again", tmp_path / "store", tenants, **SMALL)
    [row] = run_flow(train_fleet(fleet))
    again = run_flow(evaluate_adapter(fleet.store, "forced", "again", 1, force=True))
    assert {name: row[name] for name in again} == again


def test_evaluating_what_is_not_published_says_so(trained, run_flow):
    with pytest.raises(MarlaasError, match="raises/whole has no published adapter to evaluate"):
        run_flow(evaluate_adapter(trained.fleet.store, "raises", "whole"))
