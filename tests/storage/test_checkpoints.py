import json
import random

import numpy as np
import pyarrow as pa
import pytest
import torch

from storage import CorruptObject, InvalidRow, SchemaMismatch
from storage.checkpoints import (
    CHECKPOINT_SCHEMA,
    CheckpointMetadata,
    CheckpointTensor,
    decode_checkpoint,
    encode_checkpoint,
)


def make_metadata(**changes):
    values = {
        "tenant": "acme",
        "job": "sums",
        "step": 4,
        "adapter_version": 5,
        "optimizer_step": 17,
        "rng_states": {"numpy": np.random.PCG64(3).state, "torch": [1, 2, 255]},
        "dataset_cursor": {"epoch": 1, "position": 64},
        "lora": {"rank": 16, "alpha": 32.0, "targets": ["q_proj"]},
        "base_model": "sha256:0123",
    }
    return CheckpointMetadata(**(values | changes))


def make_tensors():
    random_bits = torch.randint(0, 256, (96,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    return [
        CheckpointTensor("odd", "rng", torch.arange(5, dtype=torch.uint8)),
        *(
            CheckpointTensor("bits", str(d), random_bits.view(d).reshape(2, -1))
            for d in (torch.bfloat16, torch.float16)
        ),
        CheckpointTensor("a", "exp_avg", random_bits.view(torch.float32).reshape(2, 3, 4)),
        CheckpointTensor("a", "parameter", special),
        CheckpointTensor("b", "parameter", torch.arange(12.0).reshape(3, 4).T),
        CheckpointTensor("steps", "count", torch.tensor(2**62)),
        CheckpointTensor("mask", "count", torch.tensor([True, False, True])),
        CheckpointTensor("wide", "count", random_bits.view(torch.float64)),
        CheckpointTensor("few", "count", random_bits.view(torch.int32)),
        CheckpointTensor("none", "parameter", torch.empty(0, 4, dtype=torch.bfloat16)),
    ]


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def test_tensors_of_every_dtype_come_back_bit_for_bit():
    tensors = make_tensors()
    checkpoint = decode_checkpoint(encode_checkpoint(tensors, make_metadata()))
    assert list(checkpoint.tensors) == [(t.kind, t.name) for t in tensors]
    for t in tensors:
        assert bits(checkpoint.tensors[t.kind, t.name]) == bits(t.tensor)
    assert set(checkpoint.of_kind("parameter")) == {"a", "b", "none"}
    assert checkpoint.of_kind("nothing") == {}


def test_metadata_comes_back_as_it_was_and_restores_generators():
    generator = np.random.Generator(np.random.PCG64(3))
    metadata = make_metadata(rng_states={"numpy": generator.bit_generator.state, "python": random.Random(1).getstate()})
    restored = decode_checkpoint(encode_checkpoint([], metadata)).metadata
    assert restored.model_dump(exclude={"rng_states"}) == metadata.model_dump(exclude={"rng_states"})
    other = np.random.Generator(np.random.PCG64(99))
    other.bit_generator.state = restored.rng_states["numpy"]
    assert other.random(5).tolist() == generator.random(5).tolist()
    version, state, gauss = restored.rng_states["python"]
    again = random.Random()
    again.setstate((version, tuple(state), gauss))
    assert again.random() == random.Random(1).random()


def test_encoding_is_a_function_of_its_input():
    assert encode_checkpoint(make_tensors(), make_metadata()) == encode_checkpoint(make_tensors(), make_metadata())


def test_decoded_tensors_are_writable_and_their_own():
    checkpoint = decode_checkpoint(encode_checkpoint(make_tensors(), make_metadata()))
    before = bits(checkpoint.tensors["exp_avg", "a"])
    checkpoint.tensors["parameter", "b"].zero_()
    assert bits(checkpoint.tensors["exp_avg", "a"]) == before


def test_gradients_and_graphs_are_not_kept():
    parameter = torch.nn.Parameter(torch.ones(2))
    restored = decode_checkpoint(encode_checkpoint([CheckpointTensor("p", "parameter", parameter)], make_metadata()))
    assert not restored.tensors["parameter", "p"].requires_grad


def test_two_tensors_of_one_kind_and_name_are_refused():
    tensor = CheckpointTensor("a", "parameter", torch.ones(1))
    with pytest.raises(InvalidRow, match="'a'"):
        encode_checkpoint([tensor, tensor], make_metadata())


def test_a_dtype_that_cannot_be_kept_is_refused():
    with pytest.raises(InvalidRow, match=r"'a'.*complex64"):
        encode_checkpoint([CheckpointTensor("a", "parameter", torch.ones(1, dtype=torch.complex64))], make_metadata())


def test_the_object_is_a_plain_arrow_file_of_the_schema():
    table = pa.ipc.open_file(encode_checkpoint(make_tensors(), make_metadata())).read_all()
    assert table.schema.equals(CHECKPOINT_SCHEMA, check_metadata=False)
    assert table["shape"].to_pylist()[3] == [2, 3, 4]
    assert json.loads(table.schema.metadata[b"marlaas.checkpoint"])["schema_version"] == 1


def rewritten(change):
    table = change(pa.ipc.open_file(encode_checkpoint(make_tensors(), make_metadata())).read_all())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def signed(table, about):
    """The table with other metadata and the digest that belongs to it."""
    from storage.checkpoints import _digest

    (batch,) = table.combine_chunks().to_batches()
    encoded = json.dumps(about).encode()
    return table.replace_schema_metadata({b"marlaas.checkpoint": encoded, b"marlaas.sha256": _digest(batch, encoded)})


@pytest.mark.parametrize(
    "change",
    [
        lambda t: signed(t, make_metadata().model_dump() | {"schema_version": 2}),
        lambda t: signed(t, make_metadata().model_dump() | {"surprise": 1}),
        lambda t: signed(t, [1]),
        lambda t: t.replace_schema_metadata(None),
        lambda t: t.drop_columns(["shape"]),
        lambda t: t.append_column("extra", t["name"]),
    ],
    ids=["version", "metadata-field", "metadata-list", "no-metadata", "missing-column", "extra-column"],
)
def test_another_schema_is_refused(change):
    with pytest.raises(SchemaMismatch, match="checkpoint"):
        decode_checkpoint(rewritten(change))


def test_another_schema_version_is_not_written():
    with pytest.raises(SchemaMismatch, match="schema_version 2"):
        encode_checkpoint([], make_metadata(schema_version=2))


def test_damaged_bytes_are_never_taken_for_a_checkpoint():
    tensors, metadata = make_tensors(), make_metadata()
    data = encode_checkpoint(tensors, metadata)
    expected = {(t.kind, t.name): bits(t.tensor) for t in tensors}
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.choice(len(data), 600, replace=False):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.integers(8)
        try:
            checkpoint = decode_checkpoint(bytes(damaged))
        except (CorruptObject, SchemaMismatch):
            refused += 1
        else:
            assert checkpoint.metadata == metadata
            assert {key: bits(t) for key, t in checkpoint.tensors.items()} == expected
    assert refused > 200  # the rest fell on padding and on the second copy of the schema


@pytest.mark.parametrize("cut", [0, 7, 100, -100, -1])
def test_cut_off_bytes_are_corrupt(cut):
    with pytest.raises(CorruptObject, match="checkpoint"):
        decode_checkpoint(encode_checkpoint(make_tensors(), make_metadata())[:cut])
