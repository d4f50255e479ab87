"""Passes on a processor, through the kernels that Numba compiles: all of a pass up to a size that is measured, and
larger ones but for the matrix products."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from threading import Barrier
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from marlaas.attention import KeyValueCache
from marlaas.cpu_kernels import as_array, runs_here
from marlaas.lora import AdapterShape, PagedAdapters
from marlaas.sampling.passes import Generation, Row
from marlaas.transformer import Decoder, Transformer

_SMALL = 8  # tokens, unless measured
_SIZES = tuple(2**k for k in range(9))
_RUNS = 3
_LEAST_OF_A_THREAD = 8  # tokens


@dataclass
class FlatPass:
    """The batch of a pass: each row's missing tokens, rows sorted by adapter, nothing padded.

    tokens, positions, rows: int64 `[T]`; last: for each row the token that its logits come from. segments: adapter,
    start and end. sizes and prefilled: the tokens, and those of prompts, that each owner has in the pass.
    """

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    last: dict[Row, int]
    segments: list[tuple[str, int, int]] = field(default_factory=list)
    sizes: Counter[str] = field(default_factory=Counter)
    prefilled: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, rows: Sequence[tuple[Row, Generation]]) -> FlatPass:
        """The pass that gives every row its next token."""
        tokens: list[int] = []
        positions: list[int] = []
        cache_rows: list[int] = []
        one = cls(np.empty(0), np.empty(0), np.empty(0), {})
        for row, item in sorted(rows, key=lambda entry: entry[0].adapter or ""):
            start, new = len(tokens), item.content[row.length :]
            tokens += new
            positions += range(row.length, len(item.content))
            cache_rows += [row.index] * len(new)
            one.last[row] = len(tokens) - 1
            if row.adapter is not None:
                if one.segments and one.segments[-1][0] == row.adapter:
                    start = one.segments.pop()[1]
                one.segments.append((row.adapter, start, len(tokens)))
            one.sizes[item.request.owner] += len(new)
            one.prefilled[item.request.owner] += len(new) if len(new) > 1 else 0
        one.tokens, one.positions, one.rows = (np.array(a, dtype=np.int64) for a in (tokens, positions, cache_rows))
        return one

    @classmethod
    def decoding(cls, count: int, position: int) -> FlatPass:
        """A pass of one token for each of the first rows of the cache, all at one position, without adapters."""
        tokens = np.zeros(count, dtype=np.int64)
        rows = {Row(None): index for index in range(count)}
        return cls(tokens, np.full(count, position, dtype=np.int64), np.arange(count, dtype=np.int64), rows)

    def split(self, most: int) -> Iterator[FlatPass]:
        """At most so many passes, one after another, of about as many tokens each; a row's tokens stay together."""
        size = len(self.tokens)
        parts = max(1, min(most, size // _LEAST_OF_A_THREAD))
        ends = np.array(sorted(self.last.values())) + 1
        cuts = {0, size, *(int(ends[np.abs(ends - size * i / parts).argmin()]) for i in range(1, parts))}
        for start, end in pairwise(sorted(cuts)):
            window = slice(start, end)
            yield FlatPass(
                self.tokens[window],
                self.positions[window],
                self.rows[window],
                {row: token - start for row, token in self.last.items() if start <= token < end},
                [(a, max(s, start) - start, min(e, end) - start) for a, s, e in self.segments if s < end and e > start],
            )


class CpuPasses:
    """The base model as the kernel takes it. Nothing is copied: it reads the weights where they are."""

    def __init__(self, transformer: Transformer, cache: KeyValueCache, adapters: PagedAdapters) -> None:
        from marlaas_kernels.cpu import blocks, lora, model, step

        self.small = _SMALL  # tokens; from there on torch's products are faster than the kernel's
        t, g = transformer, transformer.geometry
        self._blocks, self._model, self._step, self._parts = blocks, model, step, lora.PARTS
        self._transformer, self._adapters = t, adapters
        norms = [(layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm) for layer in t.layers]
        self._weights = model.Weights(
            linears_LS=_addresses([site.weight for site in layer.sites] for layer in t.layers),
            biases_LS=_addresses([site.bias for site in layer.sites] for layer in t.layers),
            norms_LN=_addresses(norms),
            embedding_VH=as_array(t.embedding),
            head_VH=as_array(t.head),
            final_norm_H=as_array(t.final_norm),
            inverse_frequency_F=t.inverse_frequency.numpy(),
            rope_scale=np.float32(t.rope_scale),
            epsilon=np.float32(t.rms_epsilon),
            heads=g.heads,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            intermediate=t.layers[0].down.inputs,
            like=as_array(t.embedding[:0, 0]),
        )
        self._threads: ThreadPoolExecutor | None = None
        self._keys, self._values = as_array(cache.keys), as_array(cache.values)
        self._tables: dict[AdapterShape, np.ndarray] = {}
        self._stacked = lru_cache(maxsize=64)(self._stack)

    def calibrate(self, position: int) -> None:
        """Measures up to which size a pass is faster with all layers in one call (for each of torch's threads)."""
        rows = self._keys.shape[1]
        self.small = 0
        for size in (size for size in _SIZES if size <= rows):
            what = FlatPass.decoding(size, position)
            if min(self._seconds(what, whole=True) for _ in range(_RUNS)) > min(
                self._seconds(what, whole=False) for _ in range(_RUNS)
            ):
                break
            self.small = size

    def _seconds(self, what: FlatPass, whole: bool) -> float:
        started = time.perf_counter()
        self._logits(what, list(what.last), whole)
        return time.perf_counter() - started

    def logits(self, what: FlatPass, rows: Sequence[Row]) -> torch.Tensor:
        """`[rows, V]` of the rows' last tokens; the cache gets the keys and values of all."""
        return self._logits(what, rows, len(what.tokens) <= self.small)

    def _logits(self, what: FlatPass, rows: Sequence[Row], whole: bool) -> torch.Tensor:
        parts = list(what.split(torch.get_num_threads()))
        if not whole:
            last = torch.tensor([what.last[row] for row in rows])
            return self._transformer.logits(torch.cat(self._by_threads(self._hidden_states, parts))[last])
        found = self._by_threads(partial(self._forward, rows=rows), parts)
        if len(parts) == 1:
            return found[0]
        logits = torch.empty(len(rows), found[0].shape[1])
        for part, of_part in zip(parts, found, strict=True):
            logits[[place for place, row in enumerate(rows) if row in part.last]] = of_part
        return logits

    def _by_threads(
        self, compute: Callable[[FlatPass, Any], torch.Tensor], parts: Sequence[FlatPass]
    ) -> list[torch.Tensor]:
        """What is computed of each part; each of torch's threads takes one's rows through all layers."""
        with_lora = [(part, self._lora(part.segments)) for part in parts]
        if len(parts) == 1:
            return [compute(*with_lora[0])]
        if self._threads is None:
            self._threads = _threads_of_their_own(torch.get_num_threads())
        return list(self._threads.map(lambda part: compute(*part), with_lora))

    def _forward(self, what: FlatPass, lora: Any, rows: Sequence[Row]) -> torch.Tensor:
        """Logits `[N, V]`, fp32, of those of the rows that are in the part, in their order."""
        last = np.array([what.last[row] for row in rows if row in what.last], dtype=np.int64)
        batch = what.tokens, what.positions, what.rows, last
        return torch.from_numpy(self._step.forward(self._weights, lora, self._keys, self._values, *batch))

    @torch.inference_mode()
    def _hidden_states(self, what: FlatPass, lora: Any) -> torch.Tensor:
        """Final hidden states `[T, hidden]`, torch's products and our blocks in turns."""
        t, g, weights = self._transformer, self._transformer.geometry, self._weights
        tokens, wide = len(what.tokens), weights.intermediate
        hidden = np.empty((tokens, g.hidden), dtype=np.float32)
        cos, sin = (np.empty((tokens, g.head_dim // 2), dtype=np.float32) for _ in range(2))
        x, attended, active = (
            torch.empty(tokens, size, dtype=t.dtype) for size in (g.hidden, g.heads * g.head_dim, wide)
        )
        x_, attended_, active_ = as_array(x), as_array(attended), as_array(active)
        self._blocks.begin(weights, what.tokens, what.positions, hidden, cos, sin, x_)
        for index, layer in enumerate(t.layers):
            qkv = as_array(F.linear(x, layer.qkv.weight, layer.qkv.bias))
            self._blocks.attention(
                weights,
                lora,
                index,
                x_,
                qkv,
                self._keys,
                self._values,
                what.positions,
                what.rows,
                cos,
                sin,
                attended_,
            )
            out = as_array(F.linear(attended, layer.output.weight, layer.output.bias))
            self._blocks.after_attention(weights, lora, index, attended_, out, hidden, x_)
            gate_up = as_array(F.linear(x, layer.gate_up.weight, layer.gate_up.bias))
            self._blocks.activation(weights, lora, index, x_, gate_up, active_)
            down = as_array(F.linear(active, layer.down.weight, layer.down.bias))
            self._blocks.after_mlp(weights, lora, index, active_, down, hidden, x_)
        return x

    def _lora(self, segments: Sequence[tuple[str, int, int]]) -> Any:
        residents = [self._adapters[name] for name, _, _ in segments]
        shapes = tuple(dict.fromkeys(r.layout.shape for r in residents))
        for r in residents:
            if r.layout.shape not in self._tables:
                self._tables[r.layout.shape] = r.layout.table
        numbers = np.zeros((len(segments), 5), dtype=np.int64)
        for i, (r, (_, start, end)) in enumerate(zip(residents, segments, strict=True)):
            numbers[i] = start, end, r.vector.data_ptr(), r.layout.shape.rank, shapes.index(r.layout.shape)
        scale = np.array([r.layout.scale for r in residents], dtype=np.float32)
        return self._model.Adapters(numbers, scale, *self._stacked(shapes))

    def _stack(self, shapes: tuple[AdapterShape, ...]) -> tuple[np.ndarray, int]:
        if not shapes:
            return np.zeros((0, len(self._transformer.layers), 4, 8), dtype=np.int64), 0
        widest = max(shape.rank for shape in shapes) * self._parts
        return np.stack([self._tables[shape] for shape in shapes]), widest


def cpu_passes(decoder: Decoder, cache: KeyValueCache, adapters: PagedAdapters) -> CpuPasses | None:
    """None where the kernels do not run."""
    if not isinstance(decoder, Transformer) or not runs_here(decoder.device, decoder.dtype):
        return None
    return CpuPasses(decoder, cache, adapters)


def _threads_of_their_own(count: int) -> ThreadPoolExecutor:
    """Threads in which torch computes with one thread each."""
    together = Barrier(count)
    threads = ThreadPoolExecutor(
        count, thread_name_prefix="marlaas-pass", initializer=torch.set_num_threads, initargs=(1,)
    )
    list(threads.map(lambda _: together.wait(), range(count)))
    torch.set_num_threads(count)  # what threads to come have is the last number that any thread set
    return threads


def _addresses(layers: Any) -> np.ndarray:
    return np.array([[0 if t is None else t.data_ptr() for t in layer] for layer in layers], dtype=np.int64)
