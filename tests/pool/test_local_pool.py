"""The pool serves many jobs at once, keeps their versions apart, and outlives their mistakes."""

import asyncio
import dataclasses

import pytest
import torch
from engine import random_batch, tenant

from marlaas.errors import AdapterError, BatchError, ModelError, PoolClosed, RequestError
from marlaas.lora import import_peft
from marlaas.pool import LocalPool
from marlaas.sampling.protocol import Decoding, SamplingRequest
from marlaas.specs import ModelSpec, PoolSpec

POOL = PoolSpec(max_rank=8, max_adapters=4, max_sequences=16, max_sequence_tokens=64, train_tokens=512, threads=1)


@pytest.fixture
async def pool(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    yield pool
    await pool.close()


def spec(name, **fields):
    return tenant(name, lora={"rank": 4, "alpha": 64}, optimizer={"learning_rate": 0.05}, **fields)


def ask(pool, owner, adapter, prompt="hello", **fields):
    ids = tuple(pool.tokenizer(prompt)["input_ids"])
    fields = {"decoding": Decoding.GREEDY, "max_tokens": 16, "stop_ids": pool.stop_ids} | fields
    return SamplingRequest(owner, ids, adapter, **fields)


async def test_updates_of_many_jobs_make_new_versions_and_old_ones_stay_while_held(pool):
    for name in "abc":
        assert await pool.open_job(f"{name}/j", spec(name)) == 0
    async with pool.lease("a/j") as before:
        said = await pool.generate(ask(pool, "a", before.name))
        batches = [random_batch(pool._engine.base, f"{name}/j", i) for i, name in enumerate("abc")]
        results = await asyncio.gather(*(pool.update(b) for b in batches))
        assert [r.version for r in results] == [1, 1, 1]
        assert (await pool.generate(ask(pool, "a", before.name))).tokens == said.tokens
    async with pool.lease("a/j") as after:
        assert after.name == "a/j/v1"
        assert (await pool.generate(ask(pool, "a", after.name))).tokens != said.tokens
    with pytest.raises(RequestError, match="a/j/v0 is not resident"):
        await pool.generate(ask(pool, "a", before.name))


async def test_a_bad_batch_fails_its_own_tenant_only(pool):
    await pool.open_job("a/j", spec("a"))
    await pool.open_job("b/j", spec("b"))
    good, bad = random_batch(pool._engine.base, "a/j", 0), random_batch(pool._engine.base, "b/j", 1)
    bad = dataclasses.replace(bad, samples=[dataclasses.replace(bad.samples[0], reward=float("nan"))])
    outcome = await asyncio.gather(pool.update(good), pool.update(bad), return_exceptions=True)
    assert outcome[0].version == 1
    assert isinstance(outcome[1], BatchError)
    assert (await pool.update(random_batch(pool._engine.base, "b/j", 2))).version == 1


async def test_an_exported_adapter_can_be_held_for_sampling_and_says_the_same(pool):
    await pool.open_job("a/j", spec("a"))
    await pool.update(random_batch(pool._engine.base, "a/j", 0))
    files = await pool.export("a/j")
    async with pool.lease("a/j") as held:
        trained = await pool.generate(ask(pool, "a", held.name))
    await pool.close_job("a/j")
    async with pool.lease_files("a/j/v1", files) as loaded:
        assert (await pool.generate(ask(pool, "a", loaded.name))).tokens == trained.tokens
    _, vector = import_peft(files, pool._engine.base.transformer)
    assert torch.isfinite(vector).all()


async def test_a_job_restored_from_its_state_continues_bit_for_bit(pool):
    await pool.open_job("a/j", spec("a"))
    await pool.update(random_batch(pool._engine.base, "a/j", 0))
    state = await pool.state("a/j")
    await pool.update(random_batch(pool._engine.base, "a/j", 1))
    whole = await pool.state("a/j")
    await pool.close_job("a/j")
    assert await pool.open_job("a/j", spec("a"), state) == 1
    await pool.update(random_batch(pool._engine.base, "a/j", 1))
    resumed = await pool.state("a/j")
    assert resumed.version == whole.version == 2
    for name, tensor in whole.weights.items():
        assert torch.equal(resumed.weights[name], tensor)


async def test_more_jobs_than_slots_take_turns_on_the_device_and_keep_their_state(pool, model_cache):
    names = [f"{name}/j" for name in "abcdefg"]  # seven jobs for four slots
    for job in names:
        await pool.open_job(job, spec(job[0]))
    for seed in range(3):
        results = await asyncio.gather(*(pool.update(random_batch(pool._engine.base, j, seed)) for j in names))
        assert [r.version for r in results] == [seed + 1] * 7
    assert (await pool.stats()).devices[0].paged_adapters >= 3
    alone = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    await alone.open_job("a/j", spec("a"))
    for seed in range(3):
        await alone.update(random_batch(alone._engine.base, "a/j", seed))
    expected, found = await alone.state("a/j"), await pool.state("a/j")
    for name, tensor in expected.weights.items():
        torch.testing.assert_close(found.weights[name], tensor, atol=1e-5, rtol=0)
    await alone.close()


async def test_all_versions_in_use_can_be_sampled_from_though_they_do_not_fit_at_once(pool):
    names = [f"{name}/j" for name in "abcdefghijklmn"]  # fourteen adapters for twelve slots
    for job in names:
        await pool.open_job(job, spec(job[0]))
    asks = [ask(pool, job[0], f"{job}/v0", max_tokens=20) for job in names for _ in range(2)]
    samples = await asyncio.gather(*(pool.generate(a) for a in asks))
    assert len({tuple(s.tokens) for s in samples}) >= 1
    assert all(len(s.tokens) >= 1 for s in samples)


async def test_a_job_beyond_the_limit_waits_with_the_reason_and_comes_in_when_one_goes(model_cache):
    limited = POOL.model_copy(update={"max_jobs": 2})
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), limited)
    for name in "ab":
        await pool.open_job(f"{name}/j", spec(name))
    reasons = []
    ordinary = asyncio.create_task(pool.open_job("c/j", spec("c"), None, reasons.append))
    await asyncio.sleep(0.05)
    urgent = asyncio.create_task(pool.open_job("d/j", spec("d", quota={"priority": 5})))
    await asyncio.sleep(0.6)
    assert not ordinary.done()
    assert reasons[0] == "waits to be admitted: 2 jobs are open, pool.max_jobs is 2, and 0 wait before it"
    await pool.close_job("a/j")
    assert await urgent == 0
    assert not ordinary.done()
    await pool.close_job("b/j")
    assert await ordinary == 0
    await pool.close()


async def test_closing_a_job_drops_its_requests(pool):
    await pool.open_job("a/j", spec("a"))
    with pytest.raises(AdapterError, match="is open already"):
        await pool.open_job("a/j", spec("a"))
    waiting = asyncio.create_task(pool.generate(ask(pool, "a", "a/j/v0", max_tokens=50)))
    await asyncio.sleep(0)
    await pool.close_job("a/j")
    outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
    assert isinstance(outcome, RequestError)
    assert await pool.open_job("a/j", spec("a")) == 0


async def test_a_cancelled_request_leaves_the_batch(pool):
    await pool.open_job("a/j", spec("a"))
    tasks = [asyncio.create_task(pool.generate(ask(pool, "a", "a/j/v0", max_tokens=55))) for _ in range(20)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.generate(ask(pool, "a", None, max_tokens=1))
    assert pool._engine.sampler.running == 0
    assert pool._engine.sampler.users("a/j/v0") == 0


async def test_a_cancelled_update_does_not_end_the_device_thread(pool):
    await pool.open_job("a/j", spec("a"))
    for seed in range(5):
        task = asyncio.create_task(pool.update(random_batch(pool._engine.base, "a/j", seed)))
        await asyncio.sleep(0.001 * seed)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    result = await pool.update(random_batch(pool._engine.base, "a/j", 9))
    assert result.version >= 1
    assert pool._engine._thread.is_alive()


async def test_an_update_cancelled_while_its_version_is_published_leaves_no_adapter_behind(pool, monkeypatch):
    await pool.open_job("a/j", spec("a"))
    add = pool._engine.add_adapter

    def add_and_cancel(*given):
        task.cancel()  # takes effect where `_publish` waits for what is asked for here
        return add(*given)

    monkeypatch.setattr(pool._engine, "add_adapter", add_and_cancel)
    task = asyncio.create_task(pool.update(random_batch(pool._engine.base, "a/j", 0)))
    outcome = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(outcome[0], asyncio.CancelledError)
    async with pool.lease("a/j") as newest:
        assert newest.name == "a/j/v0"
    await pool.close_job("a/j")
    device = (await pool.stats()).devices[0]
    assert device.resident_adapters + device.paged_adapters == 0


async def test_waiting_work_learns_that_the_pool_was_closed(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    await pool.open_job("a/j", spec("a"))
    waiting = [asyncio.create_task(pool.generate(ask(pool, "a", "a/j/v0", max_tokens=55))) for _ in range(30)]
    await asyncio.sleep(0.01)
    await pool.close()
    outcome = await asyncio.gather(*waiting, return_exceptions=True)
    assert any(isinstance(o, PoolClosed) for o in outcome)
    with pytest.raises(PoolClosed):
        await pool.generate(ask(pool, "a", None))


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        LocalPool(ModelSpec(source=str(tmp_path), device="cpu"), POOL)


def test_sequences_longer_than_the_model_s_context_are_refused(model_cache):
    model = ModelSpec(source="tiny-random", device="cpu", cache=model_cache)
    with pytest.raises(ModelError, match="max_sequence_tokens: 4096 must be at most 2048, the longest context"):
        LocalPool(model, POOL.model_copy(update={"max_sequence_tokens": 4096}))
