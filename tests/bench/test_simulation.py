"""The model of the pool: what can be computed by hand, what must hold of any schedule, and its command."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import chain

import pytest
from pydantic import ValidationError

from bench import simulate as command
from bench.simulation import Mode, PoolModel, ServiceCurves, WorkloadSpec, read_curves, simulate
from bench.simulation.device import Device
from bench.simulation.rows import FairRows
from bench.workloads import TOOL, Draw

CURVES = ServiceCurves(
    name="made up",
    measured=False,
    decode=((1, 0.1), (3, 0.2), (11, 1.0)),
    adapters=((0, 0.0), (1, 0.01), (3, 0.05)),
    prefill_seconds_per_token=0.001,
    prefill_fixed_seconds=0.03,
    train_seconds_per_token=0.002,
    train_fixed_seconds=0.5,
    update_fixed_seconds=0.25,
    host_seconds_per_step=0.2,
)


def fixed(value: float) -> Draw:
    return Draw(value, 0.0, value, value)


def workload(**changes) -> WorkloadSpec:
    fields = {"steps": 1, "prompts": 1, "group": 1, "tokens": fixed(7), "prompt_tokens": 20, "answer_tokens": 5}
    return WorkloadSpec(**fields | changes)


def random_workload(**changes) -> WorkloadSpec:
    fields = {"steps": 3, "prompts": 2, "group": 4, "turns": 3}
    return workload(**fields | {"tokens": Draw(12, 0.8, 2, 60), "latency": Draw(1.0, 0.6, 0.5, 3.0)} | changes)


def one_conversation(turns: int, wait: float, steps: int = 1) -> float:
    """Seconds of `steps` steps of one conversation of 7 tokens a turn, on policy."""
    decode = 6 * (0.1 + 0.01)  # the first token comes from the pass that computes the prompt
    prompts = (0.03 + 20 * 0.001) + (turns - 1) * (0.03 + 5 * 0.001)
    tokens = 20 + 7 * turns + 5 * (turns - 1)
    return steps * (prompts + turns * decode + (turns - 1) * wait + 0.2 + 0.5 + tokens * 0.002 + 0.25)


# Curves


def test_between_points_are_lines_and_the_last_goes_on():
    assert CURVES.decode_seconds(2, 0) == pytest.approx(0.15)
    assert CURVES.decode_seconds(21, 0) == pytest.approx(2.0)
    assert CURVES.decode_seconds(3, 2) == pytest.approx(0.2 + 0.03)
    assert CURVES.decode_seconds(0, 0) == 0
    assert CURVES.prefill_seconds(0) == 0


def test_a_faster_device_is_faster_in_everything_and_the_host_is_not():
    fast = CURVES.scaled(10)
    assert fast.decode_seconds(2, 2) == pytest.approx(CURVES.decode_seconds(2, 2) / 10)
    assert fast.prefill_seconds(9) == pytest.approx(CURVES.prefill_seconds(9) / 10)
    assert fast.train_seconds(9, 2) == pytest.approx(CURVES.train_seconds(9, 2) / 10)
    assert fast.host_seconds_per_step == CURVES.host_seconds_per_step
    assert not fast.measured
    assert "10 times" in fast.name


def test_curves_whose_points_do_not_ascend_are_refused():
    with pytest.raises(ValidationError, match="must ascend"):
        ServiceCurves(**CURVES.model_dump() | {"decode": [[4, 0.1], [1, 0.2]]})


def test_the_curves_that_come_along_are_marked_as_placeholders_or_measured():
    curves = read_curves(command.CURVES)
    assert curves.measured or "laceholder" in curves.note


@pytest.mark.parametrize("field", [{"tokens": fixed(0)}, {"latency": Draw(1.0, 0.1, 3.0, 0.5)}, {"turns": 0}])
def test_a_workload_that_makes_no_sense_is_refused(field):
    with pytest.raises(ValidationError, match=next(iter(field))):
        workload(**field)


# By hand


@pytest.mark.parametrize(("turns", "wait"), [(1, 0.0), (3, 2.0)])
def test_one_conversation_takes_the_sum_of_its_parts(turns, wait):
    result = simulate(CURVES, workload(turns=turns, latency=fixed(wait)), 1)
    assert result.wall_seconds == pytest.approx(one_conversation(turns, wait))
    assert result.sampled_tokens == 7 * turns
    assert result.busy["shared"] == pytest.approx(1 - (0.2 + (turns - 1) * wait) / result.wall_seconds)
    assert result.tenant_seconds == (result.wall_seconds,)


def test_on_policy_steps_follow_one_another():
    result = simulate(CURVES, workload(steps=4, max_staleness=0), 1)
    assert result.wall_seconds == pytest.approx(one_conversation(1, 0.0, steps=4))


def test_rollouts_overlap_the_update_when_they_may_be_one_version_old():
    pool = PoolModel(devices=1, trainers=1)
    on_policy, ahead = (simulate(CURVES, workload(steps=8, max_staleness=s), 1, pool).wall_seconds for s in (0, 1))
    update = 0.2 + 0.5 + 27 * 0.002 + 0.25
    assert ahead == pytest.approx(one_conversation(1, 0.0) + 7 * update, rel=0.1)
    assert on_policy == pytest.approx(8 * one_conversation(1, 0.0))


def test_tool_waits_of_a_step_overlap():
    wide = workload(prompts=2, turns=3, latency=fixed(50.0))
    assert simulate(CURVES, wide, 1).wall_seconds < one_conversation(3, 50.0) + 5
    assert simulate(CURVES, wide, 4).wall_seconds < one_conversation(3, 50.0) + 30


def test_a_groups_prompt_is_computed_once_and_trained_once():
    result = simulate(CURVES, workload(group=3), 1)
    rollout = 0.03 + 20 * 0.001 + 6 * (0.2 + 0.01)
    assert result.prefilled_tokens == 20
    assert result.wall_seconds == pytest.approx(rollout + 0.2 + 0.5 + (3 * 7 + 20) * 0.002 + 0.25)


def test_one_after_another_takes_as_long_as_each_alone():
    alone = simulate(CURVES, workload(turns=2, latency=fixed(1.0), steps=2), 1)
    in_a_row = simulate(CURVES, workload(turns=2, latency=fixed(1.0), steps=2), 5, mode=Mode.SEQUENTIAL)
    assert in_a_row.wall_seconds == pytest.approx(5 * alone.wall_seconds)
    assert in_a_row.busy_share == pytest.approx(alone.busy_share)
    assert in_a_row.tenant_seconds == pytest.approx([alone.wall_seconds * (i + 1) for i in range(5)])


def test_in_slices_a_stage_has_the_device_for_itself():
    job = workload(turns=2, latency=fixed(3.0))
    alone = one_conversation(2, 3.0)
    result = simulate(CURVES, job, 4, mode=Mode.SLICES)
    assert 4 * (alone - 0.2) <= result.wall_seconds <= 4 * alone + 1e-6
    assert result.longest_waits["rollout"] >= 3 * (3.0 + 2 * 6 * 0.11)
    assert result.adapters_per_step == 1


def test_updates_of_several_tenants_share_a_pass():
    together = simulate(CURVES, workload(), 3)
    rollout = 0.03 + 3 * 20 * 0.001 + 6 * CURVES.decode_seconds(3, 3)
    host = 3 * 0.2
    # The first update has the device while the host has the others; those two are ready when it ends.
    passes = [0.5 + 27 * 0.002 + 0.25, 0.5 + 2 * 27 * 0.002 + 2 * 0.25]
    assert together.wall_seconds == pytest.approx(rollout + host / 3 + sum(passes))


# Of any schedule


@pytest.mark.parametrize("mode", Mode)
def test_no_schedule_samples_more_or_less_than_was_drawn(mode):
    job = random_workload()
    result = simulate(CURVES, job, 5, PoolModel(max_sequences=7), mode)
    assert result.sampled_tokens == sum(job.lengths(tenant).sum() for tenant in range(5))
    assert max(result.busy.values()) <= 1 + 1e-9
    assert max(result.utilisation.values()) <= 1 + 1e-9


@pytest.mark.parametrize("changes", [{}, {"decode_between": 3}, {"rows": "grouped"}, {"coalesce_seconds": 5.0}])
def test_work_is_conserved(changes):
    """A saturated device rests only when nobody needs it, and cannot be faster than its full batch."""
    job, pool = random_workload(latency=fixed(0.0), steps=2), PoolModel(max_sequences=8, **changes)
    curves = CURVES.model_copy(update={"host_seconds_per_step": 0.0})
    result = simulate(curves, job, 6, pool)
    assert result.busy["shared"] == pytest.approx(1.0)
    assert result.device_seconds == pytest.approx(result.wall_seconds)
    assert result.wall_seconds > result.sampled_tokens * min(curves.decode_seconds(n, 0) / n for n in range(1, 9))


@pytest.mark.parametrize("changes", [{}, {"trainers": 1}, {"decode_between": 3}, {"max_sequences": 9}])
def test_a_run_of_steps_is_what_its_single_steps_are(changes, monkeypatch):
    job, pool = random_workload(), PoolModel(devices=2, **changes)
    runs = simulate(CURVES, job, 5, pool)
    monkeypatch.setattr(Device, "_steps", lambda self, batch, seconds, now: 1)
    single = simulate(CURVES, job, 5, pool)
    assert runs.tenant_seconds == pytest.approx(single.tenant_seconds)
    assert runs.device_seconds == pytest.approx(single.device_seconds)


def test_equal_tenants_finish_together():
    ends = simulate(
        CURVES, workload(prompts=2, group=4, steps=3), 8, PoolModel(max_sequences=8, hosts=8)
    ).tenant_seconds
    assert max(ends) < 1.1 * min(ends)


def test_a_tenant_of_more_weight_finishes_sooner():
    job = workload(prompts=2, group=4, tokens=fixed(40), weights=(1.0, 4.0))
    light, heavy = simulate(CURVES, job, 2, PoolModel(max_sequences=4)).tenant_seconds
    assert heavy < 0.8 * light


@pytest.mark.parametrize("trainers", [False, True])
def test_more_devices_are_never_slower(trainers):
    job = random_workload(latency=fixed(1.0), tokens=fixed(12), prompts=4)
    walls = [
        simulate(CURVES, job, 8, PoolModel(devices=n, trainers=n * trainers, max_sequences=8, hosts=8)).wall_seconds
        for n in (1, 2, 4, 8)
    ]
    assert walls == sorted(walls, reverse=True)


def test_together_beats_slices_and_slices_idle_through_tools():
    job, curves = random_workload(), read_curves(command.CURVES)
    together, slices = (simulate(curves, job, 6, mode=mode) for mode in (Mode.TOGETHER, Mode.SLICES))
    assert together.wall_seconds < slices.wall_seconds
    assert together.busy_share > slices.busy_share


def test_a_seed_decides_everything():
    job = random_workload()
    pool = PoolModel(devices=2, trainers=1, max_sequences=6)
    first, again = (simulate(CURVES, job, 9, pool) for _ in range(2))
    assert first == again
    assert simulate(CURVES, job.model_copy(update={"seed": 1}), 9, pool).wall_seconds != first.wall_seconds


@pytest.mark.parametrize(
    ("changes", "job", "tenants", "bottleneck"),
    [
        ({"host_seconds_per_step": 100.0}, {}, 4, "orchestration host"),
        ({}, {"turns": 4, "latency": fixed(500.0)}, 1, "tools"),
        ({"train_seconds_per_token": 5.0}, {}, 4, "trainer"),
        ({"train_seconds_per_token": 0.0, "train_fixed_seconds": 0.0}, {"tokens": fixed(300)}, 4, "rollout"),
    ],
)
def test_the_bottleneck_is_named(changes, job, tenants, bottleneck):
    curves = CURVES.model_copy(update=changes)
    assert simulate(curves, workload(**job), tenants, PoolModel(devices=1, trainers=1)).bottleneck == bottleneck


def test_a_thousand_tenants_on_many_devices_are_quick_to_simulate():
    result = simulate(CURVES, WorkloadSpec.of(TOOL), 1000, PoolModel(devices=96, trainers=32))
    assert len(result.tenant_seconds) == 1000


# Rows of a step


@dataclass(eq=False)
class _Row:
    tenant: int
    left: int = 1000
    weight: float = 1.0
    pending: int = 4
    prompt: object = None


def step(rows: FairRows[_Row]) -> list[int]:
    """Runs a step; the tenants of its rows."""
    batch = rows.choose()
    rows.advance(batch, 1)
    return [row.tenant for row in [*batch.decoding, *batch.starting]]


def test_tokens_are_dealt_by_weight():
    rows: FairRows[_Row] = FairRows(max_rows=4, max_prefill=1000)
    for tenant, weight in ((0, 1.0), (1, 2.0), (2, 5.0)):
        for _ in range(16):
            rows.add(_Row(tenant, weight=weight))
    dealt = [tenant for _ in range(100) for tenant in step(rows)]
    assert [dealt.count(tenant) for tenant in range(3)] == pytest.approx([50, 100, 250], abs=4)


def test_who_comes_late_starts_level():
    rows: FairRows[_Row] = FairRows(max_rows=4, max_prefill=1000)
    for _ in range(8):
        rows.add(_Row(0))
    for _ in range(50):
        step(rows)
    for _ in range(8):
        rows.add(_Row(1))
    dealt = [tenant for _ in range(10) for tenant in step(rows)]
    assert dealt.count(1) == pytest.approx(20, abs=4)


def test_no_more_prompts_start_than_a_step_may_compute():
    rows: FairRows[_Row] = FairRows(max_rows=100, max_prefill=10)
    for tenant in range(6):
        rows.add(_Row(tenant, pending=4))
    sizes = []
    for _ in range(3):
        batch = rows.choose()
        sizes.append((len(batch.decoding), len(batch.starting), batch.prefill))
        rows.advance(batch, 1)
    assert sizes == [(0, 3, 12), (3, 3, 12), (6, 0, 0)]


def test_grouped_rows_bring_fewer_adapters_and_still_serve_everybody():
    dealt = {}
    for by_tenant in (False, True):
        rows: FairRows[_Row] = FairRows(max_rows=8, max_prefill=1000, by_tenant=by_tenant)
        for i in range(64):
            rows.add(_Row(i % 8))
        steps = [step(rows) for _ in range(40)]
        dealt[by_tenant] = max(len(set(s)) for s in steps)
        assert Counter(chain.from_iterable(steps)) == dict.fromkeys(range(8), 40)
    assert dealt == {False: 8, True: 1}


# The command


def point(mode: str, tenants: int, error: float) -> dict:
    job = workload(steps=2)
    result = simulate(CURVES, job, tenants, mode=Mode(mode))
    wall = result.wall_seconds / (1 + error)
    fields = {"workload": job.model_dump(mode="json"), "mode": mode, "tenants": tenants}
    return fields | {"wall_seconds": wall, "busy_share": result.busy_share}


def test_measured_points_are_compared_and_those_far_off_are_flagged(tmp_path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps([point("together", 4, 0.1), point("sequential", 2, 0.2)]))
    rows, ratios = command.validate(CURVES, command.read_measured(path))
    assert [row["error"] for row in rows] == pytest.approx([0.1, 0.2])
    assert [row["flag"] for row in rows] == ["", "error"]
    assert ratios == pytest.approx({"simulated_over_measured_together": 1.1, "simulated_over_measured_sequential": 1.2})


def test_the_command_writes_its_document(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "QUICK_TENANTS", (4,))
    monkeypatch.setattr(command, "QUICK_DEVICES", (1, 4))
    monkeypatch.setattr(command, "QUICK_POLICY_TENANTS", (2,))
    curves, path = tmp_path / "curves.json", tmp_path / "out" / "simulate.json"
    curves.write_text(CURVES.model_dump_json())
    command.main(["--curves", str(curves), "--quick", "--device-speed", "8", "--json", str(path)])
    found = json.loads(path.read_text())
    assert found.keys() >= {"bench", "command", "machine", "versions", "rows", "ratios"}
    assert {row["what"] for row in found["rows"]} == {"scaling", "policy"}
    assert found["ratios"].keys() >= {"best_split_over_shared", "grouped_over_eager"}
    scaling = [row for row in found["rows"] if row["what"] == "scaling"]
    assert [row["devices"] for row in scaling if row["best"]] == [1, 4]
    assert "8 times as fast" in capsys.readouterr().out


def test_a_file_that_is_wrong_is_an_error_of_the_command(tmp_path, capsys):
    path = tmp_path / "measured.json"
    path.write_text('[{"mode": "together"}]')
    with pytest.raises(SystemExit):
        command.main(["--measured", str(path)])
    assert "wall_seconds" in capsys.readouterr().err
