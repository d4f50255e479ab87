"""A job's record in the store: what it was started with."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from marlaas.specs import ModelSpec, PoolSpec, TenantSpec
from storage import CorruptObject, JobLayout, ObjectStore


class JobRecord(BaseModel):
    """spec.json: what the job was started with, and the base model's fingerprint."""

    model_config = ConfigDict(frozen=True)

    model: ModelSpec
    pool: PoolSpec
    tenant: TenantSpec
    base_fingerprint: str


def read_record(store: ObjectStore, layout: JobLayout) -> JobRecord:
    """The record of a job. Raises storage.ObjectNotFound, CorruptObject."""
    try:
        return JobRecord.model_validate_json(store.get(layout.spec))
    except ValidationError as error:
        raise CorruptObject(f"{store.url(layout.spec)} is not a job's record: {error}") from error
