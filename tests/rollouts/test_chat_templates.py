"""Conversations under chat templates that extend earlier turns, and under those that rewrite them."""

import copy

import numpy as np
import pytest
from engine import tenant

from marlaas.environments import Example, Outcome
from marlaas.errors import EnvironmentFailure
from marlaas.pool import LocalPool
from marlaas.rollouts import collect
from marlaas.specs import ModelSpec, PoolSpec

POOL = PoolSpec(max_rank=8, max_adapters=2, max_sequences=16, max_sequence_tokens=320, train_tokens=512, threads=1)
START = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
APPENDS = START + "{{ m['content'] }}" + END
# As Qwen3: the last assistant turn, and only the last, gets an empty think block when it has none.
EMPTY_THINK = START + (
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}" + END
)
# As models that reason: of earlier assistant turns only a part is shown.
FORGETS = START + "{{ m['content'] if m['role'] != 'assistant' or loop.last else m['content'][:1] }}" + END


class Questions:
    """Three turns; tools answer in between. The reward is the example's."""

    tools = ()

    def __init__(self, answer="go on"):
        self.answer = answer

    async def reset(self, example):
        return [{"role": "user", "content": example.question}]

    async def step(self, example, messages, completion):
        if sum(m["role"] == "assistant" for m in messages) < 2:
            return Outcome(False, None, {}, [{"role": "tool", "content": self.answer}])
        return Outcome(True, float(len(completion)), {}, [])


@pytest.fixture
async def pool(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    await pool.open_job("a/j", tenant("a", lora={"rank": 4, "alpha": 8}))
    yield pool
    await pool.close()


async def roll_out(pool, template, environment=None, **sampling):
    tokenizer = copy.deepcopy(pool._engine.base.tokenizer)
    tokenizer.chat_template = template
    object.__setattr__(pool._engine.base, "tokenizer", tokenizer)
    spec = tenant("a", group_size=3, sampling={"max_tokens": 7, **sampling})
    async with pool.lease("a/j") as adapter:
        return await collect(pool, environment or Questions(), spec, 0, [Example("one", "first?", "1", {})], adapter)


@pytest.mark.parametrize("template", [APPENDS, EMPTY_THINK], ids=["appends", "empty think block"])
async def test_a_template_that_extends_earlier_turns_gives_one_sample_that_is_never_computed_twice(pool, template):
    found = await roll_out(pool, template)
    assert len(found.rollouts) == 3
    assert found.split == 0
    assert found.reused_tokens > 0
    for rollout in found.rollouts:
        assert rollout.sample_id == rollout.conversation_id
        assert pool.tokenizer.decode(rollout.token_ids).count("<|im_start|>tool\ngo on<|im_end|>") == 2
    await pool.stats()  # after what the conversations' ends have asked for
    assert pool._engine.sampler.prefixes.tokens == 0, "what was kept is freed when the conversation ends"


async def test_a_template_that_rewrites_earlier_turns_gives_a_sample_a_turn(pool):
    found = await roll_out(pool, FORGETS)
    assert found.split == 3
    assert len(found.rollouts) == 9
    for member in range(3):
        parts = [r for r in found.rollouts if r.conversation_id == f"0-one-{member}"]
        assert [p.sample_id for p in parts] == [f"0-one-{member}.{i}" for i in range(3)]
        assert len({p.reward for p in parts}) == 1, "each has the conversation's reward"
        for part in parts:
            mask = np.array(part.loss_mask)
            assert mask[-1]
            assert np.diff(mask.astype(int)).tolist().count(1) == 1, "one reply is trained on, and once"
    assert found.reused_tokens == 0


async def test_stop_strings_in_the_middle_of_a_conversation_keep_what_was_sampled(pool):
    found = await roll_out(pool, APPENDS, stop=["a", "e", "i", "o"], max_tokens=20)
    for rollout in found.rollouts:
        text = pool.tokenizer.decode(np.array(rollout.token_ids)[np.array(rollout.loss_mask)].tolist())
        assert len(rollout.text.replace("\n", "")) <= len(text)
        assert rollout.turn_count == 3


async def test_a_conversation_that_outgrows_the_longest_sequence_is_left_out_and_counted(pool):
    with pytest.raises(EnvironmentFailure, match=r"outgrew pool\.max_sequence_tokens 320"):
        await roll_out(pool, APPENDS, Questions("x" * 400))


async def test_a_first_prompt_that_is_too_long_is_left_out_and_says_what_does_not_fit(pool):
    with pytest.raises(EnvironmentFailure, match=r"with max_tokens 400 it does not fit in pool\.max_seq"):
        await roll_out(pool, APPENDS, max_tokens=400)
