"""Runs that end too early and runs that meet: what a job's next runner finds, and what two at once may do."""

import asyncio
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from fleets import GAMES, SMALL, game
from prefect.client.schemas.filters import FlowRunFilter

from flows.train_fleet import train_fleet
from flows.train_tenant import train_tenant
from marlaas.checkpoints import decode_state
from marlaas.errors import JobTaken
from marlaas.pool import LocalPool
from marlaas.rollouts import training_batch
from marlaas.specs import FleetSpec
from storage import JobLayout, decode_rollouts, list_adapters, open_store, read_adapter, read_commits

STEPS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    return tmp_path


def write(fleet: FleetSpec, folder: Path) -> Path:
    path = folder / f"{fleet.name}.yaml"
    path.write_text(yaml.safe_dump(fleet.model_dump(mode="json")))
    return path


def wait_for_commit(process: subprocess.Popen[str], folder: Path, tenant: str, job: str, step: int) -> None:
    """Until a step is committed; fails when the process ends before."""
    commit = folder / "store" / JobLayout(tenant, job).commit(step)
    deadline = time.monotonic() + 90
    while not commit.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {commit} within 90 s"
        time.sleep(0.005)


def one_tenant(fleet_of, job: str, folder: Path, **fields) -> FleetSpec:
    tenant = {"name": "solo", "steps": STEPS, "publish_every": 15, "environment": game("Letters", folder), **fields}
    return fleet_of(job, folder / "store", [tenant], **{**SMALL, "evaluation": {"enabled": False}})


def test_a_run_killed_while_it_trains_goes_on_from_its_last_commit(folder, fleet_of, marlaas, run_flow, tracker):
    fleet = one_tenant(fleet_of, "killed", folder)
    layout, store = JobLayout("solo", "killed"), open_store(str(folder / "store"))
    process = marlaas("run", write(fleet, folder))
    wait_for_commit(process, folder, "solo", "killed", 8)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = read_commits(store, layout)
    assert 8 < len(before) < STEPS

    [row] = run_flow(train_fleet(fleet))

    after = read_commits(store, layout)
    assert after[: len(before)] == before
    assert [c.step for c in after] == list(range(STEPS))
    assert [c.adapter_version for c in after] == list(range(1, STEPS + 1))
    assert row["version"] == STEPS
    first = after[len(before)]
    assert first.rollout_versions == [before[-1].adapter_version], "the first rollout is by the restored adapter"
    used = [{r.prompt_id for r in decode_rollouts(store.get(c.rollouts[0]))} for c in after]
    assert len(set().union(*used)) == sum(map(len, used)), "no example is used twice or left out over the cut"
    assert list_adapters(store, layout) == [15, 30, 40]
    run = tracker.client.get_run(tracker.find("solo", "killed").run_id)
    assert run.info.status == "FINISHED"
    logged = {m.step for m in tracker.client.get_metric_history(run.info.run_id, "reward_mean")}
    assert set(range(len(before), STEPS)) <= logged


def test_restoring_a_checkpoint_and_replaying_the_rollouts_gives_the_same_adapter(folder, fleet_of, run_flow):
    fleet = one_tenant(fleet_of, "replayed", folder, steps=4, keep_checkpoints=4)
    run_flow(train_fleet(fleet))
    layout, store = JobLayout("solo", "replayed"), open_store(str(folder / "store"))
    commits = read_commits(store, layout)

    async def replay():
        pool = LocalPool(fleet.model, fleet.pool)
        try:
            state, _ = decode_state(store.get(commits[0].checkpoint), pool.base_fingerprint)
            await pool.open_job("solo/replayed", fleet.tenants[0], state)
            for commit in commits[1:]:
                rows = decode_rollouts(store.get(commit.rollouts[0]))
                await pool.update(training_batch("solo/replayed", rows, commit.metrics["staleness"]))
            return await pool.export("solo/replayed")
        finally:
            await pool.close()

    assert asyncio.run(replay()) == read_adapter(store, layout, 4)


@pytest.mark.parametrize("lost", ["before the store has it", "before MLflow has it"])
def test_a_version_whose_publication_was_cut_off_is_published_on_resume(folder, fleet_of, run_flow, tracker, lost):
    """As a run leaves it that is killed after its last commit."""
    job = f"cut-{len(lost)}"
    fleet = one_tenant(fleet_of, job, folder, steps=2)
    run_flow(train_fleet(fleet))
    layout, store = JobLayout("solo", job), open_store(str(folder / "store"))
    published = read_adapter(store, layout, 2)
    [version] = tracker.versions("solo", job)
    tracker.client.delete_model_version(f"solo.{job}", str(version.mlflow_version))
    if lost == "before the store has it":
        store.delete(layout.adapter(2))

    run_flow(train_fleet(fleet))

    assert read_adapter(store, layout, 2) == published
    assert [v.adapter_version for v in tracker.versions("solo", job)] == [2]
    assert len(read_commits(store, layout)) == 2


@pytest.mark.slow
def test_an_interrupted_run_ends_cleanly_and_says_that_it_was_killed(folder, fleet_of, marlaas, tracker):
    fleet = one_tenant(fleet_of, "interrupted", folder)
    process = marlaas("run", write(fleet, folder))
    wait_for_commit(process, folder, "solo", "interrupted", 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, (output, errors)
    assert "Traceback" not in errors, errors
    assert tracker.client.get_run(tracker.find("solo", "interrupted").run_id).info.status == "KILLED"


def test_two_runners_of_one_job_at_once_commit_every_step_once(folder, fleet_of, run_flow, tracker):
    fleet = one_tenant(fleet_of, "raced", folder)
    # Another pool is another copy of the base and the adapter, as in another process.
    other = fleet.model_copy(update={"pool": fleet.pool.model_copy(update={"max_sequences": 32})})

    async def both():
        return await asyncio.gather(*(train_tenant(f, "solo") for f in (fleet, other)), return_exceptions=True)

    rows = run_flow(both())
    [error] = [row for row in rows if isinstance(row, Exception)]
    assert isinstance(error, JobTaken)
    assert re.search(r"another runner of solo/raced has committed step \d+; this one ends", str(error))
    layout, store = JobLayout("solo", "raced"), open_store(str(folder / "store"))
    commits = read_commits(store, layout)
    assert [c.step for c in commits] == list(range(STEPS))
    assert [c.adapter_version for c in commits] == list(range(1, STEPS + 1))
    assert list_adapters(store, layout) == [15, 30, 40]
    assert store.list(f"{layout.root}/checkpoints") == sorted(c.checkpoint for c in commits[-2:])
    assert tracker.client.get_run(tracker.find("solo", "raced").run_id).info.status == "FINISHED"
    assert [v.adapter_version for v in tracker.versions("solo", "raced")] == [15, 30, 40]


def test_a_job_open_in_this_process_is_not_opened_again_and_goes_on(folder, fleet_of, run_flow):
    fleet = one_tenant(fleet_of, "twice", folder, steps=5)

    async def both():
        return await asyncio.gather(*(train_tenant(fleet, "solo") for _ in range(2)), return_exceptions=True)

    rows = run_flow(both())
    [error] = [row for row in rows if isinstance(row, Exception)]
    assert "solo/twice is open already; a job is trained by one flow at a time" in str(error)
    [row] = [row for row in rows if isinstance(row, dict)]
    assert row["steps"] == row["version"] == 5


@pytest.mark.slow
def test_no_secret_of_the_services_or_the_store_reaches_prefect(folder, fleet_of, marlaas, prefect_client):
    fleet = one_tenant(fleet_of, "secret", folder, steps=1)
    services = fleet.services.model_copy(update={"database": "postgresql://me:hunter2@nowhere/db"})
    path = write(fleet.model_copy(update={"services": services}), folder)
    process = marlaas("run", path)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (output, errors)
    runs = prefect_client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": ["secret", "train-solo"]}))
    assert any(run.name == "secret" for run in runs)
    assert all("hunter2" not in run.model_dump_json() for run in runs)
    assert "hunter2" not in output + errors
    assert not (folder / ".marlaas" / "postgres").exists()
