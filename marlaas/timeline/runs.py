"""A run: the stage records of every tenant that has a job of one name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from marlaas.errors import MarlaasError
from storage import ObjectStore, StageRecord, list_jobs, read_stages

_READERS = 16
_SHOWN = 20


@dataclass(frozen=True)
class Run:
    """name: of the jobs. tenants: the records of each by start, at least one. silent: tenants with no record."""

    name: str
    tenants: Mapping[str, Sequence[StageRecord]]
    silent: tuple[str, ...] = ()

    @property
    def records(self) -> list[StageRecord]:
        """The records of all tenants."""
        return [record for records in self.tenants.values() for record in records]


def read_run(store: ObjectStore, name: str) -> Run:
    """The run in the store. Raises MarlaasError if no job has that name or none of them has a record yet."""
    jobs = list_jobs(store)
    layouts = [layout for layout in jobs if layout.job == name]
    if not layouts:
        raise MarlaasError(f"no run {name!r} in {store.url('tenants')}; {_known(sorted({j.job for j in jobs}))}")
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(lambda layout: read_stages(store, layout), layouts))
    tenants = {layout.tenant: records for layout, records in zip(layouts, found, strict=True) if records}
    if not tenants:
        raise MarlaasError(
            f"run {name!r} has no stage records: none of its jobs has finished a step, "
            "or they ran before stages were recorded"
        )
    return Run(name, tenants, tuple(layout.tenant for layout in layouts if layout.tenant not in tenants))


def _known(names: Sequence[str]) -> str:
    if not names:
        return "there is none"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"known are {', '.join(names[:_SHOWN])}{more}"
