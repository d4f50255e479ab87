"""What the trained fleet of five tenants left behind, one thing a test."""

import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pyarrow.ipc
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import transformers
from fleets import JOB, SMALL, TRAINED
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)

from flows.train_fleet import STARTS, train_fleet
from marlaas.checkpoints import decode_state
from marlaas.errors import MarlaasError
from marlaas.models import load_base_model
from storage import JobLayout, committed_steps, decode_rollouts, list_adapters, read_commits

# What is in the store


def test_every_step_is_committed_once_and_makes_the_next_version(trained):
    for spec in trained.fleet.tenants[:3]:
        commits = trained.commits(spec.name)
        assert [c.step for c in commits] == list(range(spec.steps))
        assert [c.adapter_version for c in commits] == list(range(1, spec.steps + 1))
        assert trained.rows[spec.name]["version"] == trained.rows[spec.name]["steps"] == spec.steps


def test_no_rollout_is_older_than_the_tenant_allows(trained):
    for spec in trained.fleet.tenants[:3]:
        for commit in trained.commits(spec.name):
            [sampled_by] = commit.rollout_versions
            [key] = commit.rollouts
            assert 0 <= commit.adapter_version - 1 - sampled_by <= spec.max_staleness
            assert commit.metrics["staleness"] == commit.adapter_version - 1 - sampled_by
            assert {r.adapter_version for r in decode_rollouts(trained.store.get(key))} == {sampled_by}


def test_old_checkpoints_go_and_the_kept_ones_are_the_newest(trained):
    for spec in trained.fleet.tenants[:3]:
        kept = sorted(trained.path(spec.name).glob("checkpoints/*"))
        newest = trained.commits(spec.name)[-spec.keep_checkpoints :]
        assert [str(path.relative_to(trained.folder / "store")) for path in kept] == [c.checkpoint for c in newest]


def test_versions_are_published_when_due_and_at_the_end(trained):
    versions = {name: list_adapters(trained.store, JobLayout(name, JOB)) for name in TRAINED}
    assert versions == {"narrow": [2, 4], "wide": [2, 4, 5], "judged": [3]}


def test_every_artifact_opens_with_plain_tools_and_nothing_else_is_there(trained):
    opened = Counter()
    for tenant in TRAINED:
        for path in trained.path(tenant).rglob("*"):
            if path.is_dir():
                continue
            opened[path.suffix] += 1
            match path.suffix:
                case ".parquet":
                    assert pyarrow.parquet.read_table(path).num_rows > 0
                case ".arrow":
                    with pyarrow.ipc.open_file(io.BytesIO(path.read_bytes())) as file:
                        assert file.read_all().num_rows > 0
                case ".safetensors":
                    assert safetensors.torch.load_file(path)
                case ".json":
                    assert json.loads(path.read_text())
                case ".html":
                    assert path.read_text().startswith("<!doctype html>")
                case _:
                    pytest.fail(f"{path} is of no known kind")
    assert opened[".parquet"] == 4 + 5 + 3 + 3 * 3  # a shard a step, and three decodings a tenant
    assert opened[".arrow"] == 2 + 3 + 1
    assert opened[".html"] == 3


def test_rollout_rows_hold_what_was_sampled(trained):
    for commit in trained.commits("wide"):
        table = pyarrow.parquet.read_table(trained.folder / "store" / commit.rollouts[0]).to_pylist()
        assert len(table) == 4
        assert len({row["group_id"] for row in table}) == 2
        for row in table:
            assert 1 <= sum(row["loss_mask"]) <= 6
            assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        sampled = sum(sum(row["loss_mask"]) for row in table)
        assert commit.metrics["sampled_tokens"] == sampled
        assert commit.metrics["reward_mean"] == pytest.approx(sum(row["reward"] for row in table) / 4)


def test_published_adapters_load_in_peft_and_are_the_checkpoints_weights(trained, model_cache):
    base = load_base_model(trained.fleet.model)
    for spec in trained.fleet.tenants[:3]:
        folder = trained.path(spec.name) / f"adapters/v{spec.steps}"
        model = transformers.AutoModelForCausalLM.from_pretrained(next(model_cache.glob("tiny-random*")))
        before = model(torch.arange(5)[None]).logits
        adapted = peft.PeftModel.from_pretrained(model, folder)
        assert adapted.peft_config["default"].r == spec.lora.rank
        assert adapted.peft_config["default"].target_modules == set(spec.lora.targets)
        # The random model adds nothing up, so only those that the other judge rewards have learned something.
        moved = not torch.equal(adapted(torch.arange(5)[None]).logits, before)
        assert moved == (spec.name != "wide")
        last = trained.commits(spec.name)[-1]
        state, _ = decode_state(trained.store.get(last.checkpoint), base.fingerprint)
        named = {
            re.sub(r".*layers\.(\d+)\..*\.(\w+_proj)\.lora_([AB]).*", r"layers.\1.\2.\3", name): weight
            for name, weight in peft.get_peft_model_state_dict(adapted).items()
        }
        assert named.keys() == state.weights.keys()
        assert all(torch.equal(named[name], weight) for name, weight in state.weights.items())


def test_the_evaluation_report_says_what_the_rows_say(trained):
    for name in TRAINED:
        version = trained.rows[name]["version"]
        folder = trained.path(name) / f"evaluations/v{version}"
        report = json.loads((folder / "report.json").read_text())
        for result in report["results"]:
            rows = pyarrow.parquet.read_table(folder / f"{result['decoding']}.parquet").to_pylist()
            assert len(rows) == report["examples"] == 10
            share = sum(row["correct"] for row in rows) / 10
            assert result["accuracy"]["share"] == pytest.approx(share)
            assert trained.rows[name][result["decoding"]] == pytest.approx(share)


def test_held_out_questions_are_never_trained_on(trained):
    layout = JobLayout("wide", JOB)
    held_out = pyarrow.parquet.read_table(trained.folder / "store" / layout.evaluation(5, "base.parquet"))
    asked = {row["example_id"] for row in held_out.to_pylist()}
    used = {r.prompt_id for c in trained.commits("wide") for r in decode_rollouts(trained.store.get(c.rollouts[0]))}
    assert asked
    assert not asked & used


# A tenant that fails


@pytest.mark.parametrize(("tenant", "reason"), [("raises", "the judge is ill"), ("nan", "nan")])
def test_a_tenant_whose_environment_fails_is_reported_and_leaves_nothing_that_looks_trained(trained, tenant, reason):
    row = trained.rows[tenant]
    assert row["error"].startswith("no rollout of step 0 was finished; most often: ")
    assert reason in row["error"]
    assert committed_steps(trained.store, JobLayout(tenant, JOB)) == []
    assert list_adapters(trained.store, JobLayout(tenant, JOB)) == []


def test_a_failing_tenant_does_not_touch_the_others(trained):
    assert [name for name, row in trained.rows.items() if "error" not in row] == list(TRAINED)


# MLflow


def test_mlflow_has_one_run_a_job_with_every_metric_of_every_step(trained, tracker):
    for name in TRAINED:
        experiment = tracker.client.get_experiment_by_name(f"marlaas/{name}")
        [run] = tracker.client.search_runs([experiment.experiment_id], f"attributes.run_name = '{JOB}'")
        assert run.info.status == "FINISHED"
        for commit in trained.commits(name):
            for metric, value in commit.metrics.items():
                history = tracker.client.get_metric_history(run.info.run_id, metric)
                [logged] = [m.value for m in history if m.step == commit.step]
                assert logged == pytest.approx(value) or (math.isnan(logged) and not math.isfinite(value))


def test_mlflow_has_the_versions_and_their_aliases(trained, tracker):
    for name in TRAINED:
        known = tracker.versions(name, JOB)
        assert [v.adapter_version for v in known] == list_adapters(trained.store, JobLayout(name, JOB))
        newest = known[-1]
        assert set(newest.aliases) == {"champion", "latest"}
        assert newest.url == trained.store.url(JobLayout(name, JOB).adapter(newest.adapter_version))
        assert newest.scores["accuracy_cold"] == trained.rows[name]["cold"]


def test_the_champion_in_mlflow_is_the_folder_in_the_store(trained, tracker, tmp_path):
    version = tracker.client.get_model_version_by_alias(f"wide.{JOB}", "champion")
    source = version.source.split("/artifacts/", 1)[1]
    fetched = Path(tracker.client.download_artifacts(version.run_id, source, str(tmp_path)))
    for path in (trained.path("wide") / "adapters/v5").iterdir():
        assert (fetched / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("tenant", ["raises", "nan"])
def test_the_mlflow_run_of_a_failed_job_says_so(trained, tracker, tenant):
    run = tracker.find(tenant, JOB)
    assert tracker.client.get_run(run.run_id).info.status == "FAILED"


# Prefect


@pytest.fixture(scope="module")
def flow_runs(trained, prefect_client) -> dict[str, Any]:
    """The newest flow run of each name, as the server has it."""
    [fleet] = prefect_client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": [JOB]}))
    parents = FlowRunFilterParentFlowRunId(any_=[fleet.id])
    children = prefect_client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parents))
    return {run.name: run for run in [fleet, *children]}


def test_prefect_has_one_flow_run_a_tenant_and_stage_and_knows_how_each_ended(flow_runs):
    completed = [JOB, *(f"train-{name}" for name in TRAINED), *(f"evaluate-{name}" for name in TRAINED)]
    assert {name: run.state_name for name, run in flow_runs.items()} == {
        **dict.fromkeys(completed, "Completed"),
        "train-raises": "Failed",
        "train-nan": "Failed",
    }


def test_a_step_costs_at_most_three_task_runs(trained, flow_runs, prefect_client):
    for spec in trained.fleet.tenants[:3]:
        of_flow = TaskRunFilterFlowRunId(any_=[flow_runs[f"train-{spec.name}"].id])
        runs = prefect_client.read_task_runs(task_run_filter=TaskRunFilter(flow_run_id=of_flow), limit=200)
        assert {run.state_name for run in runs} == {"Completed"}
        kinds = Counter(run.name.split("-")[0] for run in runs)
        published = len(list_adapters(trained.store, JobLayout(spec.name, JOB)))
        assert kinds == {"rollout": spec.steps, "update": spec.steps, "publish": published}
        assert len(runs) <= 3 * spec.steps


def test_every_tenant_has_its_artifacts_in_prefect(trained, prefect_client):
    for name in TRAINED:
        version = trained.rows[name]["version"]
        for key in (
            f"{name}-{JOB}-training",
            f"{name}-{JOB}-v{version}-evaluation",
            f"{name}-{JOB}-v{version}-accuracy",
        ):
            found = prefect_client.request(
                "POST", "/artifacts/filter", json={"artifacts": {"key": {"any_": [key]}}}
            ).json()
            # A later evaluation flow that finds the report done shows it once more.
            assert found, key
            assert all(artifact["data"] for artifact in found), key


# Running it again


def test_running_it_again_finds_everything_done_and_changes_nothing(trained, run_flow, tracker):
    done = trained.fleet.model_copy(update={"tenants": trained.fleet.tenants[:3]})
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (trained.folder / "store").rglob("*") if p.is_file()}
    rows = {row["tenant"]: row for row in run_flow(train_fleet(done))}
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (trained.folder / "store").rglob("*") if p.is_file()}
    assert after == before
    assert rows == {name: trained.rows[name] for name in TRAINED}
    for name in TRAINED:
        assert tracker.client.get_run(tracker.find(name, JOB).run_id).info.status == "FINISHED"


def test_another_spec_under_the_same_job_is_refused_and_says_what_changed(trained, run_flow):
    narrow = trained.fleet.tenant("narrow")
    changed = narrow.model_copy(update={"steps": 9, "seed": 3})
    fleet = trained.fleet.model_copy(update={"tenants": (changed,)})
    with pytest.raises(MarlaasError, match=r"steps was 4 and is 9; seed was 0 and is 3\. Choose another job name"):
        run_flow(train_fleet(fleet))


def test_what_does_not_change_the_result_may_change(trained, run_flow):
    narrow = trained.fleet.tenant("narrow").model_copy(update={"keep_checkpoints": 7, "stage_timeout_seconds": 60.0})
    [row] = run_flow(train_fleet(trained.fleet.model_copy(update={"tenants": (narrow,)})))
    assert row == trained.rows["narrow"]


def test_a_fleet_without_evaluation_trains_on_all_examples_and_writes_no_report(run_flow, fleet_of, tmp_path):
    tenants = [{"name": "plain", "steps": 1, "evaluation": {"enabled": False}}]
    fleet = fleet_of("unevaluated", tmp_path / "store", tenants, **SMALL)
    [row] = run_flow(train_fleet(fleet))
    assert row["version"] == 1
    assert "greedy" not in row
    assert not list((tmp_path / "store").rglob("evaluations"))


def test_a_tenant_of_high_priority_is_admitted_next_however_many_wait_before_it(fleet_of, run_flow, tmp_path):
    """More tenants wait than open their jobs at once, and the urgent one is the last of the file."""
    names = [f"t{i}" for i in range(STARTS + 2)]
    tenants = [{"name": name, "steps": 10, "seed": i} for i, name in enumerate(names)]
    tenants[-1]["quota"] = {"priority": 5}
    fleet = fleet_of("urgent", tmp_path, tenants, **SMALL | {"evaluation": {"enabled": False}})
    fleet = fleet.model_copy(update={"pool": fleet.pool.model_copy(update={"max_jobs": 1})})
    rows = run_flow(train_fleet(fleet))
    assert all("error" not in row for row in rows), rows
    store = fleet.store.open()
    ended = {name: read_commits(store, JobLayout(name, "urgent"))[-1].created_at for name in names}
    assert names[-1] in sorted(names, key=ended.__getitem__)[:2], "only the first to come may be before it"
