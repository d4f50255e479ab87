import io
from dataclasses import fields, replace

import pyarrow.parquet as pq
import pytest

from storage import (
    EVALUATION_SCHEMA,
    CorruptObject,
    EvaluationRow,
    InvalidRow,
    Rollout,
    SchemaMismatch,
    decode_evaluation,
    decode_rollouts,
    encode_evaluation,
    encode_rollouts,
)

ROWS = [
    EvaluationRow("e0", "2+3=", "5", "The answer is 5.", "5", 1.0, True, 6, 0.25, "stop"),
    EvaluationRow("e1", "2+9=", "11", "I do not know ✗", None, 0.0, False, 20, 0.1 + 0.2, "length"),
]


def test_rows_read_back_as_they_were_written():
    assert decode_evaluation(encode_evaluation(ROWS)) == ROWS
    assert decode_evaluation(encode_evaluation([])) == []


def test_the_object_is_plain_parquet_of_the_schema():
    file = pq.ParquetFile(io.BytesIO(encode_evaluation(ROWS)))
    assert file.schema_arrow.equals(EVALUATION_SCHEMA)
    assert EVALUATION_SCHEMA.metadata.items() <= file.schema_arrow.metadata.items()
    assert EVALUATION_SCHEMA.names == [f.name for f in fields(EvaluationRow)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("example_id", "e0"), ("reward", float("nan")), ("tokens", -1), ("seconds", float("inf")), ("answer", None)],
)
def test_a_bad_row_names_the_field(field, value):
    with pytest.raises(InvalidRow, match=field):
        encode_evaluation([ROWS[0], replace(ROWS[1], **{field: value})])


def test_rollouts_are_not_evaluations_nor_the_other_way_round():
    rollout = Rollout("s", "g", "p", "c", 1, [1, 2], [False, True], [0, -1], 0, 1, 1, 0, 1, {}, "stop", 0, "x")
    with pytest.raises(SchemaMismatch, match="evaluations"):
        decode_evaluation(encode_rollouts([rollout]))
    with pytest.raises(SchemaMismatch, match="rollouts"):
        decode_rollouts(encode_evaluation(ROWS))


def test_damaged_bytes_are_corrupt():
    data = bytearray(encode_evaluation(ROWS))
    data[40] ^= 0xFF
    for damaged in (bytes(data), b"", b"PAR1"):
        with pytest.raises(CorruptObject, match="evaluations"):
            decode_evaluation(damaged)
