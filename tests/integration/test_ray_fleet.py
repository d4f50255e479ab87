"""The same fleet on a Ray pool: the same results, also when actors are killed in the middle."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml
from fleets import MODEL, POOL, SMALL, game

from flows.train_fleet import train_fleet
from marlaas.checkpoints import decode_state
from marlaas.pool.cluster import start_pool, stop_pool
from marlaas.pool.ray import NAMESPACE
from marlaas.specs import FleetSpec, ModelSpec, PoolSpec
from storage import JobLayout, committed_steps, decode_rollouts, read_commits

TENANTS = [
    {"name": "narrow", "steps": 4, "lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}, "publish_every": 2},
    {"name": "wide", "steps": 5, "lora": {"rank": 8}, "seed": 5},
    {"name": "long", "steps": 4, "sampling": {"max_tokens": 24}, "seed": 6},
]
# On policy: which version samples a step is then the same whatever the timing.
DEFAULTS = SMALL | {"max_staleness": 0, "group_size": 4, "evaluation": {"enabled": False}}
GAMES = """
class Letters:
    def example(self, index, split, seed):
        return {"question": f"{split} {seed} {index}", "answer": "a"}

    def score(self, example, answer):
        return len(set(answer)) / 32
"""


@pytest.fixture(scope="module")
def address(model_cache):
    with tempfile.TemporaryDirectory(prefix="marlaas-ray-") as folder:
        model = ModelSpec.model_validate(MODEL | {"cache": model_cache})
        yield start_pool(model, PoolSpec.model_validate(POOL), rollout=2, train=1, state=Path(folder))
        stop_pool(Path(folder))


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory, fleet_of, run_flow) -> FleetSpec:
    return finished(run_flow, fleet(fleet_of, tmp_path_factory.mktemp("local"), "alike"))


def fleet(fleet_of, folder, name, address=None) -> FleetSpec:
    (folder / "games.py").write_text(GAMES)
    made = fleet_of(name, folder / "store", TENANTS, **DEFAULTS | {"environment": game("Letters", folder)})
    return made.model_copy(update={"pool": made.pool.model_copy(update={"address": address})})


def finished(run_flow, fleet) -> FleetSpec:
    rows = run_flow(train_fleet(fleet))
    assert all("error" not in row for row in rows), rows
    return fleet


def same_results(one: FleetSpec, other: FleetSpec) -> None:
    """Every token the same, and weights but for rounding: how sums are grouped depends on who is in a pass."""
    stores = [f.store.open() for f in (one, other)]
    for tenant in one.tenants:
        layouts = [JobLayout(tenant.name, f.job(tenant)) for f in (one, other)]
        commits = [read_commits(store, layout) for store, layout in zip(stores, layouts, strict=True)]
        assert [c.step for c in commits[0]] == [c.step for c in commits[1]] == list(range(tenant.steps))
        for mine, theirs in zip(*commits, strict=True):
            shards = [decode_rollouts(s.get(c.rollouts[0])) for s, c in zip(stores, (mine, theirs), strict=True)]
            assert [r.token_ids.tolist() for r in shards[0]] == [r.token_ids.tolist() for r in shards[1]]
            assert mine.metrics["reward_mean"] == theirs.metrics["reward_mean"]
        states = [
            decode_state(store.get(of[-1].checkpoint), fingerprint(store, layout))[0]
            for store, layout, of in zip(stores, layouts, commits, strict=True)
        ]
        for name, tensor in states[0].weights.items():
            np.testing.assert_allclose(states[1].weights[name], tensor, atol=1e-4)


def fingerprint(store, layout) -> str:
    from marlaas.job_records import read_record

    return read_record(store, layout).base_fingerprint


def test_two_rollout_actors_and_a_trainer_give_what_one_device_gives(
    address, on_one_device, tmp_path, fleet_of, run_flow
):
    same_results(on_one_device, finished(run_flow, fleet(fleet_of, tmp_path, "alike", address)))


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["rollout-0", "train-0"])
def test_an_actor_killed_in_the_middle_loses_nothing(address, on_one_device, tmp_path, fleet_of, run_flow, actor):
    wanted = fleet(fleet_of, tmp_path, "alike", address)
    killed = []

    async def kill_in_the_middle() -> None:
        store = wanted.store.open()
        while not all(committed_steps(store, JobLayout(t.name, "alike")) for t in wanted.tenants):
            await asyncio.sleep(0.02)
        handle = await asyncio.to_thread(ray.get_actor, actor, NAMESPACE)
        process = (await handle.describe.remote()).process
        os.kill(process, signal.SIGKILL)
        killed.append(process)

    async def run() -> list[dict]:
        killing = asyncio.create_task(kill_in_the_middle())
        rows = await train_fleet(wanted)
        await killing
        return rows

    rows = run_flow(run())
    assert killed
    assert all("error" not in row for row in rows), rows
    same_results(on_one_device, wanted)


@pytest.mark.slow
def test_the_commands_start_a_pool_that_a_run_uses_and_stop_it(tmp_path, fleet_of, marlaas):
    wanted = fleet(fleet_of, tmp_path, "commanded")
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump(wanted.model_dump(mode="json")))
    said, _ = marlaas("pool", "up", file, "--rollout", 1, "--train", 1).communicate(timeout=120)
    assert "train-0: tiny-random" in said
    line = said.strip().splitlines()[-1]
    assert line == f"marlaas run {file} --pool ray://127.0.0.2:10001"
    running = marlaas("run", file, "--pool", line.split()[-1])
    said, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    store = wanted.store.open()
    for tenant in wanted.tenants:
        assert committed_steps(store, JobLayout(tenant.name, "commanded")) == list(range(tenant.steps))
    said, _ = marlaas("pool", "down").communicate(timeout=60)
    assert said.strip() == "the pool is stopped"
    said, _ = marlaas("pool", "down").communicate(timeout=60)
    assert said.strip() == "no pool was running"
    refused = marlaas("run", file, "--pool", line.split()[-1])
    _, errors = refused.communicate(timeout=120)
    assert refused.returncode == 1
    assert "pool.address: ray://127.0.0.2:10001 is not a Ray cluster that can be reached" in errors
