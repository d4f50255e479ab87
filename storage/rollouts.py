"""Rollouts as Parquet: one row a sample, token ids with the log-probs they were sampled at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.errors import InvalidRow
from storage.tables import build_table, decode_table, encode_table, list_of, versioned_schema

ROLLOUT_VERSION = 2
ROLLOUT_SCHEMA = versioned_schema(
    "rollouts",
    ROLLOUT_VERSION,
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("conversation_id", pa.string(), nullable=False),
        pa.field("turn_count", pa.int32(), nullable=False),
        pa.field("token_ids", list_of(pa.int32()), nullable=False),
        pa.field("loss_mask", list_of(pa.bool_()), nullable=False),
        pa.field("logprobs", list_of(pa.float32()), nullable=False),
        pa.field("adapter_version", pa.int32(), nullable=False),
        pa.field("temperature", pa.float64(), nullable=False),
        pa.field("top_p", pa.float64(), nullable=False),
        pa.field("top_k", pa.int32(), nullable=False),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("environment_seconds", pa.float64(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
    ],
)
_DICTIONARY = [
    "sample_id",
    "group_id",
    "prompt_id",
    "conversation_id",
    "reward_parts.key_value.key",
    "finish_reason",
    "text",
]
_KINDS = {"token_ids": "iu", "loss_mask": "b", "logprobs": "fiu"}  # numpy's letters of the dtypes accepted
# A log-prob may be positive by rounding only.
_LOGPROB_SLACK = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sample, in the order of ROLLOUT_SCHEMA.

    token_ids int32, loss_mask bool and logprobs float32 are `[tokens]`: prompt, completions and environment turns.
    loss_mask is true exactly on the tokens that the policy sampled; logprobs are natural logarithms of the
    distribution each was drawn from, 0 where the mask is false. Sequences are as good as arrays for encoding;
    decoding gives writable arrays. conversation_id: shared by the samples that one conversation became, where the
    chat template does not extend earlier turns. environment_seconds: time spent in the environment.
    """

    sample_id: str
    group_id: str
    prompt_id: str
    conversation_id: str
    turn_count: int
    token_ids: NDArray[np.int32] | Sequence[int]
    loss_mask: NDArray[np.bool_] | Sequence[bool]
    logprobs: NDArray[np.float32] | Sequence[float]
    adapter_version: int
    temperature: float
    top_p: float
    top_k: int
    reward: float
    reward_parts: Mapping[str, float]
    finish_reason: str
    environment_seconds: float
    text: str


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """The Parquet object of a shard. Raises InvalidRow, naming the sample and the field, for a broken invariant."""
    _check_ids(rollouts)
    for rollout in rollouts:
        _check_scalars(rollout)
    offsets = _offsets(rollouts)
    tokens, mask, logprobs = (_flat(rollouts, field) for field in _KINDS)
    _check_tokens(rollouts, offsets, tokens, mask, logprobs)
    flat = {"token_ids": tokens.astype(np.int32), "loss_mask": mask, "logprobs": logprobs.astype(np.float32)}
    columns: list[Any] = []
    for field in ROLLOUT_SCHEMA:
        if field.name in flat:
            values = pa.array(flat[field.name])
            columns.append(pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=field.type))
        elif field.name == "reward_parts":
            columns.append([list(r.reward_parts.items()) for r in rollouts])
        else:
            columns.append([getattr(r, field.name) for r in rollouts])
    return encode_table(build_table(ROLLOUT_SCHEMA, columns), _DICTIONARY)


def decode_rollouts(data: bytes) -> list[Rollout]:
    """The rollouts of a shard, in their order. Raises SchemaMismatch and CorruptObject."""
    table = decode_table(data, ROLLOUT_SCHEMA)
    columns = [
        _arrays(table, name) if name in _KINDS else table.column(name).to_pylist() for name in ROLLOUT_SCHEMA.names
    ]
    columns[ROLLOUT_SCHEMA.names.index("reward_parts")] = [dict(p) for p in table.column("reward_parts").to_pylist()]
    return [Rollout(*row) for row in zip(*columns, strict=True)]


def _arrays(table: pa.Table, name: str) -> list[NDArray]:
    """The rows of a list column, as writable views of one array."""
    column = table.column(name).combine_chunks()
    values = column.values.to_numpy(zero_copy_only=False).copy()
    return [values[start:end] for start, end in pairwise(column.offsets.to_pylist())]


def _check_ids(rollouts: Sequence[Rollout]) -> None:
    seen: set[str] = set()
    for rollout in rollouts:
        if not rollout.sample_id or rollout.sample_id in seen:
            raise _refused(rollout, "sample_id", "must not be empty, nor be another sample's of the shard")
        seen.add(rollout.sample_id)


def _check_scalars(rollout: Rollout) -> None:
    allowed = {
        "turn_count": rollout.turn_count >= 1,
        "adapter_version": rollout.adapter_version >= 0,
        "temperature": 0 < rollout.temperature < math.inf,
        "top_p": 0 < rollout.top_p <= 1,
        "top_k": rollout.top_k >= 0,
        "reward": math.isfinite(rollout.reward),
        "reward_parts": all(map(math.isfinite, rollout.reward_parts.values())),
        "environment_seconds": 0 <= rollout.environment_seconds < math.inf,
    }
    for field, fine in allowed.items():
        if not fine:
            raise _refused(rollout, field, f"{getattr(rollout, field)!r} is out of range or not finite")


def _offsets(rollouts: Sequence[Rollout]) -> NDArray[np.int64]:
    """Where each sample begins in the concatenation of all, and its end: `[samples + 1]`."""
    for rollout in rollouts:
        for field in ("loss_mask", "logprobs"):
            if len(getattr(rollout, field)) != len(rollout.token_ids):
                lengths = f"{len(getattr(rollout, field))} values for {len(rollout.token_ids)} token_ids"
                raise _refused(rollout, field, lengths)
    return np.cumsum([0, *(len(r.token_ids) for r in rollouts)], dtype=np.int64)


def _flat(rollouts: Sequence[Rollout], field: str) -> NDArray:
    """A list column of all samples, concatenated."""
    arrays = [np.asarray(getattr(r, field)) for r in rollouts]
    for rollout, array in zip(rollouts, arrays, strict=True):
        if array.ndim != 1 or (array.size and array.dtype.kind not in _KINDS[field]):
            raise _refused(rollout, field, f"is {array.ndim}-dimensional {array.dtype}; the schema has another type")
    kept = [a for a in arrays if a.size]
    return np.concatenate(kept) if kept else np.empty(0, bool if field == "loss_mask" else np.int32)


def _check_tokens(
    rollouts: Sequence[Rollout], offsets: NDArray[np.int64], tokens: NDArray, mask: NDArray, logprobs: NDArray
) -> None:
    def refuse_where(bad: NDArray, field: str, problem: str) -> None:
        if bad.any():
            flat = int(bad.argmax())
            sample = int(np.searchsorted(offsets, flat, side="right")) - 1
            raise _refused(rollouts[sample], field, f"{problem}, at token {flat - offsets[sample]}")

    sampled = np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets])
    if not sampled.all():
        raise _refused(rollouts[int(sampled.argmin())], "loss_mask", "is true nowhere; the policy sampled no token")
    refuse_where((tokens < 0) | (tokens > np.iinfo(np.int32).max), "token_ids", "is not a token id")
    with np.errstate(over="ignore"):
        refuse_where(~np.isfinite(logprobs.astype(np.float32)), "logprobs", "is not finite")
    refuse_where(logprobs > _LOGPROB_SLACK, "logprobs", "is positive: not the logarithm of a probability")
    refuse_where(~mask & (logprobs != 0), "logprobs", "is not 0 where loss_mask is false")


def _refused(rollout: Rollout, field: str, problem: str) -> InvalidRow:
    return InvalidRow(f"rollouts: sample {rollout.sample_id!r}: {field} {problem}")
