"""The native sampler: continuous batching on the shared base model, every row under its own adapter or none.

Requests join and leave between steps, and every step is one forward pass: new prompts, conversations that come back
with more tokens, and one token for every running row. The rows that decode occupy cache rows [0, B); when one
leaves, the last row moves into its place, so their attention reads a plain prefix of the cache. A request that gives
up its place to a tenant with fewer takes its keys and values along, and goes on later where it was. Not thread-safe:
the pool's device thread owns it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch

from marlaas.attention import KeyValueCache, PartsAttention
from marlaas.errors import AdapterMissing, MarlaasError, RequestError
from marlaas.lora import LoraBatch, PagedAdapters, Segment
from marlaas.models import BaseModel
from marlaas.sampling.choice import choose_tokens
from marlaas.sampling.cpu_passes import FlatPass, cpu_passes
from marlaas.sampling.passes import Generation, OnDone, PassLayout, Row
from marlaas.sampling.prefixes import PrefixCache
from marlaas.sampling.protocol import Decoding, FinishReason, Sample, SamplingRequest
from marlaas.sampling.queue import FairQueue

PREFILL_TOKENS = 1024  # new tokens of one step, so that rows which decode do not wait long for others' prompts
_ROWS_OF_A_COLD_REQUEST = 2
_CALIBRATION = "calibration"
_CALIBRATION_RUNS = 3
_CALIBRATION_POSITION = 64
_ENOUGH_THROUGHPUT = 0.9  # of the best


@dataclass
class TokenCounts:
    """What an owner's requests have come to so far."""

    sampled: int = 0
    prefilled: int = 0
    reused: int = 0
    device_seconds: float = 0.0


class NativeSampler:
    """Serves SamplingRequests. `adapters` holds the versions that may be asked for."""

    def __init__(
        self,
        base: BaseModel,
        adapters: PagedAdapters,
        max_sequences: int,
        max_sequence_tokens: int,
        max_kept_tokens: int = 0,
    ) -> None:
        """The cache takes 2 * layers * kv_heads * head_dim * max_sequences * max_sequence_tokens elements.

        max_kept_tokens: of conversations that are out of the batch, whose keys and values are kept.
        """
        self.base = base
        self.adapters = adapters
        self.queue: FairQueue[Generation] = FairQueue(self._within_adapter_cap)
        self.adapter_caps: dict[str, int | None] = {}
        self.prefixes = PrefixCache(max_kept_tokens)
        self.counts: dict[str, TokenCounts] = defaultdict(TokenCounts)
        self.scheduling_seconds = 0.0
        self.shared_places = max_sequences
        t = base.transformer
        self._cache = KeyValueCache(t.geometry, max_sequences, max_sequence_tokens, t.dtype, t.device)
        self._running: list[Generation] = []
        self._rows: list[Row] = []
        self._users: Counter[str] = Counter()
        self._cpu = cpu_passes(t, self._cache, adapters)

    @torch.inference_mode()
    def calibrate(self) -> None:
        """Measures decoding steps of different sizes, and sets `shared_places` accordingly. Nothing may be queued.

        Where a step costs as much per row however full it is, places beyond some number only make everybody's passes
        longer, and whoever asks for most of them gets most of the device. So tenants who compete share the fewest
        places that give nearly all of the throughput; a tenant by itself has them all.
        """
        if self._cpu is not None:
            self._cpu.calibrate(self._calibration_position)
        sizes = [n for n in (2**k for k in range(16)) if n < self._cache.rows] + [self._cache.rows]
        rates = {size: size / self._decode_seconds(size) for size in sizes}
        enough = _ENOUGH_THROUGHPUT * max(rates.values())
        self.shared_places = min(size for size, rate in rates.items() if rate >= enough)

    @property
    def _calibration_position(self) -> int:
        return max(1, min(_CALIBRATION_POSITION, self._cache.tokens - 1 - _CALIBRATION_RUNS))

    def _decode_seconds(self, rows: int) -> float:
        """What a step takes that gives so many rows of the base their next token."""
        prompt, tokens = (0,) * self._calibration_position, _CALIBRATION_RUNS + 1
        for seed in range(rows):
            drawn = SamplingRequest(_CALIBRATION, prompt, None, Decoding.SAMPLE, tokens, frozenset(), seed=seed)
            self.submit(drawn, lambda outcome: None)
        seconds = []
        while self.busy:
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        self.queue.forget(_CALIBRATION)
        del self.counts[_CALIBRATION]
        self.scheduling_seconds = 0.0
        return min(seconds[1:])  # the first one is the prompt's

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running) or len(self.queue) > 0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def fill(self) -> float:
        """The share of the batch's places that are taken."""
        return len(self._rows) / max(1, self._cache.rows)

    def users(self, adapter: str) -> int:
        """Requests, waiting or running, that need the adapter."""
        return self._users[adapter]

    def submit(self, request: SamplingRequest, on_done: OnDone) -> None:
        """Queues a request; `on_done` is called from `step`. Raises RequestError at once if it cannot be served."""
        request.check(self.base.transformer.geometry.vocabulary, self._cache.tokens)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise AdapterMissing(f"{request.owner}: adapter {request.adapter} is not resident")
        if request.decoding == Decoding.COLD and self._cache.rows < _ROWS_OF_A_COLD_REQUEST:
            raise RequestError(f"{request.owner}: cold decoding needs pool.max_sequences of at least 2")
        rows = [Row(request.adapter)]
        if request.decoding == Decoding.COLD:
            rows.append(Row(None))
        if request.adapter is not None:
            self._users[request.adapter] += 1
        self.queue.put(request.owner, Generation(request, on_done, rows, list(request.prompt)))

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits and gives every request in the batch its next token, in one forward pass."""
        started = time.perf_counter()
        self._admit()
        if not self._running:
            return
        computing = time.perf_counter()
        self.scheduling_seconds += computing - started
        rows = [(row, item) for item in self._running for row in item.rows]
        layout, logits = self._flat_pass(rows) if self._goes_flat(rows) else self._pass(rows)
        self._extend(logits, computing, layout)

    def _goes_flat(self, rows: Sequence[tuple[Row, Generation]]) -> bool:
        """Whether the processor's kernels take the pass: all but prompts, which torch attends faster."""
        if self._cpu is None:
            return False
        return all(row.length for row, _ in rows) or sum(len(i.content) - r.length for r, i in rows) <= self._cpu.small

    def _flat_pass(self, rows: Sequence[tuple[Row, Generation]]) -> tuple[FlatPass, torch.Tensor]:
        assert self._cpu is not None
        layout = FlatPass.of(rows)
        logits = self._cpu.logits(layout, [row for row, _ in rows])
        for row, item in rows:
            row.length = len(item.content)
        return layout, logits

    def _pass(self, rows: Sequence[tuple[Row, Generation]]) -> tuple[PassLayout, torch.Tensor]:
        """Logits of the rows, in their order."""
        t, layout = self.base.transformer, self._layout()
        hidden = t.hidden_states(
            torch.tensor(layout.tokens, device=t.device),
            torch.tensor(layout.positions, device=t.device),
            PartsAttention(layout.parts),
            self._lora(layout.segments),
        )
        for row, item in rows:
            row.length = len(item.content)
        for source, others in layout.copies:
            self._cache.copy_row(source.index, [row.index for row in others], source.length)
        last = torch.tensor([layout.last[row] for row, _ in rows], device=t.device)
        return layout, t.logits(hidden[last])

    def cancel(self, unwanted: Callable[[SamplingRequest], bool], error: MarlaasError) -> None:
        """Drops the waiting and running requests that are unwanted; each gets the error."""
        running = [item for item in self._running if unwanted(item.request)]
        waiting = self.queue.remove(lambda item: unwanted(item.request))
        self._running = [item for item in self._running if not unwanted(item.request)]
        for item in running:
            self._leave(item)
        for item in waiting:
            self._forget(item)
        for item in [*running, *waiting]:
            item.on_done(error)

    def drop_adapter(self, name: str, error: MarlaasError) -> None:
        """Forgets an adapter version; requests that still name it get the error."""
        self.cancel(lambda request: request.adapter == name, error)
        self.prefixes.drop_adapter(name)
        self.adapters.remove(name)

    # Admission

    def _admit(self) -> None:
        """Gives places to those whose turn it is, and takes places from those who hold more than their share."""
        old = list(self._running)
        prompts: set[Hashable] = set()
        tokens = 0
        while tokens < PREFILL_TOKENS:
            item = self.queue.take(self._fits)
            if item is None:
                if self._preempt(old):
                    continue
                break
            self._running.append(item)
            self._enter(item)
            for row in item.rows:
                key = row if row.length else (row.adapter, item.request.prompt)
                tokens += 0 if key in prompts else len(item.content) - row.length
                prompts.add(key)

    @property
    def _places(self) -> int:
        """How many rows the batch may have now."""
        return self.shared_places if self.queue.competing else self._cache.rows

    def _fits(self, item: Generation) -> bool:
        if len(self._rows) + len(item.rows) > max(self._places, len(item.rows)):
            return False
        in_use = {row.adapter for row in self._rows if row.adapter is not None}
        return all(row.adapter is None or self.adapters.page_in(row.adapter, in_use) for row in item.rows)

    def _within_adapter_cap(self, item: Generation) -> bool:
        """Whether the item's adapter is in the batch already, or one more of its owner's may join."""
        cap, adapter = self.adapter_caps.get(item.request.owner), item.request.adapter
        if cap is None or adapter is None:
            return True
        mine = {row.adapter for row in self._rows if row.adapter and row.adapter.startswith(item.request.owner + "/")}
        return adapter in mine or len(mine) < cap

    def _preempt(self, candidates: list[Generation]) -> bool:
        """Takes one of the candidates out of the batch for a request whose owner has a smaller share of it.

        False: nobody has to go.
        """
        head = self.queue.head()
        if head is None or len(self._rows) + len(head.rows) <= self._places:
            return False
        victim = self.queue.victim(head.request.owner)
        mine = [item for item in candidates if item.request.owner == victim]
        if not mine:
            return False
        item = min(mine, key=lambda item: len(item.content))
        for row in item.rows:
            row.parked = self._cache.take_out(row.index, row.length)
        candidates.remove(item)
        self._running.remove(item)
        self._vacate(item)
        self.queue.put_back(item.request.owner, item)
        return True

    def _enter(self, item: Generation) -> None:
        """Gives the item's rows their places and what is kept of their keys and values."""
        request = item.request
        item.started = time.perf_counter() if item.started is None else item.started
        for row in item.rows:
            if row.parked is None and request.session is not None and not item.logprobs:
                row.parked = self.prefixes.take(request.session, row.adapter, item.content)
                if row is item.rows[0] and row.parked is not None:
                    item.reused = row.parked.length
                    self.counts[request.owner].reused += item.reused
            row.index = len(self._rows)
            self._rows.append(row)
            row.length = 0
            if row.parked is not None:
                self._cache.put_back(row.index, row.parked)
                row.length, row.parked = row.parked.length, None

    # The forward pass

    def _layout(self) -> PassLayout:
        """Rows that lack one token decode; rows that lack several and whole prompts come after them."""
        item_of = {row: item for item in self._running for row in item.rows}
        kinds: dict[str, list[tuple[Row, Generation]]] = {"decode": [], "extend": [], "prefill": []}
        for row in self._rows:
            missing = len(item_of[row].content) - row.length
            kinds["decode" if missing == 1 else "extend" if row.length else "prefill"].append((row, item_of[row]))
        self._place_first([row for row, _ in kinds["decode"]])
        layout = PassLayout(self._cache, self.base.transformer.device)
        for kind, rows in kinds.items():
            if rows:
                getattr(layout, kind)(rows)
        return layout

    def _place_first(self, decoding: Sequence[Row]) -> None:
        """Moves rows so that those which decode come first in the cache."""
        wrong, chosen = [row for row in decoding if row.index >= len(decoding)], set(decoding)
        holes = [row for row in self._rows[: len(decoding)] if row not in chosen]
        for row, hole in zip(wrong, holes, strict=True):
            held = self._cache.take_out(hole.index, hole.length)
            self._cache.copy_row(row.index, [hole.index], row.length)
            self._cache.put_back(row.index, held)
            row.index, hole.index = hole.index, row.index
            self._rows[row.index], self._rows[hole.index] = row, hole

    def _lora(self, segments: Iterable[tuple[str | None, int, int]]) -> LoraBatch:
        resident = [(self.adapters[a], start, end) for a, start, end in segments if a is not None]
        of_tokens = [Segment(start, end, r.layout, r.vector, slot=r.slot) for r, start, end in resident]
        return LoraBatch(of_tokens, self.adapters.weights_SP)

    # From logits to tokens

    def _extend(self, logits: torch.Tensor, began: float, layout: PassLayout | FlatPass) -> None:
        """Appends one token to each request of the batch and lets go of those that are finished."""
        items = self._running
        tokens, logprobs = choose_tokens([i.request for i in items], [len(i.logprobs) for i in items], logits)
        finished = []
        for item, token, logprob in zip(items, tokens, logprobs, strict=True):
            item.content.append(token)
            item.logprobs.append(logprob)
        self._charge(time.perf_counter() - began, layout)
        for item in items:
            outcome = self._outcome(item)
            if outcome is not None:
                finished.append((item, outcome))
        for item, _ in finished:
            self._keep(item)  # may want memory that is not there: then all are still in the batch
        if finished:
            gone = {item for item, _ in finished}
            self._running = [item for item in self._running if item not in gone]
        for item, sample in finished:
            self._leave(item)
            item.on_done(sample)

    def _charge(self, seconds: float, layout: PassLayout | FlatPass) -> None:
        """Divides a pass's time among its owners by their tokens, and an owner's among its requests."""
        total, in_batch = sum(layout.sizes.values()), Counter(item.request.owner for item in self._running)
        shares = {owner: seconds * layout.sizes[owner] / total for owner in in_batch}
        for owner, requests in in_batch.items():
            self.queue.charge(owner, shares[owner])
            counts = self.counts[owner]
            counts.device_seconds += shares[owner]
            counts.sampled += requests
            counts.prefilled += layout.prefilled[owner]
        for item in self._running:
            item.device_seconds += shares[item.request.owner] / in_batch[item.request.owner]

    def _outcome(self, item: Generation) -> Sample | None:
        request, reason, text = item.request, None, None
        if item.content[-1] in request.stop_ids:
            reason, text = FinishReason.STOP, self._text(item.tokens[:-1])
        elif request.stop:
            whole = self._text(item.tokens)
            cuts = [at for stop in request.stop if (at := whole.find(stop)) >= 0]
            if cuts:
                reason, text = FinishReason.STOP, whole[: min(cuts)]
        if reason is None and len(item.logprobs) >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return None
        text = self._text(item.tokens) if text is None else text
        return Sample(
            item.tokens,
            item.logprobs,
            reason,
            text,
            request.adapter,
            time.perf_counter() - (item.started or 0.0),
            item.device_seconds,
            item.reused,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return self.base.tokenizer.decode(tokens, skip_special_tokens=True)

    # Leaving

    def _keep(self, item: Generation) -> None:
        """Keeps the item's keys and values for the conversation's next turn. Its last token has none yet."""
        session = item.request.session
        if session is not None and self.prefixes.max_tokens:
            for row in item.rows:
                kept = self._cache.take_out(row.index, row.length)
                self.prefixes.keep(session, row.adapter, item.content[: row.length], kept)

    def _leave(self, item: Generation) -> None:
        self._vacate(item)
        self.queue.leave(item.request.owner)
        self._forget(item)

    def _vacate(self, item: Generation) -> None:
        """Frees the item's rows; the last row of the cache moves into each."""
        for row in item.rows:
            moved = self._rows.pop()
            if moved is not row:
                self._cache.copy_row(moved.index, [row.index], moved.length)
                moved.index = row.index
                self._rows[row.index] = moved

    def _forget(self, item: Generation) -> None:
        adapter = item.request.adapter
        if adapter is not None:
            self._users[adapter] -= 1
            if self._users[adapter] == 0:
                del self._users[adapter]
