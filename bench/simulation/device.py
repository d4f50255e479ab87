"""A simulated device: sampling steps, and training passes between them, as SimPy events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import simpy

from bench.simulation.curves import ServiceCurves
from bench.simulation.rows import Batch, FairRows

_ROUNDING = 1e-9  # of a step: what sums of floats may be off by

Events = Generator[simpy.Event, Any, Any]


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation, and as a row the turn it is in. turns: tokens to sample. waits: seconds of the tool after each.

    since: when the turn could have begun; None once it has. done: called when the last turn has ended.
    """

    tenant: int
    weight: float
    adapter: Hashable
    prompt: Hashable | None
    pending: int
    turns: list[int]
    waits: list[float]
    done: Callable[[], None]
    turn: int = 0
    left: int = 0
    since: float | None = None


@dataclass(slots=True, eq=False)
class Update:
    """A tenant's batch: `rows` are the tokens of each sequence still to be trained, from short to long."""

    tenant: int
    rows: list[int]
    since: float
    done: simpy.Event


@dataclass
class Waits:
    """Seconds that something waited in a queue."""

    total: float = 0.0
    longest: float = 0.0
    number: int = 0

    def note(self, seconds: float) -> None:
        self.total += seconds
        self.longest = max(self.longest, seconds)
        self.number += 1


@dataclass(frozen=True)
class DeviceLimits:
    """What a device may do at once, and when it trains; see PoolModel."""

    max_sequences: int
    prefill_tokens: int
    train_tokens: int
    coalesce_seconds: float
    decode_between: int
    by_tenant: bool


@dataclass
class Device:
    """One device. Updates go before sampling, after `coalesce_seconds` for company, with `decode_between` steps after
    each pass. A conversation comes back here from its tool, where its keys and values are.

    jobs: that train here and are not finished, so that an update knows when all others wait as well. conversations:
    that are here or at a tool. steps: of decoding; adapter_steps: the distinct adapters in each, summed.
    """

    clock: simpy.Environment
    curves: ServiceCurves
    limits: DeviceLimits
    answer_tokens: int
    waits: dict[str, Waits]
    jobs: int = 0
    conversations: int = 0
    sampling_seconds: float = 0.0
    training_seconds: float = 0.0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    steps: int = 0
    adapter_steps: int = 0
    _returns: list[tuple[float, int, Conversation]] = field(default_factory=list)
    _waiting: list[Update] = field(default_factory=list)
    _under_way: list[Update] = field(default_factory=list)
    _owed: int = 0
    _interruptible: bool = False

    def __post_init__(self) -> None:
        limits = self.limits
        self._rows: FairRows[Conversation] = FairRows(
            limits.max_sequences, limits.prefill_tokens, by_tenant=limits.by_tenant
        )
        self._decode_seconds = cache(self.curves.decode_seconds)
        self._numbers = count()
        self._process = self.clock.process(self._serve())

    def submit(self, conversation: Conversation, since: float) -> None:
        """A conversation's first turn may begin; it has waited since then."""
        self.conversations += 1
        self._begin_turn(conversation, since)
        self._wake()

    def update(self, update: Update) -> None:
        """A batch may be trained."""
        self._waiting.append(update)
        self._wake()

    def look_again(self) -> None:
        """The number of jobs has changed."""
        self._wake()

    def _begin_turn(self, conversation: Conversation, since: float) -> None:
        conversation.left, conversation.since = conversation.turns[conversation.turn], since
        self._rows.add(conversation)

    def _wake(self) -> None:
        if self._interruptible:
            self._interruptible = False
            self._process.interrupt()

    def _serve(self) -> Events:
        while True:
            now = self.clock.now
            while self._returns and self._returns[0][0] <= now:
                since, _, conversation = heapq.heappop(self._returns)
                self._begin_turn(conversation, since)
            if self._should_train(now):
                yield from self._train()
            elif self._rows:
                yield from self._sample(now)
            else:
                yield from self._rest(self._returns[0][0] - now if self._returns else math.inf)

    def _should_train(self, now: float) -> bool:
        if not self._waiting and not self._under_way:
            return False
        if not self._rows:
            return True
        if self._owed:
            return False
        return bool(self._under_way) or len(self._waiting) >= self.jobs or now >= self._deadline

    @property
    def _deadline(self) -> float:
        return self._waiting[0].since + self.limits.coalesce_seconds

    def _rest(self, seconds: float) -> Events:
        """Waits so long, or until something is submitted."""
        self._interruptible = True
        try:
            yield self.clock.event() if math.isinf(seconds) else self.clock.timeout(seconds)
        except simpy.Interrupt:
            return
        self._interruptible = False

    # Sampling

    def _sample(self, now: float) -> Events:
        """One step, or a run of steps with the same rows: to the first that ends or comes."""
        batch = self._rows.choose()
        adapters = len({row.adapter for row in batch.decoding})
        seconds = self._decode_seconds(len(batch.decoding), adapters) + self.curves.prefill_seconds(batch.prefill)
        for row in batch.starting:
            assert row.since is not None
            self.waits["rollout"].note(now - row.since)
        steps = self._steps(batch, seconds, now)
        if steps == 1:
            yield self.clock.timeout(seconds)
        else:
            yield from self._rest(steps * seconds)
            over = self.clock.now - now
            steps = min(steps, max(1, math.ceil(over / seconds - _ROUNDING)))
            if (rest := steps * seconds - over) > 0:
                yield self.clock.timeout(rest)
        self._owed = max(0, self._owed - steps)
        self.sampling_seconds += steps * seconds
        self.sampled_tokens += steps * (len(batch.decoding) + len(batch.starting))
        self.prefilled_tokens += batch.prefill
        if batch.decoding:
            self.steps += steps
            self.adapter_steps += steps * adapters
        for conversation in self._rows.advance(batch, steps):
            self._end_turn(conversation)

    def _steps(self, batch: Batch[Conversation], seconds: float, now: float) -> int:
        if not batch.steady:
            return 1
        steps = min(row.left for row in batch.decoding)
        if seconds == 0:
            return steps
        until = self._returns[0][0] if self._returns else math.inf
        if self._waiting or self._under_way:
            if self._owed:
                steps = min(steps, self._owed)
            else:
                until = min(until, self._deadline)
        if until < math.inf:
            steps = min(steps, max(1, math.ceil((until - now) / seconds - _ROUNDING)))
        return steps

    def _end_turn(self, conversation: Conversation) -> None:
        turn = conversation.turn
        conversation.turn += 1
        if conversation.turn == len(conversation.turns):
            self.conversations -= 1
            conversation.done()
            return
        conversation.pending, conversation.prompt = self.answer_tokens, None
        back = self.clock.now + conversation.waits[turn]
        heapq.heappush(self._returns, (back, next(self._numbers), conversation))

    # Training

    def _train(self) -> Events:
        """One pass over rows of all updates that are here, first come, first in."""
        for update in self._waiting:
            self.waits["update"].note(self.clock.now - update.since)
        self._under_way += self._waiting
        self._waiting = []
        tokens = _take_rows(self._under_way, self.limits.train_tokens)
        ended = [update for update in self._under_way if not update.rows]
        seconds = self.curves.train_seconds(tokens, len(ended))
        yield self.clock.timeout(seconds)
        self.training_seconds += seconds
        self._owed = self.limits.decode_between
        self._under_way = [update for update in self._under_way if update.rows]
        for update in ended:
            update.done.succeed()


def _take_rows(updates: list[Update], budget: int) -> int:
    """Takes rows out of the updates in order, up to `budget` tokens but at least one row. Returns the tokens."""
    used = 0
    for update in updates:
        taken = 0
        for row in update.rows:
            if used and used + row > budget:
                break
            used += row
            taken += 1
        update.rows = update.rows[taken:]
    return used
