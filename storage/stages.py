"""What the stages of a job did and when: one small JSON object a step, for timelines and utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from storage.errors import CorruptObject
from storage.layout import JobLayout
from storage.objects import ObjectStore

Stage = Literal["rollout", "interact", "update", "publish", "evaluate"]


class StageRecord(BaseModel):
    """One stage of one step. Times in seconds, start and end since the epoch.

    tokens: sampled by a rollout or an evaluation, trained on by an update. device_seconds: the job's share of the
    accelerators' time. calls and waited_seconds: of the environment, summed over the conversations of the step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenant: str
    job: str
    stage: Stage
    step: int = Field(ge=0)
    start: float
    end: float
    tokens: int = Field(0, ge=0)
    device_seconds: float = Field(0.0, ge=0)
    calls: int = Field(0, ge=0)
    waited_seconds: float = Field(0.0, ge=0)


class _Records(BaseModel):
    records: list[StageRecord]


def write_stages(store: ObjectStore, layout: JobLayout, name: str, records: Sequence[StageRecord]) -> None:
    """Writes some records as one object; `name` is the writer's own."""
    store.put(layout.stage_records(name), _Records(records=list(records)).model_dump_json().encode())


def read_stages(store: ObjectStore, layout: JobLayout) -> list[StageRecord]:
    """All records of a job, by start. Raises CorruptObject."""
    records: list[StageRecord] = []
    for key in store.list(layout.stages):
        try:
            records += _Records.model_validate_json(store.get(key)).records
        except ValidationError as error:
            raise CorruptObject(f"{store.url(key)} does not hold stage records: {error}") from error
    return sorted(records, key=lambda r: (r.start, r.stage))
