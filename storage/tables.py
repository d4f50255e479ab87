"""Versioned Parquet: how a table of a known schema becomes an object's bytes and comes back checked."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from operator import index
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import CorruptObject, InvalidRow, SchemaMismatch

_KIND = b"marlaas.kind"
_VERSION = b"marlaas.version"
_DIGEST = b"marlaas.sha256"  # of the file before its footer: Parquet's page checksums leave the page headers out
_FOOTER_END = 8  # bytes: the footer's length and b"PAR1"


def versioned_schema(kind: str, version: int, fields: list[pa.Field]) -> pa.Schema:
    """A schema that carries its kind and version in its metadata."""
    return pa.schema(fields, metadata={_KIND: kind.encode(), _VERSION: str(version).encode()})


def list_of(item: pa.DataType) -> pa.ListType:
    """A list without nulls, its item named as Parquet names it, so that the type survives a round trip."""
    return pa.list_(pa.field("element", item, nullable=False))


def build_table(schema: pa.Schema, columns: Sequence[pa.Array | list[Any]]) -> pa.Table:
    """A table of `columns`, Arrow arrays or Python values, one for each field. Raises InvalidRow."""
    arrays = []
    for field, column in zip(schema, columns, strict=True):
        try:
            arrays.append(column if isinstance(column, pa.Array) else _array(field, column))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidRow(f"{_kind(schema)}: field {field.name} must be {field.type}: {error}") from error
        if arrays[-1].null_count and not field.nullable:
            raise InvalidRow(f"{_kind(schema)}: field {field.name} may not be null")
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(field: pa.Field, values: list[Any]) -> pa.Array:
    # Arrow would cut 1.5 down to 1.
    return pa.array(map(index, values) if pa.types.is_integer(field.type) else values, field.type)


def encode_table(table: pa.Table, dictionary: list[str]) -> bytes:
    """Parquet with zstd and a digest of its pages; `dictionary` names the columns to encode with a dictionary."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", use_dictionary=dictionary) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_DIGEST: hashlib.sha256(sink.getvalue()).hexdigest()})
    return sink.getvalue()


def decode_table(data: bytes, schema: pa.Schema) -> pa.Table:
    """The table in `data`. Raises SchemaMismatch unless it is of `schema`, CorruptObject if it can't be read whole."""
    kind = _kind(schema)
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        _check_schema(file.schema_arrow, schema)
        pages = memoryview(data)[: len(data) - _FOOTER_END - file.metadata.serialized_size]
        if hashlib.sha256(pages).hexdigest().encode() != file.metadata.metadata.get(_DIGEST):
            raise CorruptObject(f"{kind}: Parquet of {len(data)} bytes does not match its digest")
        table = file.read()
        table.validate(full=True)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorruptObject(f"{kind}: damaged Parquet of {len(data)} bytes: {error}") from error
    return table


def _check_schema(stored: pa.Schema, wanted: pa.Schema) -> None:
    kind, found = _kind(wanted), stored.metadata or {}
    for key in (_KIND, _VERSION):
        if found.get(key) != wanted.metadata[key]:
            raise SchemaMismatch(f"{kind}: {key.decode()} is {found.get(key)!r}; {wanted.metadata[key]!r} is expected")
    if not stored.equals(wanted, check_metadata=False):
        raise SchemaMismatch(f"{kind}: columns are\n{stored.remove_metadata()}\nexpected\n{wanted.remove_metadata()}")


def _kind(schema: pa.Schema) -> str:
    return schema.metadata[_KIND].decode()
