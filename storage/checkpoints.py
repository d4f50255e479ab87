"""Checkpoints as one Arrow IPC object: every tensor of a job bit for bit, with the metadata to resume from.

Numbers lie little-endian, as on every machine that torch runs on. A digest over all of it tells damage, which
neither Arrow IPC nor its zstd buffers would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.errors import CorruptObject, InvalidRow, SchemaMismatch

CHECKPOINT_VERSION = 1
CHECKPOINT_SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.int64()), nullable=False),
        pa.field("data", pa.large_binary(), nullable=False),
    ]
)
_METADATA, _DIGEST = b"marlaas.checkpoint", b"marlaas.sha256"
_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class CheckpointTensor(NamedTuple):
    """A tensor on any device; kind: what it is to its name (parameter, exp_avg, exp_avg_sq...)."""

    name: str
    kind: str
    tensor: torch.Tensor


class CheckpointMetadata(BaseModel):
    """What a resumed job needs beside its tensors. The free-form values must be JSON: tuples come back as lists.

    step: of the job's loop, the last one done. optimizer_step: updates that the optimizer has made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = CHECKPOINT_VERSION
    tenant: str
    job: str
    step: int = Field(ge=0)
    adapter_version: int = Field(ge=0)
    optimizer_step: int = Field(ge=0)
    rng_states: dict[str, Any]
    dataset_cursor: dict[str, Any]
    lora: dict[str, Any]
    base_model: str = Field(min_length=1, description="fingerprint of the base model")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A decoded checkpoint: its tensors, on the CPU, by (kind, name)."""

    metadata: CheckpointMetadata
    tensors: dict[tuple[str, str], torch.Tensor] = field(repr=False)

    def of_kind(self, kind: str) -> dict[str, torch.Tensor]:
        """The tensors of one kind by name; empty if there are none."""
        return {name: tensor for (k, name), tensor in self.tensors.items() if k == kind}


def encode_checkpoint(tensors: Sequence[CheckpointTensor], metadata: CheckpointMetadata) -> bytes:
    """The Arrow IPC object, zstd. Raises InvalidRow for two tensors of one kind and name, or an unknown dtype."""
    _check(tensors, metadata)
    raw = [_bytes(t.tensor) for t in tensors]
    offsets = np.cumsum([0, *(r.size for r in raw)], dtype=np.int64)
    data = np.concatenate(raw) if raw else np.empty(0, np.uint8)
    columns = [
        pa.array([t.name for t in tensors], pa.string()),
        pa.array([t.kind for t in tensors], pa.string()),
        pa.array([_dtype_name(t.tensor.dtype) for t in tensors], pa.string()),
        pa.array([list(t.tensor.shape) for t in tensors], pa.list_(pa.int64())),
        pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(raw), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        ),
    ]
    about = json.dumps(metadata.model_dump(mode="json"), allow_nan=False).encode()
    batch = pa.RecordBatch.from_arrays(columns, schema=CHECKPOINT_SCHEMA)
    schema = CHECKPOINT_SCHEMA.with_metadata({_METADATA: about, _DIGEST: _digest(batch, about)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    return sink.getvalue().to_pybytes()


def decode_checkpoint(data: bytes) -> Checkpoint:
    """The checkpoint in `data`, bit for bit. Raises SchemaMismatch and CorruptObject."""
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as reader:
            stored = reader.schema
            table = reader.read_all()
            table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptObject(f"checkpoint: damaged Arrow file of {len(data)} bytes: {error}") from error
    about = (stored.metadata or {}).get(_METADATA)
    if about is None or not stored.equals(CHECKPOINT_SCHEMA, check_metadata=False):
        raise SchemaMismatch(f"checkpoint: columns are\n{stored}\nexpected\n{CHECKPOINT_SCHEMA}")
    batch = table.combine_chunks().to_batches()
    rows = batch[0] if batch else pa.RecordBatch.from_pylist([], schema=CHECKPOINT_SCHEMA)
    if stored.metadata.get(_DIGEST) != _digest(rows, about):
        raise CorruptObject(f"checkpoint: {len(data)} bytes do not match their digest")
    return Checkpoint(_metadata(about), _tensors(rows))


def _check(tensors: Sequence[CheckpointTensor], metadata: CheckpointMetadata) -> None:
    if metadata.schema_version != CHECKPOINT_VERSION:
        raise SchemaMismatch(f"checkpoint: schema_version {metadata.schema_version}; {CHECKPOINT_VERSION} is written")
    seen: set[tuple[str, str]] = set()
    for name, kind, tensor in tensors:
        if (kind, name) in seen:
            raise InvalidRow(f"checkpoint: two tensors of kind {kind!r} are named {name!r}")
        seen.add((kind, name))
        if _dtype_name(tensor.dtype) not in _DTYPES:
            raise InvalidRow(f"checkpoint: {kind} {name!r}: {tensor.dtype} is not one of {', '.join(_DTYPES)}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes in row-major order, `[nbytes]`; of a contiguous tensor on the CPU, a view of it."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensors(rows: pa.RecordBatch) -> dict[tuple[str, str], torch.Tensor]:
    names, kinds, dtypes, shapes = (rows.column(i).to_pylist() for i in range(4))
    tensors = {}
    for i, (name, kind, dtype, shape) in enumerate(zip(names, kinds, dtypes, shapes, strict=True)):
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        _bytes(tensor)[:] = np.frombuffer(rows.column(4)[i].as_buffer(), np.uint8)
        tensors[kind, name] = tensor
    return tensors


def _metadata(about: bytes) -> CheckpointMetadata:
    document = json.loads(about)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != CHECKPOINT_VERSION:
        raise SchemaMismatch(f"checkpoint: schema_version is {version!r}; {CHECKPOINT_VERSION} is expected")
    try:
        return CheckpointMetadata.model_validate(document)
    except ValidationError as error:
        raise SchemaMismatch(f"checkpoint: metadata of another schema: {error}") from error


def _digest(rows: pa.RecordBatch, about: bytes) -> bytes:
    """SHA-256 over the metadata, what the tensors are, and their bytes, in hexadecimal."""
    values = [value.as_buffer() for value in rows.column(4)]
    described = [*(rows.column(i).to_pylist() for i in range(4)), [v.size for v in values], len(about)]
    digest = hashlib.sha256(json.dumps(described).encode())
    for part in (about, *values):
        digest.update(part)
    return digest.hexdigest().encode()
