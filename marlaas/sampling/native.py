"""The native sampler: continuous batching on the shared base model, every row under its own adapter or none.

Requests join and leave between steps. The running rows occupy cache rows [0, B); when one leaves, the last row
moves into its place, so attention always reads a plain prefix of the cache. Not thread-safe: the pool's device
thread owns it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from marlaas.attention import Block, DecodeAttention, KeyValueCache, PrefillAttention
from marlaas.errors import MarlaasError, RequestError
from marlaas.lora import AdapterBank, LoraBatch, Segment
from marlaas.models import BaseModel
from marlaas.sampling.cold import cold_logits
from marlaas.sampling.distribution import adjusted_logits, draw, uniforms
from marlaas.sampling.protocol import Decoding, FinishReason, Sample, SamplingRequest
from marlaas.sampling.queue import FairQueue

PREFILL_TOKENS = 4096
_ROWS_OF_A_COLD_REQUEST = 2

OnDone = Callable[[Sample | MarlaasError], None]


@dataclass
class _Row:
    """A cache row: the adapter it runs under, and the tokens that its cache holds or is about to."""

    adapter: str | None
    index: int = -1


@dataclass
class _Running:
    """A request in the batch. `rows[0]` is the expert's (or only) row, `rows[1]` the CoLD amateur's."""

    request: SamplingRequest
    on_done: OnDone
    rows: list[_Row]
    started: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Where the last token goes in the cache."""
        return len(self.request.prompt) + len(self.tokens) - 1


class NativeSampler:
    """Serves SamplingRequests. `adapters` holds the versions that may be asked for, in the model's dtype."""

    def __init__(self, base: BaseModel, adapters: AdapterBank, max_sequences: int, max_sequence_tokens: int) -> None:
        """The cache takes 2 * layers * kv_heads * head_dim * max_sequences * max_sequence_tokens elements."""
        self.base = base
        self.adapters = adapters
        self.queue: FairQueue[_Running] = FairQueue()
        t = base.transformer
        self._cache = KeyValueCache(t.geometry, max_sequences, max_sequence_tokens, t.dtype, t.device)
        self._running: list[_Running] = []
        self._rows: list[_Row] = []
        self._users: dict[str, int] = defaultdict(int)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running) or len(self.queue) > 0

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def users(self, adapter: str) -> int:
        """Requests, waiting or running, that need the adapter."""
        return self._users.get(adapter, 0)

    def submit(self, request: SamplingRequest, on_done: OnDone) -> None:
        """Queues a request; `on_done` is called from `step`. Raises RequestError at once if it cannot be served."""
        request.check(self.base.transformer.geometry.vocabulary, self._cache.tokens)
        if request.adapter is not None and request.adapter not in self.adapters:
            raise RequestError(f"{request.owner}: adapter {request.adapter} is not resident")
        if request.decoding == Decoding.COLD and self._cache.rows < _ROWS_OF_A_COLD_REQUEST:
            raise RequestError(f"{request.owner}: cold decoding needs pool.max_sequences of at least 2")
        rows = [_Row(request.adapter)]
        if request.decoding == Decoding.COLD:
            rows.append(_Row(None))
        if request.adapter is not None:
            self._users[request.adapter] += 1
        self.queue.put(request.owner, _Running(request, on_done, rows), _expected_cost(request))

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits, prefills it, and decodes one token for every running request."""
        admitted = self._admit()
        if admitted:
            logits = self._prefill(admitted)
            self._running.extend(admitted)
            self._extend(admitted, logits)
        if self._running:
            self._extend(self._running, self._decode())

    def cancel(self, unwanted: Callable[[SamplingRequest], bool], error: MarlaasError) -> None:
        """Drops the waiting and running requests that are unwanted; each gets the error."""
        running = [item for item in self._running if unwanted(item.request)]
        waiting = self.queue.remove(lambda item: unwanted(item.request))
        self._running = [item for item in self._running if not unwanted(item.request)]
        for item in running:
            self._leave(item)
        for item in waiting:
            self._release_adapter(item)
        for item in [*running, *waiting]:
            item.on_done(error)

    # Admission

    def _admit(self) -> list[_Running]:
        admitted: list[_Running] = []
        prompts, tokens, now = set(), 0, time.perf_counter()
        while tokens < PREFILL_TOKENS and (item := self.queue.take(self._fits)) is not None:
            item.started = now
            for row in item.rows:
                row.index = len(self._rows)
                self._rows.append(row)
                key = (row.adapter, item.request.prompt)
                tokens += 0 if key in prompts else len(item.request.prompt)
                prompts.add(key)
            admitted.append(item)
        return admitted

    def _fits(self, item: _Running) -> bool:
        return len(self._rows) + len(item.rows) <= self._cache.rows

    # Forward passes. Both return logits [rows, vocabulary] in the order of the cache rows asked for.

    def _prefill(self, admitted: Sequence[_Running]) -> torch.Tensor:
        """Logits after the prompt for each row of `admitted`, in order. Equal prompts of one adapter run once."""
        rows = [(row, item.request.prompt) for item in admitted for row in item.rows]
        sharers: dict[tuple[str | None, tuple[int, ...]], list[int]] = defaultdict(list)
        for row, prompt in rows:
            sharers[row.adapter, prompt].append(row.index)
        by_adapter: dict[str | None, list[tuple[int, ...]]] = defaultdict(list)
        for adapter, prompt in sharers:
            by_adapter[adapter].append(prompt)

        tokens: list[int] = []
        positions: list[int] = []
        cache_rows: list[int] = []
        last: dict[tuple[str | None, tuple[int, ...]], int] = {}
        blocks: list[Block] = []
        segments: list[tuple[str | None, int, int]] = []
        for adapter, prompts in by_adapter.items():
            length, start = max(map(len, prompts)), len(tokens)
            for prompt in prompts:
                pad = length - len(prompt)
                last[adapter, prompt] = len(tokens) + len(prompt) - 1
                tokens += [*prompt, *[0] * pad]
                positions += range(length)
                cache_rows += [sharers[adapter, prompt][0]] * len(prompt) + [-1] * pad
            blocks.append(Block(len(prompts), length))
            segments.append((adapter, start, len(tokens)))

        device = self.base.transformer.device
        positions_T = torch.tensor(positions, device=device)
        attend = PrefillAttention(blocks, self._cache, torch.tensor(cache_rows, device=device), positions_T)
        hidden = self.base.transformer.hidden_states(
            torch.tensor(tokens, device=device), positions_T, attend, self._lora(segments)
        )
        for (_, prompt), (source, *others) in sharers.items():
            if others:
                self._cache.copy_row(source, others, len(prompt))
        unique = {key: i for i, key in enumerate(sharers)}
        at = torch.tensor([last[key] for key in sharers], device=device)
        logits = self.base.transformer.logits(hidden[at])
        return logits[torch.tensor([unique[row.adapter, prompt] for row, prompt in rows], device=device)]

    def _decode(self) -> torch.Tensor:
        """Logits after the last token for each row of the running requests, in order."""
        rows = [(row, item) for item in self._running for row in item.rows]
        order = sorted(range(len(rows)), key=lambda i: (rows[i][0].adapter or "", i))
        device = self.base.transformer.device
        tokens = torch.tensor([rows[i][1].tokens[-1] for i in order], device=device)
        positions = torch.tensor([rows[i][1].position for i in order], device=device)
        cache_rows = torch.tensor([rows[i][0].index for i in order], device=device)
        segments: list[tuple[str | None, int, int]] = []
        for at, i in enumerate(order):
            adapter = rows[i][0].adapter
            if segments and segments[-1][0] == adapter:
                segments[-1] = (adapter, segments[-1][1], at + 1)
            else:
                segments.append((adapter, at, at + 1))
        attend = DecodeAttention(self._cache, cache_rows, positions)
        hidden = self.base.transformer.hidden_states(tokens, positions, attend, self._lora(segments))
        inverse = torch.empty(len(order), dtype=torch.long)
        inverse[torch.tensor(order)] = torch.arange(len(order))
        return self.base.transformer.logits(hidden[inverse.to(device)])

    def _lora(self, segments: Iterable[tuple[str | None, int, int]]) -> LoraBatch:
        resident = [(self.adapters[a], start, end) for a, start, end in segments if a is not None]
        return LoraBatch([Segment(start, end, r.layout, r.vector) for r, start, end in resident])

    # From logits to tokens

    def _extend(self, items: Sequence[_Running], logits: torch.Tensor) -> None:
        """Appends one token to each item and lets go of those that are finished."""
        tokens, logprobs = choose_tokens([item.request for item in items], [len(item.tokens) for item in items], logits)
        finished = []
        for item, token, logprob in zip(items, tokens, logprobs, strict=True):
            item.tokens.append(token)
            item.logprobs.append(logprob)
            outcome = self._outcome(item)
            if outcome is not None:
                finished.append((item, outcome))
        if finished:
            gone = {id(item) for item, _ in finished}
            self._running = [item for item in self._running if id(item) not in gone]
        for item, sample in finished:
            self._leave(item)
            item.on_done(sample)

    def _outcome(self, item: _Running) -> Sample | None:
        request, reason, text = item.request, None, None
        if item.tokens[-1] in request.stop_ids:
            reason, text = FinishReason.STOP, self._text(item.tokens[:-1])
        elif request.stop:
            whole = self._text(item.tokens)
            cuts = [at for stop in request.stop if (at := whole.find(stop)) >= 0]
            if cuts:
                reason, text = FinishReason.STOP, whole[: min(cuts)]
        if reason is None and len(item.tokens) >= request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return None
        if text is None:
            text = self._text(item.tokens)
        seconds = time.perf_counter() - item.started
        return Sample(item.tokens, item.logprobs, reason, text, request.adapter, seconds)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.base.tokenizer.decode(tokens, skip_special_tokens=True)

    def _leave(self, item: _Running) -> None:
        """Frees the item's rows; the last row of the cache moves into each."""
        for row in item.rows:
            moved = self._rows.pop()
            if moved is not row:
                self._cache.copy_row(moved.index, [row.index], self._cache.tokens)
                moved.index = row.index
                self._rows[row.index] = moved
        self._release_adapter(item)
        request = item.request
        self.queue.settle(request.owner, _expected_cost(request), len(request.prompt) + len(item.tokens))

    def _release_adapter(self, item: _Running) -> None:
        adapter = item.request.adapter
        if adapter is not None:
            self._users[adapter] -= 1
            if self._users[adapter] == 0:
                del self._users[adapter]


def _expected_cost(request: SamplingRequest) -> int:
    return len(request.prompt) + request.max_tokens


def choose_tokens(
    requests: Sequence[SamplingRequest], positions: Sequence[int], logits: torch.Tensor
) -> tuple[list[int], list[float]]:
    """The next token of each request and its log-prob.

    logits: `[rows, V]`, the rows of each request in order (two for CoLD: expert, amateur); positions: how many
    tokens each request has sampled so far.
    """
    starts = np.cumsum([0, *(2 if r.decoding == Decoding.COLD else 1 for r in requests)])
    tokens = np.zeros(len(requests), dtype=np.int64)
    logprobs = np.zeros(len(requests))
    for decoding in Decoding:
        which = [i for i, r in enumerate(requests) if r.decoding == decoding]
        if not which:
            continue
        at = torch.as_tensor(starts[which], device=logits.device)
        chosen = [requests[i] for i in which]
        if decoding == Decoding.SAMPLE:
            token_N, logprob_N = _sample(chosen, [positions[i] for i in which], logits[at])
        else:
            scores = logits[at].float()
            if decoding == Decoding.COLD:
                scores = cold_logits(
                    scores, logits[at + 1], _column(chosen, "alpha", logits), _column(chosen, "beta", logits)
                )
            token_N = scores.argmax(dim=-1)
            logprob_N = scores.gather(1, token_N[:, None]).squeeze(1) - torch.logsumexp(scores, dim=-1)
        tokens[which] = token_N.cpu().numpy()
        logprobs[which] = logprob_N.cpu().numpy()
    return tokens.tolist(), logprobs.tolist()


def _sample(
    requests: Sequence[SamplingRequest], positions: Sequence[int], logits_NV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    top_k = torch.tensor([r.top_k for r in requests], device=logits_NV.device)
    adjusted = adjusted_logits(
        logits_NV, _column(requests, "temperature", logits_NV), top_k, _column(requests, "top_p", logits_NV)
    )
    u = uniforms(np.array([r.seed for r in requests]), np.array(positions))
    return draw(adjusted, torch.as_tensor(u, device=logits_NV.device))


def _column(requests: Sequence[SamplingRequest], name: str, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([getattr(r, name) for r in requests], dtype=torch.float32, device=like.device)
