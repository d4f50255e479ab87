"""How tokens attend: in blocks of equal-length rows (prefill, training) and against the key/value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from marlaas.transformer import Attention, Geometry


@dataclass(frozen=True)
class Block:
    """`rows` sequences padded to `length` tokens, one after another in the flat batch.

    mask: additive, `[rows, 1, length, length]` in the model's dtype; None is plain causal.
    """

    rows: int
    length: int
    mask: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.length


class BlockAttention:
    """Attention inside each row of each block. Blocks never see each other."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks

    def __call__(
        self, layer: int, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor
    ) -> torch.Tensor:
        sizes = [b.tokens for b in self.blocks]
        parts = zip(self.blocks, query_THD.split(sizes), key_TKD.split(sizes), value_TKD.split(sizes), strict=True)
        return torch.cat([_attend_block(b, q, k, v) for b, q, k, v in parts])


def _attend_block(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.unflatten(0, (block.rows, block.length)).transpose(1, 2) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, is_causal=block.mask is None, enable_gqa=True)
    return out.transpose(1, 2).reshape(block.tokens, -1)


@dataclass(frozen=True)
class KeyValues:
    """The keys and values of one sequence, taken out of the cache: `[layers, kv_heads, tokens, head_dim]` each."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]


class KeyValueCache:
    """Preallocated keys and values, `[layers, rows, kv_heads, tokens, head_dim]` each."""

    def __init__(self, geometry: Geometry, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        g = geometry
        shape = (g.layers, rows, g.kv_heads, tokens, g.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def tokens(self) -> int:
        return self.keys.shape[3]

    def write(
        self,
        layer: int,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Stores `[T, kv_heads, head_dim]` keys and values at (row, position)."""
        self.keys[layer][rows_T, :, positions_T] = key
        self.values[layer][rows_T, :, positions_T] = value

    def copy_row(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies the first `length` tokens of one row to others, in all layers."""
        to = list(targets)
        self.keys[:, to, :, :length] = self.keys[:, source : source + 1, :, :length]
        self.values[:, to, :, :length] = self.values[:, source : source + 1, :, :length]

    def take_out(self, row: int, length: int) -> KeyValues:
        """A copy of the first `length` tokens of a row."""
        return KeyValues(self.keys[:, row, :, :length].clone(), self.values[:, row, :, :length].clone())

    def put_back(self, row: int, sequence: KeyValues) -> None:
        """Writes a sequence into the beginning of a row."""
        self.keys[:, row, :, : sequence.length] = sequence.keys
        self.values[:, row, :, : sequence.length] = sequence.values


class PartsAttention:
    """Parts of a flat batch, one after another, that attend each in their own way: (tokens, attention) pairs."""

    def __init__(self, parts: Sequence[tuple[int, Attention]]) -> None:
        self._sizes = [size for size, _ in parts]
        self._attend = [attend for _, attend in parts]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if len(self._attend) == 1:
            return self._attend[0](layer, query, key, value)
        pieces = zip(query.split(self._sizes), key.split(self._sizes), value.split(self._sizes), strict=True)
        return torch.cat([attend(layer, *qkv) for attend, qkv in zip(self._attend, pieces, strict=True)])


class PrefillAttention:
    """Block attention that also fills the cache. Padding (row -1) is not stored."""

    def __init__(
        self, blocks: Sequence[Block], cache: KeyValueCache, rows_T: torch.Tensor, positions_T: torch.Tensor
    ) -> None:
        self._inner = BlockAttention(blocks)
        self._cache = cache
        self._kept = (rows_T >= 0).nonzero().squeeze(1)
        self._rows, self._positions = rows_T[self._kept], positions_T[self._kept]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer, self._rows, self._positions, key[self._kept], value[self._kept])
        return self._inner(layer, query, key, value)


class ExtendAttention:
    """Several new tokens a row after what the cache already holds of it; rows are padded to the longest.

    rows_R: the cache rows; past_R, new_R: how many tokens each has in the cache and how many come. The flat batch
    holds `R * max(new)` tokens.
    """

    def __init__(self, cache: KeyValueCache, rows_R: torch.Tensor, past_R: torch.Tensor, new_R: torch.Tensor) -> None:
        self._cache, self._cache_rows = cache, rows_R
        self._shape = (len(rows_R), int(new_R.max()))
        self._length = int((past_R + new_R).max())
        step_N = torch.arange(self._shape[1], device=rows_R.device)
        position_RN = past_R[:, None] + step_N
        self._kept = (step_N < new_R[:, None]).flatten().nonzero().squeeze(1)
        self._rows = rows_R.repeat_interleave(self._shape[1])[self._kept]
        self._positions = position_RN.flatten()[self._kept]
        outside = torch.arange(self._length, device=rows_R.device) > position_RN[:, :, None]
        mask = torch.zeros(outside.shape, dtype=cache.keys.dtype, device=rows_R.device)
        self._mask = mask.masked_fill_(outside, -torch.inf)[:, None]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer, self._rows, self._positions, key[self._kept], value[self._kept])
        q = query.unflatten(0, self._shape).transpose(1, 2)
        k = self._cache.keys[layer][self._cache_rows, :, : self._length]
        v = self._cache.values[layer][self._cache_rows, :, : self._length]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class DecodeAttention:
    """One new token a row against the cache rows [0, B). `rows_B[i]` is the cache row of the i-th token."""

    def __init__(self, cache: KeyValueCache, rows_B: torch.Tensor, positions_B: torch.Tensor) -> None:
        self._cache, self._rows, self._positions = cache, rows_B, positions_B
        self._inverse = torch.argsort(rows_B)
        self._length = int(positions_B.max()) + 1
        by_row = positions_B[self._inverse]
        outside = torch.arange(self._length, device=rows_B.device)[None, :] > by_row[:, None]
        mask = torch.zeros(outside.shape, dtype=cache.keys.dtype, device=rows_B.device)
        self._mask = mask.masked_fill_(outside, -torch.inf)[:, None, None, :]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._cache.write(layer, self._rows, self._positions, key, value)
        batch, kv_heads, head_dim = key.shape
        # Grouped-query attention as kv_heads attentions of `group` queries each: no key is repeated.
        q = query[self._inverse].view(batch, kv_heads, -1, head_dim)
        k = self._cache.keys[layer, :batch, :, : self._length]
        v = self._cache.values[layer, :batch, :, : self._length]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        return out.reshape(batch, -1)[self._rows]
