"""A benchmark's tenant trains as its flow would: paced by staleness, stopped cleanly, resumed after a failure."""

import asyncio

import pytest
from engine import tenant

from bench.environments import LetterGame, RaisingGame, within_limits
from bench.tenants import run_tenant
from marlaas.errors import EnvironmentFailure
from marlaas.pool import LocalPool
from marlaas.specs import ModelSpec, PoolSpec

POOL = PoolSpec(max_rank=8, max_adapters=4, max_sequences=32, max_sequence_tokens=128, threads=1)


@pytest.fixture
async def pool(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    yield pool
    await pool.close()


def spec(name="a", **fields):
    usual = {"prompts_per_step": 2, "group_size": 4, "sampling": {"max_tokens": 6}, "lora": {"rank": 4}}
    return tenant(name, **usual | fields)


@pytest.mark.parametrize("staleness", [0, 2])
async def test_each_step_is_sampled_with_the_version_that_its_staleness_allows(pool, staleness):
    seen = []
    result = await run_tenant(pool, spec(max_staleness=staleness), LetterGame("abc"), 6, on_step=seen.append)
    assert [step.version for step in result.steps] == [max(0, k - staleness) for k in range(6)]
    assert seen == result.steps
    assert result.tokens == sum(step.tokens for step in result.steps) <= 6 * 8 * 6
    assert result.device_seconds > 0


async def test_the_event_ends_a_tenant_that_would_go_on_and_leaves_nothing_in_the_pool(pool):
    until = asyncio.Event()
    running = asyncio.create_task(run_tenant(pool, spec(), LetterGame("abc"), None, until=until))
    await asyncio.sleep(0.5)
    until.set()
    result = await asyncio.wait_for(running, 5)
    assert result.steps
    device = (await pool.stats()).devices[0]
    assert device.resident_adapters + device.paged_adapters == 0


async def test_a_failure_is_raised_or_counted_when_the_tenant_comes_back(pool):
    broken = within_limits(RaisingGame("abc"), spec().environment)
    with pytest.raises(EnvironmentFailure, match="ZeroDivisionError"):
        await run_tenant(pool, spec(), broken, 3)
    until = asyncio.Event()
    running = asyncio.create_task(run_tenant(pool, spec(), broken, 3, until=until, restarts=True))
    await asyncio.sleep(0.6)
    until.set()
    result = await asyncio.wait_for(running, 5)
    assert result.failures.total() >= 2
    assert result.steps == []


async def test_a_tenant_that_comes_back_goes_on_from_its_last_step(pool):
    class FailsInStepThree(LetterGame):
        left = 4  # all conversations of the step, once

        async def reset(self, example):
            if example.id in ("6", "7") and self.left:
                self.left -= 1
                raise EnvironmentFailure("broken for a while")
            return await super().reset(example)

    fields = {"prompts_per_step": 2, "group_size": 2, "max_staleness": 0}
    result = await run_tenant(pool, spec(**fields), FailsInStepThree("abc"), 5, restarts=True)
    assert [(step.step, step.version) for step in result.steps] == [(k, k) for k in range(5)]
    assert result.failures.total() == 1
