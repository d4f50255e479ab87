"""Leaving the batch and coming back changes nothing: turns that continue, places given up, adapters paged out."""

import pytest
import torch
from engine import random_adapter, resident

from marlaas.errors import RequestError
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, SamplingRequest

pytestmark = pytest.mark.usefixtures("every_path")


@pytest.fixture(scope="module")
def adapters(tiny):
    return {f"{name}/x/v1": random_adapter(tiny, 4, i) for i, name in enumerate("abcd")}


def ask(owner, prompt, adapter, decoding=Decoding.SAMPLE, max_tokens=10, session=None, seed=0):
    return SamplingRequest(
        owner, tuple(prompt), adapter, decoding, max_tokens, frozenset(), seed=seed, session=session, beta=1.0
    )


def serve(sampler, requests):
    samples = [None] * len(requests)
    for index, wanted in enumerate(requests):
        sampler.submit(wanted, lambda sample, index=index: samples.__setitem__(index, sample))
    while sampler.busy:
        sampler.step()
    return samples


def talk(sampler, turns=3, owners="abc"):
    """Conversations of several turns; what the tool says is different each time. Returns all samples by turn."""
    prompts = {i: [5, 6, 7 + i, *range(20, 20 + i)] for i in range(9)}
    said = []
    for turn in range(turns):
        requests = [
            ask(
                owners[i % len(owners)],
                prompt,
                f"{owners[i % len(owners)]}/x/v1",
                Decoding.COLD if i % 3 == 0 else Decoding.SAMPLE,
                max_tokens=4 + i,
                session=f"{owners[i % len(owners)]}/{i}",
                seed=100 * turn + i,
            )
            for i, prompt in prompts.items()
        ]
        samples = serve(sampler, requests)
        for i, sample in enumerate(samples):
            prompts[i] = [*prompts[i], *sample.tokens, 9, *range(30, 31 + (i + turn) % 4)]
        said.append(samples)
    return said


@pytest.mark.parametrize("kept_tokens", [10_000, 60], ids=["all kept", "mostly reclaimed"])
def test_a_turn_that_goes_on_from_kept_keys_and_values_says_what_a_fresh_one_would(tiny, adapters, kept_tokens):
    with_cache = NativeSampler(tiny, resident(tiny, adapters), 8, 128, kept_tokens)
    fresh = talk(NativeSampler(tiny, resident(tiny, adapters), 8, 128, 0))
    for turn, (mine, theirs) in enumerate(zip(talk(with_cache), fresh, strict=True)):
        for sample, expected in zip(mine, theirs, strict=True):
            assert sample.tokens == expected.tokens
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            assert expected.reused_tokens == 0
            if kept_tokens == 10_000:
                assert (sample.reused_tokens > 0) == (turn > 0)
        assert with_cache.prefixes.tokens <= kept_tokens
    for i in range(9):
        with_cache.prefixes.drop_session(f"{'abc'[i % 3]}/{i}")
    assert with_cache.prefixes.tokens == len(with_cache.prefixes) == 0


def test_what_is_kept_is_never_used_for_other_tokens_or_another_adapter(tiny, adapters):
    sampler = NativeSampler(tiny, resident(tiny, adapters), 8, 128, 10_000)
    first = serve(sampler, [ask("a", range(3, 30), "a/x/v1", session="a/1")])[0]
    longer = [*range(3, 30), *first.tokens, 9, 10]
    other_adapter = serve(sampler, [ask("a", longer, "b/x/v1", session="a/1")])[0]
    assert other_adapter.reused_tokens == 0
    changed = [4, *longer[1:]]
    assert serve(sampler, [ask("a", changed, "a/x/v1", session="a/1")])[0].reused_tokens == 0
    sampler.drop_adapter("a/x/v1", RequestError("gone"))
    assert all(adapter != "a/x/v1" for _, adapter in sampler.prefixes._entries)


def test_a_flood_gives_up_places_and_everybody_s_tokens_stay_what_they_were(tiny, adapters):
    flood = [
        ask("a", [5, 6, i], "a/x/v1", Decoding.COLD if i % 4 == 0 else Decoding.SAMPLE, 30, seed=i) for i in range(12)
    ]
    late = [ask("b", [7, 8, i], "b/x/v1", max_tokens=30, seed=i) for i in range(4)]
    alone = [serve(NativeSampler(tiny, resident(tiny, adapters), 2, 64), [r])[0] for r in (*flood, *late)]
    sampler = NativeSampler(tiny, resident(tiny, adapters), 8, 64)
    samples = {}
    for i, request in enumerate(flood):
        sampler.submit(request, lambda sample, i=i: samples.__setitem__(i, sample))
    for _ in range(5):
        sampler.step()
    assert sampler.queue.running("b") == 0
    for i, request in enumerate(late, len(flood)):
        sampler.submit(request, lambda sample, i=i: samples.__setitem__(i, sample))
    sampler.step()
    assert sampler.queue.running("b") >= 3, "places are given up at once and not when a completion ends"
    while sampler.busy:
        sampler.step()
        assert [row.index for row in sampler._rows] == list(range(len(sampler._rows)))
    for i, expected in enumerate(alone):
        assert samples[i].tokens == expected.tokens
        assert samples[i].logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_adapters_take_turns_in_fewer_slots(tiny, adapters):
    requests = [ask(name, [5, 6, i], f"{name}/x/v1", max_tokens=6, seed=i) for i in range(4) for name in "abcd"]
    roomy = serve(NativeSampler(tiny, resident(tiny, adapters), 16, 64), requests)
    tight_adapters = resident(tiny, adapters, slots=2)
    tight = serve(NativeSampler(tiny, tight_adapters, 16, 64), requests)
    assert [s.tokens for s in tight] == [s.tokens for s in roomy]
    assert tight_adapters.resident <= 2


def test_a_tenant_s_cap_on_adapters_holds_and_nobody_else_waits_for_it(tiny, adapters):
    versions = adapters | {"a/x/v2": random_adapter(tiny, 4, 9)}
    sampler = NativeSampler(tiny, resident(tiny, versions), 16, 64)
    sampler.adapter_caps["a"] = 1
    for i in range(3):
        for name in ("a/x/v1", "a/x/v2", "b/x/v1"):
            sampler.submit(ask(name[0], [5, i], name, max_tokens=5), lambda sample: None)
    sampler.step()
    while sampler.busy:
        assert len({row.adapter for row in sampler._rows if row.adapter[0] == "a"}) <= 1
        sampler.step()
    assert sampler.counts["a"].sampled == 30


def test_device_seconds_are_divided_among_all_who_were_there(tiny, adapters):
    sampler = NativeSampler(tiny, resident(tiny, adapters), 8, 64)
    samples = serve(sampler, [ask("ab"[i % 2], [5, 6, i], f"{'ab'[i % 2]}/x/v1", seed=i) for i in range(8)])
    whole = sum(counts.device_seconds for counts in sampler.counts.values())
    assert sum(s.device_seconds for s in samples) == pytest.approx(whole)
    assert whole > 0
    assert {owner: counts.sampled for owner, counts in sampler.counts.items()} == {"a": 40, "b": 40}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes_every_request_gets_its_own_answer_once(tiny, adapters, seed):
    rng = torch.Generator().manual_seed(seed)

    def draw(below):
        return int(torch.randint(below, (1,), generator=rng))

    sampler, asked, outcomes = NativeSampler(tiny, resident(tiny, adapters, slots=3), 6, 64, 200), [], {}
    for _ in range(150):
        if draw(3) == 0:
            owner = "abcd"[draw(4)]
            request = ask(
                owner,
                [draw(200) + 3 for _ in range(1 + draw(12))],
                None if draw(6) == 0 else f"{owner}/x/v1",
                Decoding.GREEDY,
                1 + draw(20),
                session=f"{owner}/{draw(3)}" if draw(2) else None,
            )
            number = len(asked)
            asked.append(request)
            sampler.submit(request, lambda outcome, n=number: outcomes.setdefault(n, []).append(outcome))
        if asked and draw(12) == 0:
            gone = asked[draw(len(asked))]
            sampler.cancel(lambda r, gone=gone: r is gone, RequestError("cancelled"))
        sampler.step()
        assert [row.index for row in sampler._rows] == list(range(len(sampler._rows)))
    while sampler.busy:
        sampler.step()
    assert sampler._rows == []
    assert not sampler._users
    for number, request in enumerate(asked):
        [outcome] = outcomes[number]
        if not isinstance(outcome, RequestError):
            expected = serve(NativeSampler(tiny, resident(tiny, adapters), 2, 64), [request])[0]
            assert outcome.tokens == expected.tokens
