"""Places are given up and taken again, by weight, priority and caps, and nobody's tokens change for it."""

import dataclasses
import time

import pytest
import torch
from engine import random_adapter, resident

from marlaas.attention import KeyValueCache
from marlaas.errors import RequestError
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, SamplingRequest


@pytest.fixture(scope="module")
def adapters(tiny):
    return {f"{name}/x/v1": random_adapter(tiny, 4, i) for i, name in enumerate("abcd")}


def ask(owner, seed, decoding=Decoding.SAMPLE, max_tokens=24, version="v1", **fields):
    return SamplingRequest(
        owner, (5, 6, seed), f"{owner}/x/{version}", decoding, max_tokens, frozenset(), seed=seed, beta=1.0, **fields
    )


class Served:
    """A sampler, and what came of each request."""

    def __init__(self, tiny, adapters, rows=8, slots=None, kept=0):
        self.sampler = NativeSampler(tiny, resident(tiny, adapters, slots), rows, 64, kept)
        self.asked, self.outcomes = [], []

    def submit(self, *requests):
        for request in requests:
            self.asked.append(request)
            self.outcomes.append([])
            self.sampler.submit(request, self.outcomes[-1].append)

    def step(self, times=1):
        for _ in range(times):
            self.sampler.step()
            rows = self.sampler._rows
            assert [row.index for row in rows] == list(range(len(rows)))
            assert len(rows) <= self.sampler._cache.rows

    def finish(self):
        while self.sampler.busy:
            self.step()
        return [outcome for [outcome] in self.outcomes]

    def running(self, owner):
        return self.sampler.queue.running(owner)


@pytest.fixture
def assert_undisturbed(tiny, adapters):
    def check(served):
        for request, sample in zip(served.asked, served.finish(), strict=True):
            alone = Served(tiny, adapters, rows=2)
            alone.submit(request)
            [expected] = alone.finish()
            assert sample.tokens == expected.tokens
            assert sample.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    return check


@pytest.mark.parametrize("decoding", Decoding)
def test_what_gave_up_its_place_goes_on_where_it_was_and_computes_nothing_twice(
    tiny, adapters, decoding, assert_undisturbed
):
    served = Served(tiny, adapters)
    served.submit(*(ask("a", i, decoding, 20 + i) for i in range(8)))
    served.step(3)
    served.submit(*(ask("b", i, decoding) for i in range(8)), *(ask("c", i) for i in range(8)))
    served.step()
    places = 2 if decoding == Decoding.COLD else 1
    assert served.running("a") < 8 // places
    assert served.running("b") > 0 < served.running("c")
    assert_undisturbed(served)
    counts = served.sampler.counts
    assert counts["a"].prefilled == 8 * 3 * places, "each prompt once, though some came back"
    assert counts["a"].sampled == sum(20 + i for i in range(8))


def test_a_step_after_a_newcomer_s_arrival_the_places_are_equal_shares_by_weight(tiny, adapters):
    for weight, places in ((1.0, 4), (3.0, 6), (1 / 3, 2)):
        served = Served(tiny, adapters)
        served.sampler.queue.set_share("b", weight, None)
        served.submit(*(ask("a", i) for i in range(20)))
        served.step(2)
        assert served.running("a") == 8
        served.submit(*(ask("b", i) for i in range(20)))
        served.step()
        assert (served.running("a"), served.running("b")) == (8 - places, places)


def test_equal_shares_of_an_odd_number_of_places_do_not_go_to_and_fro(tiny, adapters):
    served = Served(tiny, adapters, rows=7)
    served.submit(*(ask("a", i) for i in range(10)))
    served.step()
    served.submit(*(ask("b", i) for i in range(10)))
    served.step()
    inside = set(map(id, served.sampler._running))
    assert (served.running("a"), served.running("b")) == (4, 3)
    for _ in range(6):
        served.step()
        assert set(map(id, served.sampler._running)) == inside


def test_a_higher_priority_takes_all_places_it_wants_and_gives_them_back(tiny, adapters, assert_undisturbed):
    served = Served(tiny, adapters)
    served.sampler.queue.set_share("b", 1.0, None, priority=1)
    served.submit(*(ask("a", i) for i in range(10)))
    served.step(2)
    served.submit(*(ask("b", i, Decoding.COLD if i else Decoding.GREEDY, 3) for i in range(4)))
    served.step()
    assert (served.running("a"), served.running("b")) == (1, 4), "one place, one and three times two"
    begun = [bool(item.logprobs) for item in served.sampler.queue._owners["a"].waiting]
    assert begun == [True] * 7 + [False] * 2, "who had a place gets one before those who had none"
    served.step(6)
    assert served.running("a") == 8
    assert_undisturbed(served)


def test_a_lower_priority_never_makes_anyone_leave(tiny, adapters):
    served = Served(tiny, adapters)
    served.sampler.queue.set_share("b", 100.0, None, priority=-1)
    served.submit(*(ask("a", i, max_tokens=5) for i in range(12)))
    served.step(2)
    served.submit(ask("b", 1))
    waited = 0
    while served.sampler.busy:
        served.step()
        assert not (served.sampler.queue.waiting("a") and served.running("b"))
        waited += served.running("b") == 0
    assert waited > 0
    assert [len(sample.tokens) for sample in served.finish()] == [5] * 12 + [24]


def test_tenants_that_compete_share_the_places_that_pay_and_one_alone_has_them_all(tiny, adapters, assert_undisturbed):
    served = Served(tiny, adapters)
    served.sampler.shared_places = 4
    served.submit(*(ask("a", i, max_tokens=12) for i in range(10)))
    served.step(2)
    assert served.running("a") == 8
    served.submit(*(ask("b", i, max_tokens=12) for i in range(3)))
    served.step()
    assert served.running("b") == 2, "its share of four"
    assert served.running("a") + served.running("b") <= 8
    assert_undisturbed(served)


def test_cold_gets_its_two_places_even_where_one_is_shared(tiny, adapters):
    served = Served(tiny, adapters)
    served.sampler.shared_places = 1
    served.submit(ask("a", 1, Decoding.COLD), ask("b", 1))
    assert [len(sample.tokens) for sample in served.finish()] == [24, 24]


def test_requests_that_are_cancelled_while_they_are_out_of_the_batch_get_one_answer(tiny, adapters, assert_undisturbed):
    served = Served(tiny, adapters)
    served.submit(*(ask("a", i) for i in range(8)))
    served.step(4)
    served.submit(*(ask("b", i) for i in range(8)))
    served.step()
    out = [item.request for item in served.sampler.queue._owners["a"].waiting]
    assert len(out) == 4
    served.sampler.cancel(lambda request: request is out[0], RequestError("cancelled"))
    served.sampler.cancel(lambda request: request is out[0], RequestError("cancelled again"))
    [[error]] = [o for o, r in zip(served.outcomes, served.asked, strict=True) if r is out[0]]
    assert str(error) == "cancelled"
    assert served.sampler.users("a/x/v1") == 7
    gone = served.asked.index(out[0])
    del served.asked[gone], served.outcomes[gone]
    assert_undisturbed(served)
    assert not served.sampler._users


def test_a_version_dropped_while_its_requests_are_out_of_the_batch_ends_them(tiny, adapters):
    served = Served(tiny, adapters)
    served.submit(*(ask("a", i) for i in range(8)))
    served.step(4)
    served.submit(*(ask("b", i) for i in range(8)))
    served.step()
    served.sampler.drop_adapter("a/x/v1", RequestError("retired"))
    assert [str(o) for [o] in served.outcomes[:8]] == ["retired"] * 8
    assert all(len(s.tokens) == 24 for s in served.finish()[8:])
    assert (served.running("a"), served.sampler.users("a/x/v1")) == (0, 0)


def test_adapters_are_paged_out_under_requests_that_wait_for_their_place_again(tiny, adapters, assert_undisturbed):
    served = Served(tiny, adapters, rows=4, slots=2)
    served.submit(*(ask("a", i) for i in range(4)))
    served.step(3)
    for priority, name in ((1, "b"), (2, "c")):
        served.sampler.queue.set_share(name, 1.0, None, priority)
        served.submit(*(ask(name, i, max_tokens=8) for i in range(4)))
        served.step()
        assert served.running(name) == 4
    with pytest.raises(KeyError):
        served.sampler.adapters["a/x/v1"]
    assert served.sampler.adapters.paged == 2, "and d's"
    assert_undisturbed(served)


def test_one_slot_serves_any_number_of_adapters_one_after_another(tiny, adapters, assert_undisturbed):
    served = Served(tiny, adapters, slots=1)
    served.submit(*(ask(name, i, max_tokens=5) for i in range(3) for name in "abcd"))
    while served.sampler.busy:
        served.step()
        assert len({row.adapter for row in served.sampler._rows}) <= 1
    assert_undisturbed(served)


def test_the_adapter_that_was_used_longest_ago_makes_room(tiny, adapters):
    paged = resident(tiny, adapters, slots=2)
    for name in ("a/x/v1", "b/x/v1", "a/x/v1", "c/x/v1"):
        assert paged.page_in(name, in_use=())
    assert (paged["a/x/v1"].slot, paged["c/x/v1"].slot) == (0, 1)
    assert not paged.page_in("b/x/v1", in_use=("a/x/v1", "c/x/v1"))
    assert paged.page_in("b/x/v1", in_use=("a/x/v1",))
    assert torch.equal(paged["b/x/v1"].vector, adapters["b/x/v1"][1])
    assert torch.equal(paged["a/x/v1"].vector, adapters["a/x/v1"][1])


def test_a_cap_on_adapters_counts_those_of_all_the_tenant_s_jobs_and_not_the_base(tiny, adapters):
    versions = adapters | {f"a/{job}/v{n}": random_adapter(tiny, 4, n) for job in "xy" for n in (2, 3)}
    served = Served(tiny, versions, rows=16)
    served.sampler.adapter_caps["a"] = 2
    wanted = [name for name in versions if name[0] == "a"]
    served.submit(*(ask(name, 1) for name in "bcd"))
    served.submit(*(dataclasses.replace(ask("a", i), adapter=name) for i in range(2) for name in [None, *wanted]))
    seen = 0
    while served.sampler.busy:
        served.step()
        mine = {row.adapter for row in served.sampler._rows if (row.adapter or "").startswith("a/")}
        if served.running("b"):
            assert len(mine) == 2, "others' adapters do not count"
        assert len(mine) <= 2
        seen = max(seen, len(mine))
    assert seen == 2
    assert all(len(sample.tokens) == 24 for sample in served.finish())


def test_device_seconds_are_the_time_spent_whoever_comes_and_goes(tiny, adapters):
    served = Served(tiny, adapters)
    started = time.perf_counter()
    served.submit(*(ask("a", i) for i in range(8)))
    served.step(3)
    served.submit(*(ask("b", i, Decoding.COLD) for i in range(4)), *(ask("c", i, max_tokens=4) for i in range(4)))
    samples = served.finish()
    spent = time.perf_counter() - started
    counts = served.sampler.counts
    charged = sum(c.device_seconds for c in counts.values())
    assert charged == pytest.approx(sum(s.device_seconds for s in samples))
    assert 0.5 * spent < charged <= spent - served.sampler.scheduling_seconds
    for owner in "abc":
        mine = [s for s, r in zip(samples, served.asked, strict=True) if r.owner == owner]
        assert counts[owner].device_seconds == pytest.approx(sum(s.device_seconds for s in mine))
        assert counts[owner].sampled == sum(len(s.tokens) for s in mine)


def test_a_row_of_cold_is_charged_twice_that_of_greedy(tiny, adapters):
    served = Served(tiny, adapters)
    served.submit(ask("a", 1, Decoding.COLD), ask("b", 2, Decoding.GREEDY))
    cold, greedy = served.finish()
    assert cold.device_seconds == pytest.approx(2 * greedy.device_seconds)


def test_room_that_is_missing_for_what_gives_up_its_place_harms_the_batch_once_and_not_for_ever(
    tiny, adapters, monkeypatch, assert_undisturbed
):
    served = Served(tiny, adapters)
    served.submit(*(ask("a", i) for i in range(10)))
    served.step(3)
    served.submit(*(ask("b", i) for i in range(3)))
    with monkeypatch.context() as patch:
        patch.setattr(KeyValueCache, "take_out", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            served.step()
    served.sampler.cancel(lambda request: True, RequestError("the sampler failed"))
    assert all(isinstance(outcome, RequestError) for [outcome] in served.outcomes)
    assert (served.sampler._rows, served.sampler.busy) == ([], False)
    served.asked, served.outcomes = [], []
    served.submit(*(ask("a", i) for i in range(3)))
    assert_undisturbed(served)
