"""What templates do to a conversation's tokens: each token that was sampled is trained on, once, where it was said."""

import asyncio
import copy
import itertools

import numpy as np
import pytest
from engine import tenant

from marlaas.environments import Example, Outcome
from marlaas.errors import EnvironmentFailure
from marlaas.pool import LocalPool
from marlaas.rollouts import collect, training_batch
from marlaas.sampling.protocol import FinishReason, Sample
from marlaas.specs import ModelSpec, PoolSpec
from storage import decode_rollouts, encode_rollouts

POOL = PoolSpec(max_rank=8, max_adapters=2, max_sequences=16, max_sequence_tokens=640, train_tokens=1024, threads=1)
EXAMPLE = Example("one", "first?", "1", {})
THOUGHT = "<think>\nhm\n</think>\n\nyes"

HEAD = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
APPENDS = HEAD + "{{ m['content'] }}" + TAIL
TRIMS = HEAD + "{{ m['content'] | trim }}" + TAIL
# Qwen3's rule: reasoning is shown of the turns since the user last spoke; the very last turn always has a think block.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + HEAD + "{% set parts = m['content'].split('</think>') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{{ parts[-1].lstrip('\n') }}"
    "{% elif m['role'] == 'assistant' %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}" + TAIL
)
# The same family with thinking switched off: what the assistant is asked to continue is not what history shows.
NO_THINKING = APPENDS.replace(
    "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif"
)


class Asks:
    """`turns` turns; `role` answers in between with `answer`, a text or one for each member."""

    def __init__(self, role="tool", turns=3, answer="go on", tools=()):
        self.role, self.turns, self.answer, self.tools, self.heard = role, turns, answer, tools, []

    async def reset(self, example):
        return [{"role": "user", "content": example.question}]

    async def step(self, example, messages, completion):
        self.heard.append(completion)
        if sum(m["role"] == "assistant" for m in messages) + 1 < self.turns:
            answers = self.answer if isinstance(self.answer, list) else [self.answer]
            return Outcome(False, None, {}, [{"role": self.role, "content": text} for text in answers])
        return Outcome(True, float(sum(map(ord, completion)) % 7), {}, [])


@pytest.fixture
async def pool(model_cache):
    pool = LocalPool(ModelSpec(source="tiny-random", dtype="float32", device="cpu", cache=model_cache), POOL)
    await pool.open_job("a/j", tenant("a", lora={"rank": 4, "alpha": 32}, optimizer={"learning_rate": 0.02}))
    yield pool
    await pool.close()


@pytest.fixture
def said(pool, monkeypatch):
    """Notes (request, sample) of each turn by session, in the order of the turns."""
    noted, generate = {}, pool.generate

    async def listen(request):
        sample = await generate(request)
        noted.setdefault(request.session, []).append((request, sample))
        return sample

    monkeypatch.setattr(pool, "generate", listen)
    return noted


@pytest.fixture
def script(pool, monkeypatch):
    """Makes the policy say what a test wants: `script(text, ...)`, one a turn; the log-probs are all different."""

    def write(*replies, reason=FinishReason.STOP, ends=(2,), unheard=""):
        turns, noted, count = {}, {}, itertools.count(1)

        async def generate(request):
            await asyncio.sleep(0)
            turn = turns[request.session] = turns.get(request.session, -1) + 1
            tokens = [*pool.tokenizer(replies[turn] + unheard, add_special_tokens=False)["input_ids"], *ends]
            sample = Sample(tokens, [-next(count) / 1000 for _ in tokens], reason, replies[turn], request.adapter, 0.0)
            noted.setdefault(request.session, []).append((request, sample))
            return sample

        monkeypatch.setattr(pool, "generate", generate)
        return noted

    return write


async def roll_out(pool, template, environment, size=2, **sampling):
    tokenizer = copy.deepcopy(pool._engine.base.tokenizer)
    tokenizer.chat_template = template
    object.__setattr__(pool._engine.base, "tokenizer", tokenizer)
    spec = tenant("a", group_size=size, sampling={"max_tokens": 12, **sampling})
    async with pool.lease("a/j") as adapter:
        return await collect(pool, environment, spec, 0, [EXAMPLE], adapter)


def conversations(found):
    talks = {}
    for rollout in found.rollouts:
        talks.setdefault(rollout.conversation_id, []).append(rollout)
    return talks


def assert_trained_once(found, said):
    """The tokens that are trained on are those that were sampled, each after the context that it was sampled in."""
    talks = conversations(found)
    assert len(talks) == len(said)
    for session, turns in said.items():
        [parts] = [parts for name, parts in talks.items() if name.rsplit("-", 1)[1] == session.rsplit("/", 1)[1]]
        at, rest = 0, list(parts)
        for request, sample in turns:
            if at and tuple(rest[0].token_ids[: len(request.prompt)]) != request.prompt:
                rest, at = rest[1:], 0
            part, start = rest[0], len(request.prompt)
            end = start + len(sample.tokens)
            assert tuple(part.token_ids[:start]) == request.prompt
            assert not any(part.loss_mask[at:start]), "context is not trained on"
            assert part.token_ids[start:end] == sample.tokens
            assert all(part.loss_mask[start:end])
            assert part.logprobs[start:end] == sample.logprobs
            at = end
        assert len(rest) == 1
        assert [sum(map(sum, (p.loss_mask for p in parts)))] == [sum(len(s.tokens) for _, s in turns)]
        assert all(part.loss_mask[-1] for part in parts), "nothing comes after the last reply"


@pytest.mark.parametrize(
    ("template", "role", "reply", "parts"),
    [
        (APPENDS, "tool", "yes", 1),
        (APPENDS, "user", THOUGHT, 1),
        (APPENDS, "user", "  yes\n", 1),
        (QWEN3, "tool", THOUGHT, 1),
        (QWEN3, "tool", "yes", 1),
        (QWEN3, "user", "yes", 1),
        (QWEN3, "user", THOUGHT, 3),
        (NO_THINKING, "tool", "yes", 3),
        (TRIMS, "tool", "yes", 1),
        (TRIMS, "tool", "yes \n", 3),
    ],
)
async def test_a_template_splits_a_conversation_only_where_it_changes_what_was_said(
    pool, script, template, role, reply, parts
):
    said = script(*[reply] * 3)
    found = await roll_out(pool, template, Asks(role))
    assert_trained_once(found, said)
    assert found.split == (2 if parts > 1 else 0)
    for rollouts in conversations(found).values():
        assert len(rollouts) == parts
        assert len({r.sample_id for r in rollouts}) == parts
        assert {(r.reward, r.turn_count, r.text) for r in rollouts} == {(rollouts[0].reward, 3, "\n".join([reply] * 3))}


async def test_one_turn_that_is_rewritten_splits_there_and_the_others_go_on(pool, script):
    """Only the second of four replies ends in white space that the template trims away."""
    said = script("one", "two ", "three", "four")
    found = await roll_out(pool, TRIMS, Asks(turns=4))
    assert_trained_once(found, said)
    for first, second in conversations(found).values():
        assert pool.tokenizer.decode(first.token_ids).count("<|im_start|>assistant") == 2
        assert pool.tokenizer.decode(second.token_ids).count("<|im_start|>assistant") == 4
        assert sum(second.loss_mask) == len("three") + 1 + len("four") + 1, "the two before are context there"


async def test_a_whole_conversation_reads_as_the_template_renders_it(pool, script):
    script("yes", "no", "maybe")
    found = await roll_out(pool, APPENDS, Asks("user"))
    messages = [{"role": "user", "content": "first?"}]
    for reply in ("yes", "no", "maybe"):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
    whole = pool.tokenizer.apply_chat_template(messages[:-1], tokenize=True)["input_ids"]
    newline = pool.tokenizer("\n", add_special_tokens=False)["input_ids"]
    for rollout in found.rollouts:
        assert [*rollout.token_ids, *newline] == list(whole), "but for what the template puts after the last reply"


async def test_a_turn_that_was_cut_off_is_closed_by_context_and_not_by_the_policy(pool, script):
    said = script("yes", "no", "maybe", reason=FinishReason.LENGTH, ends=())
    found = await roll_out(pool, APPENDS, Asks())
    assert_trained_once(found, said)
    for rollout in found.rollouts:
        ids, mask = np.array(rollout.token_ids), np.array(rollout.loss_mask)
        assert (ids == 2).sum() == 5, "of the question, two replies and two answers"
        assert not mask[ids == 2].any()


async def test_a_stop_string_in_the_middle_is_trained_on_but_neither_heard_nor_shown(pool, script):
    said = script("yes", "no", "maybe", ends=(), unheard="##")
    environment = Asks()
    found = await roll_out(pool, APPENDS, environment, stop=["##"])
    assert_trained_once(found, said)
    assert environment.heard[::2] == ["yes", "no", "maybe"]
    for rollout in found.rollouts:
        text = pool.tokenizer.decode(rollout.token_ids)
        assert "yes##<|im_end|>\n<|im_start|>tool\ngo on<|im_end|>\n<|im_start|>assistant\nno##<|im_end|>" in text
        assert text.endswith("maybe##")
        assert rollout.text == "yes\nno\nmaybe"


@pytest.mark.parametrize("template", [APPENDS, QWEN3, NO_THINKING, TRIMS], ids=["appends", "qwen3", "off", "trims"])
async def test_what_the_real_policy_says_is_trained_on_once_with_stops_of_every_kind(pool, said, template):
    found = await roll_out(pool, template, Asks(), size=4, stop=["a", "e", "}"], temperature=1.5)
    assert_trained_once(found, said)
    reasons = {sample.finish_reason for turns in said.values() for _, sample in turns}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    await pool.stats()  # it is asked after the sessions were ended, and answered then
    assert pool._engine.sampler.prefixes.tokens == 0


async def test_tools_that_the_template_does_not_take_are_told_in_words_and_their_answers_extend_the_tokens(pool, said):
    schema = {"type": "function", "function": {"name": "add", "description": "sums", "parameters": {}}}
    environment = Asks(answer=["4", "5"], tools=(schema,), turns=2)
    found = await roll_out(pool, APPENDS, environment, max_tokens=3)
    assert_trained_once(found, said)
    assert found.split == 0
    assert found.reused_tokens > 0
    for rollout in found.rollouts:
        text = pool.tokenizer.decode(rollout.token_ids)
        assert text.startswith("<|im_start|>system\n# Tools")
        assert '"name": "add"' in text
        both = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
        assert text.count(f"<|im_start|>user\n{both}<|im_end|>\n<|im_start|>assistant\n") == 1
        assert "<|im_start|>tool" not in text


async def test_a_conversation_that_outgrows_the_pool_is_counted_and_the_others_of_its_group_stay(pool, said):
    class Unequal(Asks):
        calls = 0

        async def step(self, example, messages, completion):
            self.calls += 1
            self.answer = "x" * 700 if self.calls == 2 else "go on"
            return await super().step(example, messages, completion)

    found = await roll_out(pool, APPENDS, Unequal(turns=2), size=4)
    [(reason, count)] = found.failures.items()
    assert reason == "the conversation on example one outgrew pool.max_sequence_tokens 640"
    assert count == 1
    assert len(found.rollouts) == 3
    assert found.dropped == 0
    del said[next(session for session, turns in said.items() if len(turns) == 1)]
    assert_trained_once(found, said)
    await pool.stats()
    assert pool._engine.sampler.prefixes.tokens == 0


async def test_the_last_turns_are_sampled_with_the_room_that_is_left(pool, said):
    await roll_out(pool, APPENDS, Asks(turns=3, answer="x" * 260), max_tokens=30)
    for turns in said.values():
        for turn, (request, _) in enumerate(turns):
            left = POOL.max_sequence_tokens - len(request.prompt)
            assert request.max_tokens == (30 if turn == 0 else min(30, left))
            assert len(request.prompt) + request.max_tokens <= POOL.max_sequence_tokens
    assert min(turns[2][0].max_tokens for turns in said.values()) < 30


async def test_a_rewriting_template_has_the_room_of_each_turn_by_itself(pool, script):
    """What is forgotten takes no room: as one sequence these turns would not fit."""
    reply = "<think>\n" + "h" * 450 + "\n</think>\n\nyes"
    script(*[reply] * 3)
    found = await roll_out(pool, QWEN3, Asks("user"))
    assert len(found.rollouts) == 6
    script(*[reply] * 3)
    with pytest.raises(EnvironmentFailure, match="outgrew"):
        await roll_out(pool, APPENDS, Asks("user"))


@pytest.mark.parametrize("template", [APPENDS, QWEN3, NO_THINKING], ids=["appends", "qwen3", "thinking off"])
async def test_the_trainer_agrees_with_the_sampler_on_every_token_of_every_turn(pool, template):
    """Through kept keys and values, new samples, the store, shared prompts and mixed passes: ratio one, gap zero."""
    for version in range(3):
        found = await roll_out(pool, template, Asks(), size=6, temperature=0.8, top_k=40, top_p=0.95)
        rows = decode_rollouts(encode_rollouts(found.rollouts))
        assert {row.adapter_version for row in rows} == {version}
        metrics = (await pool.update(training_batch("a/j", rows, 0))).metrics
        assert metrics["logprob_gap"] < 1e-4
        assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["truncated_share"] == metrics["clip_share"] == 0
        assert metrics["gradient_norm"] > 0
