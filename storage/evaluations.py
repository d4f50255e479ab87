"""Evaluations as Parquet: one row an example, as one decoding answered it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from storage.errors import InvalidRow
from storage.tables import build_table, decode_table, encode_table, versioned_schema

EVALUATION_VERSION = 1
EVALUATION_SCHEMA = versioned_schema(
    "evaluations",
    EVALUATION_VERSION,
    [
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
        pa.field("extracted", pa.string()),
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("seconds", pa.float64(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ],
)
_DICTIONARY = [field.name for field in EVALUATION_SCHEMA if field.type == pa.string()]


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One example under one decoding, in the order of EVALUATION_SCHEMA.

    answer: what was expected. extracted: the answer found in the completion, None if there is none. tokens: how
    many were generated, in how many seconds.
    """

    example_id: str
    prompt: str
    answer: str
    completion: str
    extracted: str | None
    reward: float
    correct: bool
    tokens: int
    seconds: float
    finish_reason: str


def encode_evaluation(rows: Sequence[EvaluationRow]) -> bytes:
    """The Parquet object of a decoding. Raises InvalidRow, naming the example and the field."""
    seen: set[str] = set()
    for row in rows:
        if not row.example_id or row.example_id in seen:
            raise _refused(row, "example_id", "must not be empty, nor be another example's")
        seen.add(row.example_id)
        if not math.isfinite(row.reward):
            raise _refused(row, "reward", f"{row.reward!r} is not finite")
        if row.tokens < 0:
            raise _refused(row, "tokens", f"{row.tokens!r} is negative")
        if not 0 <= row.seconds < math.inf:
            raise _refused(row, "seconds", f"{row.seconds!r} is out of range or not finite")
    columns = [[getattr(row, name) for row in rows] for name in EVALUATION_SCHEMA.names]
    return encode_table(build_table(EVALUATION_SCHEMA, columns), _DICTIONARY)


def decode_evaluation(data: bytes) -> list[EvaluationRow]:
    """The rows of a decoding, in their order. Raises SchemaMismatch and CorruptObject."""
    table = decode_table(data, EVALUATION_SCHEMA)
    columns = [table.column(name).to_pylist() for name in EVALUATION_SCHEMA.names]
    return [EvaluationRow(*row) for row in zip(*columns, strict=True)]


def _refused(row: EvaluationRow, field: str, problem: str) -> InvalidRow:
    return InvalidRow(f"evaluations: example {row.example_id!r}: {field} {problem}")
