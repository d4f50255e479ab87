"""Which rows a sampling step runs: all if they fit, else a fair choice among tenants, token by token."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Protocol, TypeVar


class RowLike(Protocol):
    """left: tokens still to sample in this turn. pending: new tokens to compute before the first of them.

    prompt: rows with the same one that start in one step compute it once; None: the pending tokens are the row's own.
    """

    tenant: int
    weight: float
    left: int
    pending: int
    prompt: Hashable | None


R = TypeVar("R", bound=RowLike)


@dataclass(frozen=True, slots=True)
class Batch(Generic[R]):
    """A step's rows. starting: those whose pending tokens are computed in it, `prefill` in all. whole: nobody waits."""

    decoding: list[R]
    starting: list[R]
    prefill: int
    whole: bool

    @property
    def steady(self) -> bool:
        """Whether the next step has the same rows, as long as none of them ends and nobody comes."""
        return self.whole and not self.starting


@dataclass(slots=True)
class _Flow(Generic[R]):
    """A tenant's rows here. tag: its next token's start in virtual time, while there are more rows than places."""

    weight: float
    tag: float = 0.0
    decoding: list[R] = field(default_factory=list)
    fresh: deque[R] = field(default_factory=deque)


class FairRows(Generic[R]):
    """The rows of one device, dealt by start-time fair queueing (Goyal, Vin, Cheng 1996).

    A tenant's token starts, in virtual time, where its previous one ended; a token takes 1 / weight. Each step runs the
    tokens that start first. A tenant that comes starts level with the others. A step that runs everybody's rows leaves
    no debts. Of a tenant's own rows those that decode already go first, the oldest before the others.
    """

    def __init__(self, max_rows: int, max_prefill: int, by_tenant: bool = False) -> None:
        """max_prefill: new tokens of a step; the row that exceeds it is the last to start.

        by_tenant: a tenant whose turn it is gets as many rows as it has, so that fewer adapters are in a step.
        """
        self._max_rows, self._max_prefill, self._by_tenant = max_rows, max_prefill, by_tenant
        self._flows: dict[int, _Flow[R]] = {}
        self._left_at: dict[int, float] = {}  # tags of tenants that went while there was contention
        # While there is contention each tenant is in one of these, by tag: those with rows that decode, those without.
        self._decoding: list[tuple[float, int]] = []
        self._fresh: list[tuple[float, int]] = []
        self._contended = False
        self._virtual = 0.0  # where the first token of the last fair choice started
        self._count = self._fresh_count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: R) -> None:
        """A row whose turn begins."""
        flow = self._flows.get(row.tenant)
        if flow is None:
            flow = self._flows[row.tenant] = _Flow(row.weight)
            if self._contended:
                flow.tag = max(self._left_at.pop(row.tenant, 0.0), self._virtual)
                heapq.heappush(self._fresh, (flow.tag, row.tenant))
        flow.fresh.append(row)
        self._count += 1
        self._fresh_count += 1

    def choose(self) -> Batch[R]:
        """The rows of the next step; `advance` must follow."""
        everything = self._everything() if self._count <= self._max_rows else None
        if everything is not None:
            self._settle()
            return everything
        self._contend()
        return self._fair_choice()

    def advance(self, batch: Batch[R], steps: int) -> list[R]:
        """Counts the steps' tokens; returns the rows whose turn ended, which have left. steps: 1 unless steady."""
        for row in batch.starting:
            row.pending = 0
            flow = self._flows[row.tenant]
            flow.fresh.remove(row)
            flow.decoding.append(row)
        self._fresh_count -= len(batch.starting)
        ended = []
        for row in chain(batch.decoding, batch.starting):
            row.left -= steps
            if row.left == 0:
                ended.append(row)
        for tenant in {row.tenant for row in ended}:
            flow = self._flows[tenant]
            flow.decoding = [row for row in flow.decoding if row.left]
        self._count -= len(ended)
        self._return({row.tenant for row in (chain(batch.decoding, batch.starting) if self._contended else ended)})
        return ended

    def _everything(self) -> Batch[R] | None:
        """All rows, or None if their pending tokens are too many for one step."""
        starting = [row for flow in self._flows.values() for row in flow.fresh] if self._fresh_count else []
        prefill = _prefill(starting)
        if prefill > self._max_prefill and len(starting) > 1:
            return None
        return Batch([row for flow in self._flows.values() for row in flow.decoding], starting, prefill, True)

    def _fair_choice(self) -> Batch[R]:
        batch: Batch[R] = Batch([], [], 0, False)
        prefill, prompts = 0, set()
        turn: list[tuple[float, int]] = []  # tenants that have rows in this step and may get more
        taken: dict[int, int] = {}
        rows = 0
        while rows < self._max_rows:
            may_start = prefill < self._max_prefill
            queues = [q for q in ((self._decoding, self._fresh, turn) if may_start else (self._decoding, turn)) if q]
            if not queues:
                break
            tag, tenant = heapq.heappop(min(queues))
            if not rows:
                self._virtual = tag
            flow, got = self._flows[tenant], taken.get(tenant, 0)
            for _ in range(self._max_rows - rows if self._by_tenant else 1):
                if got < len(flow.decoding):
                    batch.decoding.append(flow.decoding[got])
                elif got - len(flow.decoding) < len(flow.fresh) and prefill < self._max_prefill:
                    row = flow.fresh[got - len(flow.decoding)]
                    if row.prompt is None or row.prompt not in prompts:
                        prefill += row.pending
                        prompts.add(row.prompt)
                    batch.starting.append(row)
                else:
                    break
                got += 1
                rows += 1
                flow.tag += 1 / flow.weight
            if got > taken.get(tenant, 0):
                heapq.heappush(turn, (flow.tag, tenant))
            taken[tenant] = got
        return Batch(batch.decoding, batch.starting, prefill, False)

    def _return(self, tenants: Iterable[int]) -> None:
        """Puts tenants that were in a step back into their queues, or lets them go."""
        for tenant in tenants:
            flow = self._flows[tenant]
            if not flow.decoding and not flow.fresh:
                del self._flows[tenant]
                if self._contended:
                    self._left_at[tenant] = flow.tag
            elif self._contended:
                heapq.heappush(self._decoding if flow.decoding else self._fresh, (flow.tag, tenant))

    def _contend(self) -> None:
        if not self._contended:
            self._contended = True
            self._decoding = [(0.0, tenant) for tenant, flow in self._flows.items() if flow.decoding]
            self._fresh = [(0.0, tenant) for tenant, flow in self._flows.items() if not flow.decoding]
            heapq.heapify(self._decoding)
            heapq.heapify(self._fresh)

    def _settle(self) -> None:
        if self._contended:
            self._contended, self._virtual = False, 0.0
            self._left_at.clear()
            for flow in self._flows.values():
                flow.tag = 0.0


def _prefill(starting: Iterable[RowLike]) -> int:
    own, shared = 0, {}
    for row in starting:
        if row.prompt is None:
            own += row.pending
        else:
            shared[row.prompt] = row.pending
    return own + sum(shared.values())
