import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow.artifacts
import pytest
import requests

from marlaas.services import Services
from marlaas.tracking import JobRun, Tracker

PEFT_FILES = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": bytes(range(256)) * 100}


@pytest.fixture(scope="module")
def tracker(services: Services) -> Iterator[Tracker]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in services.environment().items():
            patch.setenv(name, value)
        with Tracker(services.mlflow_tracking_uri) as tracker:
            yield tracker


@pytest.fixture
def run(tracker: Tracker, request: pytest.FixtureRequest) -> JobRun:
    """The run of a job named after the test."""
    job = request.node.name.replace("_", "-")[:60]
    return tracker.job("acme", job, {"lora": {"rank": 8}}, {"base_model": "tiny"})


def history(run: JobRun, key: str) -> list[tuple[int, float]]:
    assert run.tracker.flush(20)
    entries = run.tracker.client.get_metric_history(run.run_id, key)
    return [(entry.step, entry.value) for entry in sorted(entries, key=lambda entry: entry.step)]


def test_job_is_one_run_in_the_tenants_experiment(run: JobRun) -> None:
    client = run.tracker.client
    data = client.get_run(run.run_id).data
    assert data.params == {"lora.rank": "8"}
    assert data.tags["marlaas.tenant"] == "acme"
    assert data.tags["base_model"] == "tiny"
    assert client.get_experiment(run.experiment_id).name == "marlaas/acme"
    model = client.get_registered_model(run.model_name)
    assert (model.tags["marlaas.job"], model.tags["base_model"]) == (run.job, "tiny")
    assert requests.get(run.url, timeout=10).status_code == 200


def test_resumed_job_continues_its_run_and_notes_changed_parameters(run: JobRun, services: Services) -> None:
    run.log_step(0, {"reward": 0.25})
    run.finish("FAILED")
    with Tracker(services.mlflow_tracking_uri) as other:
        resumed = other.job("acme", run.job, {"lora": {"rank": 16}, "steps": 5}, {})
        assert resumed.run_id == run.run_id
        resumed.log_step(1, {"reward": 0.5})
    info = run.tracker.client.get_run(run.run_id)
    assert info.info.status == "RUNNING"
    assert info.data.params == {"lora.rank": "8", "steps": "5"}
    assert info.data.tags["resumed.lora.rank"] == "16"
    assert history(run, "reward") == [(0, 0.25), (1, 0.5)]


def test_deleted_run_is_replaced(run: JobRun) -> None:
    run.tracker.client.delete_run(run.run_id)
    again = run.tracker.job("acme", run.job, {}, {})
    assert again.run_id != run.run_id
    assert run.tracker.job("acme", run.job, {}, {}).run_id == again.run_id


def test_racing_starts_of_one_job_get_one_run(tracker: Tracker) -> None:
    run_ids = []
    threads = [
        threading.Thread(target=lambda: run_ids.append(tracker.job("race", "same", {}, {}).run_id)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(run_ids) == 8
    assert len(set(run_ids)) == 1
    experiment = tracker.client.get_experiment_by_name("marlaas/race")
    assert len(tracker.client.search_runs([experiment.experiment_id])) == 1


def test_32_jobs_log_at_once_and_nothing_is_lost(tracker: Tracker) -> None:
    runs: dict[int, JobRun] = {}

    def train(number: int) -> None:
        runs[number] = tracker.job(f"tenant-{number % 4}", f"job-{number}", {"seed": number}, {})
        for step in range(10):
            runs[number].log_step(step, {"reward": number + step / 10, "loss": 1.0})

    threads = [threading.Thread(target=train, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, run in runs.items():
        assert history(run, "reward") == [(step, number + step / 10) for step in range(10)]
    assert len(runs) == 32
    assert tracker.lost_steps == 0


def test_values_that_are_not_finite_and_odd_names_do_not_cost_the_step(run: JobRun) -> None:
    run.log_step(3, {"loss": math.nan, "kl": -math.inf, "reward/user@1": 1.0, "entropy": 2.0})
    assert history(run, "entropy") == [(3, 2.0)]
    assert history(run, "reward/user_1") == [(3, 1.0)]
    assert math.isnan(history(run, "loss")[0][1])
    assert math.isnan(history(run, "kl")[0][1])
    tags = run.tracker.client.get_run(run.run_id).data.tags
    assert tags["nonfinite.kl"] == "-inf at step 3"
    assert tags["nonfinite.loss"] == "nan at step 3"


def test_absent_server_costs_neither_time_nor_training_but_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = Tracker("http://127.0.0.1:9")
    run = JobRun(tracker, "acme", "offline", "0" * 32, "1")
    began = time.monotonic()
    for step in range(3):
        run.log_step(step, {"reward": 1.0})
    assert time.monotonic() - began < 0.1
    with caplog.at_level(logging.WARNING):
        tracker.close(timeout=0.5)
        assert tracker.flush(0) is False
        deadline = time.monotonic() + 10
        while tracker.lost_steps < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert tracker.lost_steps == 3
    assert "acme/offline step 0 are lost" in caplog.text
    assert "Connection refused" in caplog.text


def test_refused_step_is_lost_at_once_and_later_ones_are_written(run: JobRun, caplog: pytest.LogCaptureFixture) -> None:
    with Tracker(run.tracker.tracking_uri) as tracker, caplog.at_level(logging.WARNING):
        JobRun(tracker, "acme", "unknown", "0" * 32, "1").log_step(0, {"reward": 1.0})
        JobRun(tracker, "acme", run.job, run.run_id, run.experiment_id).log_step(0, {"reward": 1.0})
        assert tracker.flush(20)
        assert tracker.lost_steps == 1
    assert "acme/unknown step 0 are lost" in caplog.text
    assert history(run, "reward") == [(0, 1.0)]


def test_registering_an_adapter_twice_gives_one_version(run: JobRun) -> None:
    first = run.register_adapter(1, PEFT_FILES, "s3://bucket/v1", 4, {"reward": 0.5, "kl": 0.01})
    again = run.register_adapter(1, PEFT_FILES, "s3://bucket/v1", 4, {"reward": 0.5, "kl": 0.01})
    assert again == first
    assert (first.adapter_version, first.step, first.reward, first.url) == (1, 4, 0.5, "s3://bucket/v1")
    assert run.tracker.versions("acme", run.job) == [first]


def test_champion_and_latest_resolve_to_peft_folders(run: JobRun, tmp_path: Path) -> None:
    assert run.tracker.champion("acme", run.job) is None
    run.register_adapter(0, PEFT_FILES, "s3://bucket/v0", 0, {})
    run.register_adapter(1, PEFT_FILES | {"adapter_config.json": b"{}"}, "s3://bucket/v1", 4, {"reward": 0.5})
    run.set_champion(1, 0.6)
    run.set_champion(0, 0.7)
    assert run.tracker.champion("acme", run.job) == (0, 0.7)
    v0, v1 = run.tracker.versions("acme", run.job)
    assert (v0.aliases, v1.aliases) == (("champion",), ("latest",))
    assert v0.reward is None
    for alias, config in [("champion", PEFT_FILES["adapter_config.json"]), ("latest", b"{}")]:
        folder = mlflow.artifacts.download_artifacts(
            artifact_uri=f"models:/{run.model_name}@{alias}",
            tracking_uri=run.tracker.tracking_uri,
            dst_path=str(tmp_path / alias),
        )
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        assert files == PEFT_FILES | {"adapter_config.json": config}


def test_evaluation_and_report_belong_to_their_version(run: JobRun, tmp_path: Path) -> None:
    run.register_adapter(2, PEFT_FILES, "s3://bucket/v2", 9, {"reward": 0.5})
    run.log_evaluation(2, {"greedy": 0.5, "cold": 0.625})
    uri = run.log_report(2, {"report.html": b"<html>", "figures/reward.png": b"png"})
    assert run.tracker.versions("acme", run.job)[0].scores == {"greedy": 0.5, "cold": 0.625}
    assert history(run, "evaluation/cold") == [(9, 0.625)]
    folder = Path(
        mlflow.artifacts.download_artifacts(
            run_id=run.run_id,
            artifact_path="evaluations/v2",
            tracking_uri=run.tracker.tracking_uri,
            dst_path=str(tmp_path),
        )
    )
    assert uri.endswith("/evaluations/v2")
    assert (folder / "figures" / "reward.png").read_bytes() == b"png"


def test_unknown_versions_and_jobs_are_told_apart_from_failures(run: JobRun) -> None:
    assert run.tracker.versions("acme", "never-started") == []
    assert run.tracker.champion("acme", "never-started") is None
    with pytest.raises(ValueError, match="version=7: no such adapter version"):
        run.set_champion(7, 1.0)
    with pytest.raises(ValueError, match="status='DONE'"):
        run.finish("DONE")


def test_finished_run_has_its_status(run: JobRun) -> None:
    run.finish()
    info = run.tracker.client.get_run(run.run_id).info
    assert info.status == "FINISHED"
    assert info.end_time is not None
