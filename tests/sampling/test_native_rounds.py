"""Random comings and goings: the sampler's books stay right, and everybody gets the answer they would get alone."""

from collections import Counter

import numpy as np
import pytest
from engine import random_adapter, resident

from marlaas.errors import MarlaasError, RequestError
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, Sample, SamplingRequest

pytestmark = pytest.mark.usefixtures("every_path")

OWNERS = "abcd"
ROWS, TOKENS, KEPT, SLOTS = 7, 64, 150, 3


class Rounds:
    """One sampler, and a model of what it should hold."""

    def __init__(self, tiny, seed):
        self.tiny, self.rng = tiny, np.random.default_rng(seed)
        self.versions = dict.fromkeys(OWNERS, 1)
        self.weights = {f"{o}/x/v1": random_adapter(tiny, 4, i) for i, o in enumerate(OWNERS)}
        self.sampler = NativeSampler(tiny, resident(tiny, self.weights, SLOTS), ROWS, TOKENS, KEPT)
        self.alone = NativeSampler(tiny, resident(tiny, self.weights), 2, TOKENS)
        self.asked: list[SamplingRequest] = []
        self.outcomes: list[list[Sample | MarlaasError]] = []
        self.talks: dict[str, list[int]] = {}  # the tokens of each session up to now
        self.under_way: dict[str, int] = {}  # a session's request that has no answer yet

    def below(self, limit):
        return int(self.rng.integers(limit))

    def one_of(self, items):
        return items[self.below(len(items))]

    def submit(self):
        owner = self.one_of(OWNERS)
        session = f"{owner}/{self.below(4)}" if self.below(4) else None
        if session in self.under_way:
            return
        adapter = f"{owner}/x/v{self.versions[owner]}" if self.below(8) else None
        decoding = self.one_of([d for d in Decoding if adapter or d != Decoding.COLD])
        context = [3 + self.below(250) for _ in range(1 + self.below(6))] if self.below(3) else [5, 6, 7]
        prompt = [*self.talks.get(session, []), *context]
        if len(prompt) > TOKENS - 12:
            self.end_session(session)
            prompt = context
        if self.below(10) == 0:
            prompt[self.below(len(prompt))] = 3 + self.below(250)  # does not extend what was said any more
        request = SamplingRequest(
            owner, tuple(prompt), adapter, decoding, 1 + self.below(12), frozenset(range(40, 44)), beta=1.0,
            temperature=0.8, top_k=self.one_of([0, 30]), seed=self.below(1 << 30), session=session,
        )  # fmt: skip
        number = len(self.asked)
        self.asked.append(request)
        self.outcomes.append([])
        if session is not None:
            self.under_way[session] = number
            self.talks[session] = prompt
        self.sampler.submit(request, lambda outcome: self.answered(number, outcome))

    def answered(self, number, outcome):
        self.outcomes[number].append(outcome)
        session = self.asked[number].session
        if session is not None:
            del self.under_way[session]
            if isinstance(outcome, Sample):
                self.talks[session] = [*self.asked[number].prompt, *outcome.tokens]

    def end_session(self, session):
        self.talks.pop(session, None)
        self.sampler.prefixes.drop_session(session)

    def cancel(self):
        if self.asked:
            unwanted = self.one_of(self.asked)
            self.sampler.cancel(lambda request: request is unwanted, RequestError("cancelled"))

    def replace_version(self):
        owner = self.one_of(OWNERS)
        old, self.versions[owner] = f"{owner}/x/v{self.versions[owner]}", self.versions[owner] + 1
        name = f"{owner}/x/v{self.versions[owner]}"
        self.weights[name] = random_adapter(self.tiny, self.one_of([2, 4]), self.below(1 << 20))
        self.sampler.adapters.add(name, *self.weights[name])
        if self.below(2):
            self.sampler.drop_adapter(old, RequestError("retired"))

    def change_shares(self):
        owner = self.one_of(OWNERS)
        self.sampler.queue.set_share(owner, self.one_of([0.5, 1.0, 4.0]), self.one_of([None, 2]), self.below(2))
        self.sampler.adapter_caps[owner] = self.one_of([None, 1])
        self.sampler.shared_places = self.one_of([2, 5, ROWS])

    def step(self):
        self.sampler.step()
        self.check_books()

    def check_books(self):
        sampler, queue = self.sampler, self.sampler.queue
        unanswered = [r for r, outcomes in zip(self.asked, self.outcomes, strict=True) if not outcomes]
        waiting = [item for owner in OWNERS if owner in queue._owners for item in queue._owners[owner].waiting]
        assert sorted(map(id, unanswered)) == sorted(id(item.request) for item in [*sampler._running, *waiting])
        assert [row.index for row in sampler._rows] == list(range(len(sampler._rows)))
        assert len(sampler._rows) <= ROWS
        assert {id(r) for item in sampler._running for r in item.rows} == set(map(id, sampler._rows))
        for item in sampler._running:
            assert all(row.length == len(item.content) - 1 and row.parked is None for row in item.rows)
        for item in waiting:
            for row in item.rows:
                assert row.parked is None or row.parked.length == len(item.content) - 1
        assert {o: queue.running(o) for o in OWNERS} == {
            o: sum(item.request.owner == o for item in sampler._running) for o in OWNERS
        }
        assert sampler._users == Counter(r.adapter for r in unanswered if r.adapter)
        kept = sampler.prefixes._entries
        assert sampler.prefixes.tokens == sum(len(entry.tokens) for entry in kept.values()) <= KEPT
        assert all(entry.values.length == len(entry.tokens) for entry in kept.values())
        assert all(session in self.talks and adapter in (None, *sampler.adapters) for session, adapter in kept)
        assert sampler.adapters.resident <= SLOTS

    def expected(self, request):
        """Served alone, without anything kept, by weights that were set once."""
        if request.adapter is not None and request.adapter not in self.alone.adapters:
            bank = {request.adapter: self.weights[request.adapter]}
            self.alone = NativeSampler(self.tiny, resident(self.tiny, bank), 2, TOKENS)
        found = []
        self.alone.submit(request, found.append)
        while self.alone.busy:
            self.alone.step()
        return found[0]


@pytest.mark.parametrize("seed", range(5))
def test_whoever_comes_and_goes_the_books_are_right_and_every_answer_is_the_one_it_would_be_alone(tiny, seed):
    rounds = Rounds(tiny, seed)
    acts = {rounds.submit: 0.55, rounds.step: 0.37, rounds.cancel: 0.04, rounds.replace_version: 0.02}
    acts |= {rounds.change_shares: 0.02}
    for act in rounds.rng.choice(list(acts), 500, p=list(acts.values())):
        act()
    while rounds.sampler.busy:
        rounds.step()
    served = 0
    for request, outcomes in zip(rounds.asked, rounds.outcomes, strict=True):
        [outcome] = outcomes
        if isinstance(outcome, Sample):
            served += 1
            expected = rounds.expected(request)
            assert outcome.tokens == expected.tokens
            assert outcome.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert 50 < served < len(rounds.asked)
    assert sum(counts.reused for counts in rounds.sampler.counts.values()) > 0
    for session in list(rounds.talks):
        rounds.end_session(session)
    assert (rounds.sampler.prefixes.tokens, len(rounds.sampler.prefixes)) == (0, 0)
    assert (rounds.sampler._rows, dict(rounds.sampler._users)) == ([], {})
