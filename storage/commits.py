"""The commit protocol: a step of a job exists when its commit does, and only one runner can commit it."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from storage.errors import CorruptObject, InvalidName, ObjectExists, ObjectNotFound, StepAlreadyCommitted
from storage.layout import JobLayout
from storage.objects import ObjectStore

_FILE = re.compile(r"(\d{8,})\.json")


class Commit(BaseModel):
    """What a step consumed and made.

    adapter_version: the version the step made. rollouts: keys of the shards consumed; rollout_versions: the adapter
    versions that sampled them. checkpoint: its key. metrics may hold infinities and NaN.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    tenant: str
    job: str
    step: int = Field(ge=0)
    adapter_version: int = Field(ge=0)
    rollouts: list[str]
    rollout_versions: list[int]
    checkpoint: str
    metrics: dict[str, float] = {}
    created_at: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))


def write_commit(store: ObjectStore, layout: JobLayout, commit: Commit) -> None:
    """Makes the step exist. The checkpoint must be in the store already.

    Raises StepAlreadyCommitted if any runner has committed the step, ObjectNotFound if the checkpoint is missing,
    and InvalidName for a commit of another job.
    """
    if (commit.tenant, commit.job) != (layout.tenant, layout.job):
        raise InvalidName(f"commit is of {commit.tenant}/{commit.job}, not of {layout.tenant}/{layout.job}")
    if not store.exists(commit.checkpoint):
        raise ObjectNotFound(f"step {commit.step} cannot be committed: {store.url(commit.checkpoint)} does not exist")
    key = layout.commit(commit.step)
    try:
        store.create(key, commit.model_dump_json(indent=2).encode())
    except ObjectExists:
        raise StepAlreadyCommitted(f"step {commit.step} is committed already: {store.url(key)}") from None


def read_commit(store: ObjectStore, layout: JobLayout, step: int) -> Commit:
    """The commit of a step. Raises ObjectNotFound and CorruptObject."""
    key = layout.commit(step)
    try:
        commit = Commit.model_validate_json(store.get(key))
    except ValidationError as error:
        raise CorruptObject(f"{store.url(key)} is not a commit: {error}") from error
    if (commit.tenant, commit.job, commit.step) != (layout.tenant, layout.job, step):
        raise CorruptObject(f"{store.url(key)} is the commit of step {commit.step} of {commit.tenant}/{commit.job}")
    return commit


def committed_steps(store: ObjectStore, layout: JobLayout) -> list[int]:
    """The steps that exist, ascending."""
    names = (key.removeprefix(f"{layout.commits}/") for key in store.list(layout.commits))
    return sorted(int(match[1]) for match in map(_FILE.fullmatch, names) if match)


def latest_commit(store: ObjectStore, layout: JobLayout) -> Commit | None:
    """The commit of the highest step; None if there is none."""
    steps = committed_steps(store, layout)
    return read_commit(store, layout, steps[-1]) if steps else None


def read_commits(store: ObjectStore, layout: JobLayout) -> list[Commit]:
    """All commits of a job, by ascending step."""
    return [read_commit(store, layout, step) for step in committed_steps(store, layout)]
