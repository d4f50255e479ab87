"""Conversations become token rows: what the policy sampled is masked true, everything else is context."""

import pytest
from engine import tenant

from marlaas.conversations import ChatFormat
from marlaas.environments import Example, Outcome
from marlaas.errors import EnvironmentFailure
from marlaas.pool import LocalPool
from marlaas.rollouts import collect, request_seed
from marlaas.specs import ModelSpec, PoolSpec
from storage import decode_rollouts, encode_rollouts

POOL = PoolSpec(max_rank=8, max_adapters=2, max_sequences=16, max_sequence_tokens=256, train_tokens=512, threads=1)
EXAMPLES = [Example("one", "first?", "1", {}), Example("two", "second question?", "2", {})]


class Echo:
    """Asks `turns` times; the reward is the length of the last reply. Fails on the members it is told to."""

    tools = ()

    def __init__(self, turns=1, failing=()):
        self.turns, self.failing, self.steps = turns, set(failing), 0

    async def reset(self, example):
        return [{"role": "user", "content": example.question}]

    async def step(self, example, messages, completion):
        self.steps += 1
        if self.steps in self.failing:
            raise EnvironmentFailure("echo: step took longer than timeout_seconds 1")
        said = sum(m["role"] == "assistant" for m in messages) + 1
        if said < self.turns:
            return Outcome(False, None, {}, [{"role": "user", "content": f"again {said}"}])
        return Outcome(True, float(len(completion)), {"turns": float(said)}, [])


@pytest.fixture
async def pool(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    await pool.open_job("a/j", tenant("a", lora={"rank": 4, "alpha": 8}))
    yield pool
    await pool.close()


def spec(**fields):
    return tenant("a", group_size=3, sampling={"max_tokens": 6, "temperature": 0.9}, **fields)


async def roll_out(pool, environment, **fields):
    async with pool.lease("a/j") as adapter:
        return await collect(pool, environment, spec(**fields), 4, EXAMPLES, adapter)


async def test_a_rollout_is_the_prompt_and_then_what_was_sampled(pool):
    collected = await roll_out(pool, Echo())
    assert [r.group_id for r in collected.rollouts] == ["4-one"] * 3 + ["4-two"] * 3
    for rollout, example in zip(collected.rollouts, [EXAMPLES[0]] * 3 + [EXAMPLES[1]] * 3, strict=True):
        chat = ChatFormat(pool.tokenizer)
        prompt = chat.tokens(chat.text([{"role": "user", "content": example.question}]))
        assert rollout.token_ids[: len(prompt)] == prompt
        assert rollout.loss_mask == [False] * len(prompt) + [True] * (len(rollout.token_ids) - len(prompt))
        assert all((lp < 0) == sampled for lp, sampled in zip(rollout.logprobs, rollout.loss_mask, strict=True))
        assert rollout.reward == len(rollout.text)
        assert (rollout.temperature, rollout.adapter_version, rollout.turn_count) == (0.9, 0, 1)
    assert len(decode_rollouts(encode_rollouts(collected.rollouts))) == 6


async def test_later_turns_extend_the_tokens_exactly_as_the_chat_template_renders_them(pool):
    collected = await roll_out(pool, Echo(turns=3))
    for rollout in collected.rollouts:
        assert rollout.turn_count == 3
        text = pool.tokenizer.decode(rollout.token_ids)
        for mark in ("again 1<|im_end|>\n<|im_start|>assistant\n", "again 2<|im_end|>\n<|im_start|>assistant\n"):
            assert text.count(mark) == 1
        assert text.count("<|im_end|>\n<|im_start|>user\n") == 2, "each reply is closed once"
        switches = sum(a != b for a, b in zip(rollout.loss_mask, rollout.loss_mask[1:], strict=False))
        assert switches == 5, "context and samples alternate"


async def test_the_same_seed_gives_the_same_rollouts_and_another_gives_others(pool):
    first, second = await roll_out(pool, Echo(), seed=5), await roll_out(pool, Echo(), seed=5)
    other = await roll_out(pool, Echo(), seed=6)
    assert [r.token_ids for r in first.rollouts] == [r.token_ids for r in second.rollouts]
    assert [r.token_ids for r in first.rollouts] != [r.token_ids for r in other.rollouts]
    assert len({tuple(r.token_ids) for r in first.rollouts}) > 2, "members of a group differ"


async def test_what_an_environment_fails_on_is_left_out_and_counted(pool):
    collected = await roll_out(pool, Echo(failing={1, 2}))
    assert sum(collected.failures.values()) == 2
    groups = [r.group_id for r in collected.rollouts]
    assert all(groups.count(g) >= 2 for g in groups), "a group of one has no baseline"
    with pytest.raises(EnvironmentFailure, match="no rollout of step 4 was finished; most often: echo: step took"):
        await roll_out(pool, Echo(failing=range(1, 100)))


def test_request_seeds_differ_by_every_part():
    seeds = {request_seed(a, b, c) for a in range(5) for b in range(5) for c in ("x", "y")}
    assert len(seeds) == 50
    assert all(0 <= s < 2**63 for s in seeds)
