import io
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import ROLLOUT_SCHEMA, CorruptObject, InvalidRow, Rollout, SchemaMismatch, decode_rollouts, encode_rollouts


def make_rollout(i=0, tokens=12, seed=0):
    rng = np.random.default_rng(seed + i)
    mask = np.arange(tokens) >= tokens // 3
    return Rollout(
        sample_id=f"s{i}",
        group_id=f"g{i // 4}",
        prompt_id=f"p{i // 4}",
        conversation_id=f"c{i}",
        turn_count=1 + i % 3,
        token_ids=rng.integers(0, 49152, tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.exponential(size=tokens), 0).astype(np.float32),
        adapter_version=i % 5,
        temperature=0.7,
        top_p=0.9,
        top_k=i,
        reward=float(rng.normal()),
        reward_parts={"right": 1.0, "format": 0.1 * i} if i % 2 else {},
        finish_reason="stop" if i % 2 else "length",
        environment_seconds=0.01 * i,
        text=f"the answer is {i} ✓\n",
    )


def as_plain(rollout):
    values = {f.name: getattr(rollout, f.name) for f in fields(rollout)}
    return {k: (v.dtype.name, v.tolist()) if isinstance(v, np.ndarray) else v for k, v in values.items()}


def test_rollouts_read_back_bit_for_bit():
    rollouts = [make_rollout(i, tokens=3 + 5 * i) for i in range(40)]
    decoded = decode_rollouts(encode_rollouts(rollouts))
    assert [as_plain(r) for r in decoded] == [as_plain(r) for r in rollouts]


def test_lists_are_as_good_as_arrays():
    rollout = replace(make_rollout(), token_ids=[1, 2], loss_mask=[False, True], logprobs=[0, -0.5])
    (decoded,) = decode_rollouts(encode_rollouts([rollout]))
    assert (decoded.token_ids.dtype, decoded.token_ids.tolist()) == (np.int32, [1, 2])
    assert (decoded.loss_mask.dtype, decoded.loss_mask.tolist()) == (np.bool_, [False, True])
    assert (decoded.logprobs.dtype, decoded.logprobs.tolist()) == (np.float32, [0, -0.5])


def test_decoded_arrays_are_writable_and_their_own():
    first, second = decode_rollouts(encode_rollouts([make_rollout(0), make_rollout(1)]))
    before = second.token_ids.tolist()
    first.token_ids[:] = 7
    assert second.token_ids.tolist() == before


def test_an_empty_shard_is_allowed():
    assert decode_rollouts(encode_rollouts([])) == []


def test_the_object_is_plain_parquet_of_the_schema():
    file = pq.ParquetFile(io.BytesIO(encode_rollouts([make_rollout(i) for i in range(8)])))
    assert file.schema_arrow.equals(ROLLOUT_SCHEMA)
    assert ROLLOUT_SCHEMA.metadata.items() <= file.schema_arrow.metadata.items()
    assert ROLLOUT_SCHEMA.names == [f.name for f in fields(Rollout)]
    group = file.metadata.row_group(0)
    for column in map(group.column, range(group.num_columns)):
        assert column.compression == "ZSTD"
        assert ("RLE_DICTIONARY" in column.encodings) == (column.physical_type == "BYTE_ARRAY")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("sample_id", "", "empty"),
        ("token_ids", [1] * 11, "values for 11 token_ids"),
        ("loss_mask", [True] * 13, "13 values for 12 token_ids"),
        ("logprobs", [-1.0] * 11, "11 values for 12 token_ids"),
        ("token_ids", [-1] * 12, "not a token id, at token 0"),
        ("token_ids", [2**31] * 12, "not a token id"),
        ("token_ids", [1.0] * 12, "another type"),
        ("token_ids", np.ones((12, 1), np.int32), "2-dimensional"),
        ("loss_mask", [1] * 12, "another type"),
        ("loss_mask", [False] * 12, "sampled no token"),
        ("logprobs", [-1.0] * 12, "not 0 where loss_mask is false, at token 0"),
        ("logprobs", [0.0] * 11 + [float("nan")], "not finite, at token 11"),
        ("logprobs", [0.0] * 11 + [float("-inf")], "not finite, at token 11"),
        ("logprobs", [0.0] * 11 + [-1e39], "not finite, at token 11"),
        ("logprobs", [0.0] * 11 + [0.9], "positive"),
        ("reward", float("nan"), "not finite"),
        ("reward_parts", {"right": float("inf")}, "not finite"),
        ("temperature", 0.0, "out of range"),
        ("top_p", 1.1, "out of range"),
        ("top_k", -1, "out of range"),
        ("turn_count", 0, "out of range"),
        ("adapter_version", -1, "out of range"),
        ("environment_seconds", -0.1, "out of range"),
    ],
)
def test_a_broken_invariant_names_the_sample_and_the_field(field, value, problem):
    rollouts = [make_rollout(0), replace(make_rollout(1), **{field: value}), make_rollout(2)]
    with pytest.raises(InvalidRow) as caught:
        encode_rollouts(rollouts)
    assert problem in str(caught.value)
    if field not in ("sample_id", "token_ids"):
        assert f"'s1': {field}" in str(caught.value)


def test_two_samples_of_one_id_are_refused():
    with pytest.raises(InvalidRow, match="'s0': sample_id"):
        encode_rollouts([make_rollout(0), make_rollout(0)])


def test_a_sample_without_tokens_is_refused():
    empty = replace(make_rollout(1), token_ids=[], loss_mask=[], logprobs=[])
    for rollouts in ([empty], [make_rollout(0), empty], [make_rollout(0), empty, make_rollout(2)]):
        with pytest.raises(InvalidRow, match="'s1': loss_mask is true nowhere"):
            encode_rollouts(rollouts)


def test_a_value_of_the_wrong_type_names_the_field():
    for field, value in (("text", None), ("finish_reason", 7), ("turn_count", 1.5)):
        with pytest.raises(InvalidRow, match=field):
            encode_rollouts([replace(make_rollout(), **{field: value})])


def rewritten(change):
    """A good object, its table changed, as a Parquet file that any writer could have made."""
    table = pq.read_table(io.BytesIO(encode_rollouts([make_rollout(i) for i in range(3)])))
    sink = io.BytesIO()
    pq.write_table(change(table), sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.replace_schema_metadata({**t.schema.metadata, b"marlaas.version": b"1"}),
        lambda t: t.replace_schema_metadata({**t.schema.metadata, b"marlaas.kind": b"evaluations"}),
        lambda t: t.replace_schema_metadata(None),
        lambda t: t.drop_columns(["text"]),
        lambda t: t.append_column("extra", pa.array([1, 2, 3])),
        lambda t: t.set_column(3, "turn_count", t["turn_count"].cast(pa.int64())),
    ],
    ids=["version", "kind", "no-metadata", "missing-column", "extra-column", "other-type"],
)
def test_another_schema_is_refused(change):
    with pytest.raises(SchemaMismatch, match="rollouts"):
        decode_rollouts(rewritten(change))


def test_damaged_bytes_are_never_taken_for_rollouts():
    rollouts = [make_rollout(i) for i in range(3)]
    data = encode_rollouts(rollouts)
    expected = [as_plain(r) for r in rollouts]
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.choice(len(data), 600, replace=False):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.integers(8)
        try:
            assert [as_plain(r) for r in decode_rollouts(bytes(damaged))] == expected
        except (CorruptObject, SchemaMismatch):
            refused += 1
    assert refused > 200  # the rest fell on statistics that nobody reads


@pytest.mark.parametrize("cut", [0, 3, 100, -100, -1])
def test_cut_off_bytes_are_corrupt(cut):
    with pytest.raises(CorruptObject, match="rollouts"):
        decode_rollouts(encode_rollouts([make_rollout()])[:cut])
