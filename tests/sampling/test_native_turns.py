"""What a conversation's next turn may go on from, and what becomes of keys and values that are kept."""

import pytest
import torch
from engine import random_adapter, resident

from marlaas.attention import KeyValueCache, KeyValues
from marlaas.errors import RequestError
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.prefixes import PrefixCache
from marlaas.sampling.protocol import Decoding, SamplingRequest

pytestmark = pytest.mark.usefixtures("every_path")

ROWS, TOKENS = 8, 96
ALONE = [(adapter, d) for adapter in ("a/x/v1", None) for d in (Decoding.GREEDY, Decoding.SAMPLE)]


@pytest.fixture(scope="module")
def adapters(tiny):
    return {"a/x/v1": random_adapter(tiny, 4, 1), "b/x/v1": random_adapter(tiny, 8, 2, ("q_proj", "down_proj"))}


def sampler_of(tiny, adapters, kept=10_000):
    return NativeSampler(tiny, resident(tiny, adapters), ROWS, TOKENS, kept)


def ask(prompt, adapter="a/x/v1", decoding=Decoding.GREEDY, max_tokens=6, session="a/1", **fields):
    return SamplingRequest(
        "a", tuple(prompt), adapter, decoding, max_tokens, frozenset(), session=session, beta=1.0, **fields
    )


def serve(sampler, requests):
    samples = [None] * len(requests)
    for index, wanted in enumerate(requests):
        sampler.submit(wanted, lambda sample, index=index: samples.__setitem__(index, sample))
    while sampler.busy:
        sampler.step()
    return samples


def assert_same(found, expected):
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def fresh(tiny, adapters, request):
    return serve(sampler_of(tiny, adapters, kept=0), [request])[0]


@pytest.mark.parametrize(("adapter", "decoding"), [*ALONE, ("b/x/v1", Decoding.COLD)])
def test_a_turn_computes_its_new_tokens_and_the_last_one_said_and_nothing_else(tiny, adapters, adapter, decoding):
    sampler = sampler_of(tiny, adapters)
    tokens, rows = list(range(3, 20)), 2 if decoding == Decoding.COLD else 1
    for turn in range(4):
        before = sampler.counts["a"].prefilled
        request = ask(tokens, adapter, decoding, seed=turn)
        [sample] = serve(sampler, [request])
        assert_same(sample, fresh(tiny, adapters, request))
        known = 0 if turn == 0 else len(tokens) - 3  # the two tokens of context and the last one said are not
        assert sample.reused_tokens == known
        computed = sampler.counts["a"].prefilled - before
        assert computed == rows * (len(tokens) - known)
        kept = len(tokens) + len(sample.tokens) - 1
        assert sampler.prefixes.tokens == rows * kept
        tokens += [*sample.tokens, 30 + turn, 9]


def test_turns_of_very_different_length_go_on_side_by_side(tiny, adapters):
    """The shorter ones are padded past the end of the cache's rows; that must stay without effect."""
    sampler = sampler_of(tiny, adapters)
    starts = {0: range(3, 75), 1: range(40, 44), 2: range(90, 140), 3: range(7, 9)}
    more = {0: [11], 1: range(10, 80), 2: [12, 13, 14], 3: range(10, 40)}
    served = {0: "a/x/v1", 1: "b/x/v1", 2: None, 3: "a/x/v1"}
    first = serve(sampler, [ask(starts[i], served[i], session=f"a/{i}") for i in starts])
    second = [ask([*starts[i], *first[i].tokens, *more[i]], served[i], session=f"a/{i}") for i in starts]
    company = [ask(range(60, 70), "b/x/v1", Decoding.COLD, session=None)]
    for request, sample in zip(second, serve(sampler, [*second, *company]), strict=False):
        assert sample.reused_tokens > 0
        assert_same(sample, fresh(tiny, adapters, request))


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (lambda kept: kept[:-4], "is shorter than what is kept"),
        (lambda kept: kept, "adds nothing to what is kept"),
        (lambda kept: [*kept[:-1], kept[-1] + 1, 9, 9], "differs in the last kept token"),
        (lambda kept: [kept[0] + 1, *kept[1:], 9, 9], "differs in the first token"),
    ],
)
def test_a_prompt_that_does_not_extend_what_is_kept_starts_afresh_and_replaces_it(tiny, adapters, prompt, why):
    sampler = sampler_of(tiny, adapters)
    [sample] = serve(sampler, [ask(range(3, 20))])
    changed = ask(prompt([*range(3, 20), *sample.tokens[:-1]]))
    [other] = serve(sampler, [changed])
    assert other.reused_tokens == 0, why
    assert_same(other, fresh(tiny, adapters, changed))
    assert sampler.prefixes.tokens == len(changed.prompt) + len(other.tokens) - 1
    longer = ask([*changed.prompt, *other.tokens, 9])
    assert serve(sampler, [longer])[0].reused_tokens == sampler.counts["a"].reused > 0


def test_sessions_and_adapters_never_see_each_other_s_keys_and_values(tiny, adapters):
    sampler = sampler_of(tiny, adapters)
    [sample] = serve(sampler, [ask(range(3, 20))])
    longer = [*range(3, 20), *sample.tokens, 9]
    for other in (ask(longer, session="a/2"), ask(longer, "b/x/v1"), ask(longer, None), ask(longer, session=None)):
        [found] = serve(sampler, [other])
        assert found.reused_tokens == 0
        assert_same(found, fresh(tiny, adapters, other))
    assert serve(sampler, [ask(longer)])[0].reused_tokens > 0, "theirs is still there"


def test_a_version_that_comes_back_under_its_name_with_other_weights_starts_afresh(tiny, adapters):
    sampler = sampler_of(tiny, adapters)
    [sample] = serve(sampler, [ask(range(3, 20))])
    sampler.drop_adapter("a/x/v1", RequestError("gone"))
    assert sampler.prefixes.tokens == 0
    with pytest.raises(RequestError, match="not resident"):
        sampler.submit(ask([*range(3, 20), *sample.tokens, 9]), print)
    changed = adapters | {"a/x/v1": random_adapter(tiny, 4, 77)}
    sampler.adapters.add("a/x/v1", *changed["a/x/v1"])
    again = ask([*range(3, 20), *sample.tokens, 9])
    [found] = serve(sampler, [again])
    assert found.reused_tokens == 0
    assert_same(found, fresh(tiny, changed, again))


def test_cold_goes_on_from_what_is_left_when_one_of_its_two_rows_was_reclaimed(tiny, adapters):
    for gone in ("a/x/v1", None):
        sampler = sampler_of(tiny, adapters)
        [sample] = serve(sampler, [ask(range(3, 20), decoding=Decoding.COLD)])
        assert sampler.prefixes.take("a/1", gone, range(3, 100)) is None, "does not extend, so it is dropped"
        assert len(sampler.prefixes) == 1
        longer = ask([*range(3, 20), *sample.tokens, 9], decoding=Decoding.COLD)
        [found] = serve(sampler, [longer])
        assert_same(found, fresh(tiny, adapters, longer))
        assert (found.reused_tokens > 0) == (gone is None), "counted where the adapter's row goes on"


def test_what_is_kept_stays_within_the_budget_and_the_oldest_goes_first(tiny, adapters):
    sampler = sampler_of(tiny, adapters, kept=70)
    for i in range(5):
        serve(sampler, [ask(range(3, 18), session=f"a/{i}")])  # 15 + 6 - 1 = 20 tokens each
        assert sampler.prefixes.tokens == 20 * min(i + 1, 3)
    assert sampler.prefixes.sessions() == ["a/2", "a/3", "a/4"]
    serve(sampler, [ask(range(3, 80), session="a/9")])
    assert sampler.prefixes.sessions() == ["a/2", "a/3", "a/4"], "what exceeds the budget by itself reclaims nothing"
    held = [entry.values.keys.shape[2] for entry in sampler.prefixes._entries.values()]
    assert held == [20, 20, 20], "the tensors are no longer than what is counted"
    for i in range(5):
        sampler.prefixes.drop_session(f"a/{i}")
    assert (sampler.prefixes.tokens, len(sampler.prefixes), sampler.prefixes._of_session) == (0, 0, {})


def test_kept_tensors_are_copies_of_their_own_so_that_ending_a_session_frees_them(tiny, adapters):
    sampler = sampler_of(tiny, adapters)
    serve(sampler, [ask(range(3, 20))])
    [entry] = sampler.prefixes._entries.values()
    g = tiny.transformer.geometry
    bytes_of_tokens = 4 * g.layers * g.kv_heads * g.head_dim * len(entry.tokens)
    for tensor in (entry.values.keys, entry.values.values):
        assert tensor.untyped_storage().nbytes() == bytes_of_tokens
        assert tensor.untyped_storage().data_ptr() != sampler._cache.keys.untyped_storage().data_ptr()


def test_a_cancelled_turn_leaves_nothing_behind_and_the_next_one_starts_afresh(tiny, adapters):
    sampler = sampler_of(tiny, adapters)
    [sample] = serve(sampler, [ask(range(3, 20))])
    longer = ask([*range(3, 20), *sample.tokens, 9], max_tokens=20)
    outcomes = []
    sampler.submit(longer, outcomes.append)
    for _ in range(3):
        sampler.step()
    sampler.cancel(lambda request: request is longer, RequestError("cancelled"))
    assert isinstance(outcomes[0], RequestError)
    assert (sampler.prefixes.tokens, sampler._rows, sampler.busy) == (0, [], False)
    [again] = serve(sampler, [longer])
    assert again.reused_tokens == 0
    assert_same(again, fresh(tiny, adapters, longer))


def test_room_that_is_missing_for_what_would_be_kept_harms_the_batch_once_and_not_for_ever(tiny, adapters, monkeypatch):
    sampler = sampler_of(tiny, adapters)
    outcomes = []
    for i in range(3):
        sampler.submit(ask(range(3, 9 + i), session=f"a/{i}", max_tokens=4 + 5 * (i == 2)), outcomes.append)
    with monkeypatch.context() as patch:
        patch.setattr(KeyValueCache, "take_out", lambda *args: 1 / 0)
        for _ in range(3):
            sampler.step()
        with pytest.raises(ZeroDivisionError):
            sampler.step()  # two of the three are finished and have something to keep
    sampler.cancel(lambda request: True, RequestError("the sampler failed"))
    assert len(outcomes) == 3
    assert sampler._rows == []
    assert not sampler._users
    assert sampler.queue.running("a") == 0
    request = ask(range(3, 20))
    assert_same(serve(sampler, [request])[0], fresh(tiny, adapters, request))


def test_a_prefix_cache_gives_out_each_entry_once():
    cache = PrefixCache(10)
    values = KeyValues(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))
    cache.keep("s", None, [1, 2, 3], values)
    assert cache.take("s", None, [1, 2, 3, 4]) is values
    assert cache.take("s", None, [1, 2, 3, 4]) is None
    cache.keep("s", None, [1, 2, 3], values)
    cache.keep("s", "a", [1, 2, 3], values)
    cache.drop_adapter("a")
    assert (cache.tokens, cache.sessions()) == (3, ["s"])
    cache.keep("s", None, [1] * 11, values)
    assert (cache.tokens, len(cache)) == (0, 0), "what the session had is stale, whether the new fits or not"
