"""One forward pass of the sampler: which tokens it computes, how they attend, and where logits are wanted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from marlaas.attention import (
    Block,
    DecodeAttention,
    ExtendAttention,
    KeyValueCache,
    KeyValues,
    PrefillAttention,
)
from marlaas.errors import MarlaasError
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.transformer import Attention

OnDone = Callable[[Sample | MarlaasError], None]


@dataclass(eq=False)
class Row:
    """A cache row: its adapter, how many tokens it holds, and their keys and values while it is out of the batch."""

    adapter: str | None
    index: int = -1
    length: int = 0
    parked: KeyValues | None = None


@dataclass(eq=False)
class Generation:
    """A request, waiting or in the batch. `rows[0]` is the expert's (or only) row, `rows[1]` the CoLD amateur's.

    content: the prompt and what has been sampled. reused: tokens of the prompt that were not computed again.
    """

    request: SamplingRequest
    on_done: OnDone
    rows: list[Row]
    content: list[int]
    logprobs: list[float] = field(default_factory=list)
    started: float | None = None
    device_seconds: float = 0.0
    reused: int = 0

    @property
    def tokens(self) -> list[int]:
        """What has been sampled."""
        return self.content[len(self.request.prompt) :]


class PassLayout:
    """Builds the flat batch of a pass, part by part; within a part, tokens are sorted by adapter.

    segments: (adapter, start, end) of the tokens. last: for each row the token that its logits come from. copies:
    rows that get a copy of another's keys and values, because their prompts are equal. sizes and prefilled: the
    tokens, and those of prompts, that each owner has in the pass.
    """

    def __init__(self, cache: KeyValueCache, device: torch.device) -> None:
        self._cache, self._device = cache, device
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[tuple[str | None, int, int]] = []
        self.parts: list[tuple[int, Attention]] = []
        self.last: dict[Row, int] = {}
        self.copies: list[tuple[Row, list[Row]]] = []
        self.sizes: Counter[str] = Counter()
        self.prefilled: Counter[str] = Counter()

    def decode(self, rows: Sequence[tuple[Row, Generation]]) -> None:
        """One token for each of the cache rows [0, len(rows))."""
        ordered = sorted(rows, key=lambda entry: (entry[0].adapter or "", entry[0].index))
        for row, item in ordered:
            self._add(row.adapter, item.content[row.length :], row.length)
            self.last[row] = len(self.tokens) - 1
            self.sizes[item.request.owner] += 1
        attend = DecodeAttention(self._cache, self._indices(ordered), self._lengths(ordered))
        self.parts.append((len(ordered), attend))

    def extend(self, rows: Sequence[tuple[Row, Generation]]) -> None:
        """Several tokens for rows that hold some."""
        ordered = sorted(rows, key=lambda entry: entry[0].adapter or "")
        new = [len(item.content) - row.length for row, item in ordered]
        for (row, item), count in zip(ordered, new, strict=True):
            self._add(row.adapter, item.content[row.length :], row.length, max(new) - count)
            self.last[row] = len(self.tokens) - 1 - (max(new) - count)
            self._count(item, count)
        lengths = self._lengths(ordered)
        attend = ExtendAttention(self._cache, self._indices(ordered), lengths, self._tensor(new))
        self.parts.append((len(ordered) * max(new), attend))

    def prefill(self, rows: Sequence[tuple[Row, Generation]]) -> None:
        """Whole sequences. Equal ones of one adapter are computed once."""
        sharers: dict[tuple[str | None, tuple[int, ...]], list[tuple[Row, Generation]]] = defaultdict(list)
        for row, item in rows:
            sharers[row.adapter, tuple(item.content)].append((row, item))
        by_adapter: dict[str | None, list[tuple[int, ...]]] = defaultdict(list)
        for adapter, content in sharers:
            by_adapter[adapter].append(content)
        start, cache_rows, blocks = len(self.tokens), [], []
        for adapter, contents in by_adapter.items():
            length = max(map(len, contents))
            for content in contents:
                pad, ((first, item), *others) = length - len(content), sharers[adapter, content]
                self._add(adapter, content, 0, pad)
                self._count(item, len(content))
                cache_rows += [first.index] * len(content) + [-1] * pad
                self.last |= {row: len(self.tokens) - 1 - pad for row, _ in sharers[adapter, content]}
                if others:
                    self.copies.append((first, [row for row, _ in others]))
            blocks.append(Block(len(contents), length))
        positions = self._tensor(self.positions[start:])
        attend = PrefillAttention(blocks, self._cache, self._tensor(cache_rows), positions)
        self.parts.append((len(self.tokens) - start, attend))

    def _count(self, item: Generation, tokens: int) -> None:
        self.sizes[item.request.owner] += tokens
        self.prefilled[item.request.owner] += tokens

    def _add(self, adapter: str | None, tokens: Sequence[int], position: int, pad: int = 0) -> None:
        start = len(self.tokens)
        self.tokens += [*tokens, *[0] * pad]
        self.positions += range(position, position + len(tokens) + pad)
        if self.segments and self.segments[-1][0] == adapter:
            self.segments[-1] = (adapter, self.segments[-1][1], len(self.tokens))
        else:
            self.segments.append((adapter, start, len(self.tokens)))

    def _indices(self, rows: Sequence[tuple[Row, Generation]]) -> torch.Tensor:
        return self._tensor([row.index for row, _ in rows])

    def _lengths(self, rows: Sequence[tuple[Row, Generation]]) -> torch.Tensor:
        return self._tensor([row.length for row, _ in rows])

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)
