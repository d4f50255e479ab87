"""The device thread outlives whatever an update does, and keeps its books."""

import asyncio
import dataclasses

import numpy as np
import pytest
from engine import random_batch, tenant

from marlaas.errors import BatchError, RequestError
from marlaas.pool import LocalPool
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import ModelSpec, PoolSpec

POOL = PoolSpec(max_rank=8, max_adapters=1, max_sequences=8, max_sequence_tokens=64, train_tokens=128, threads=1)


@pytest.fixture
async def pool(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    for name in "ab":
        await pool.open_job(f"{name}/j", tenant(name, lora={"rank": 4, "alpha": 8}))
    yield pool
    await pool.close()


def batch(pool, job, seed, **fields):
    return random_batch(pool._engine.base, job, seed, **fields)


def spoilt(found):
    bad = dataclasses.replace(found.samples[0], reward=float("nan"))
    return dataclasses.replace(found, samples=[bad, *found.samples[1:]])


async def test_several_updates_of_one_job_wait_for_the_only_slot_and_a_bad_one_among_them_is_told_apart(pool):
    """The first holds the only slot for many passes; meanwhile two of one job wait, and the second is refused."""
    asked = [
        pool.update(batch(pool, "a/j", 1, groups=12, members=8)),
        pool.update(batch(pool, "b/j", 2)),
        pool.update(spoilt(batch(pool, "b/j", 2))),
        pool.update(batch(pool, "b/j", 3)),
    ]
    long, first, bad, last = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    assert (long.version, first.version, last.version) == (1, 1, 2)
    assert isinstance(bad, BatchError)


async def test_an_update_that_cannot_even_begin_fails_alone_and_the_device_goes_on(pool, monkeypatch):
    prepare = pool._engine.trainer._prepare

    def out_of_memory(found):
        if found.job == "a/j":
            raise RuntimeError("out of memory")
        return prepare(found)

    monkeypatch.setattr(pool._engine.trainer, "_prepare", out_of_memory)
    asked = [pool.update(batch(pool, f"{name}/j", 1)) for name in "ab"]
    failed, fine = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    assert isinstance(failed, BatchError)
    assert "a/j" in str(failed)
    assert "RuntimeError: out of memory" in str(failed)
    assert fine.version == 1
    monkeypatch.undo()
    assert (await asyncio.wait_for(pool.update(batch(pool, "a/j", 1)), 20)).version == 1


async def test_a_job_closed_in_the_middle_of_its_update_answers_and_makes_room(pool):
    long = asyncio.create_task(pool.update(batch(pool, "a/j", 1, groups=12, members=8)))
    queued = asyncio.create_task(pool.update(batch(pool, "a/j", 2)))
    while not pool._engine.trainer.active:
        await asyncio.sleep(0.001)
    await pool.close_job("a/j")
    outcomes = await asyncio.wait_for(asyncio.gather(long, queued, return_exceptions=True), 20)
    assert all(isinstance(o, RequestError) and "a/j was closed" in str(o) for o in outcomes)
    assert (await asyncio.wait_for(pool.update(batch(pool, "b/j", 3)), 20)).version == 1
    assert not any(owner.working for owner in pool._engine.sampler.queue._owners.values())


async def test_what_tenants_are_charged_is_what_the_device_was_busy_for(pool):
    def ask(owner, seed):
        return SamplingRequest(owner, (5, 6, seed), f"{owner}/j/v0", Decoding.SAMPLE, 20, frozenset(), seed=seed)

    samples = await asyncio.gather(*(pool.generate(ask("ab"[i % 2], i)) for i in range(12)))
    updates = [await pool.update(batch(pool, f"{name}/j", 1)) for name in "abab"]
    stats = await pool.stats()
    [device] = stats.devices
    charged = {name: t.device_seconds for name, t in stats.tenants.items()}
    assert sum(charged.values()) <= device.sampling_seconds + device.training_seconds
    assert sum(charged.values()) > 0.5 * (device.sampling_seconds + device.training_seconds)
    assert sum(charged.values()) == pytest.approx(sum(x.device_seconds for x in (*samples, *updates)))
    assert device.sampling_seconds + device.training_seconds + device.scheduling_seconds < device.uptime_seconds
    assert {name: t.sampled_tokens for name, t in stats.tenants.items()} == {"a": 120, "b": 120}
    trained = {name: t.trained_tokens for name, t in stats.tenants.items()}
    assert trained == {name: 2 * sum(int(np.sum(s.mask)) for s in batch(pool, f"{name}/j", 1).samples) for name in "ab"}
