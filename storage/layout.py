"""Where each artifact of a job lies, and what tenants, jobs and adapter versions may be called."""

from __future__ import annotations

import re
from dataclasses import dataclass

from storage.errors import InvalidName
from storage.keys import validate_key
from storage.objects import ObjectStore

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TENANTS = "tenants"


def validate_name(name: str, what: str) -> str:
    """Returns a tenant's or job's name as it is; raises InvalidName unless it is a DNS label. `what` it names."""
    if not isinstance(name, str) or not _DNS_LABEL.fullmatch(name):
        raise InvalidName(
            f"{what} {name!r} must be a DNS label: 1 to 63 of a-z, 0-9 and '-', with no '-' at either end"
        )
    return name


@dataclass(frozen=True, slots=True, order=True)
class JobLayout:
    """The keys of one job's objects. Folders (prefixes) have no slash at their end. All raise InvalidName."""

    tenant: str
    job: str

    def __post_init__(self) -> None:
        validate_name(self.tenant, "tenant")
        validate_name(self.job, "job")

    @property
    def root(self) -> str:
        """Folder of everything of the job."""
        return f"{_TENANTS}/{self.tenant}/{self.job}"

    @property
    def spec(self) -> str:
        return f"{self.root}/spec.json"

    def rollouts(self, step: int) -> str:
        """Folder of the rollout shards of a step."""
        return f"{self.root}/rollouts/{_number(step, 'step'):08d}"

    def rollout(self, step: int, shard: str | int) -> str:
        return validate_key(f"{self.rollouts(step)}/{_file_name(str(shard), 'shard')}.parquet")

    def checkpoint(self, step: int, attempt: str) -> str:
        """A checkpoint of a step. Each attempt has its own, so that a late one never replaces the committed one."""
        name = f"{_number(step, 'step'):08d}-{_file_name(attempt, 'attempt')}"
        return validate_key(f"{self.root}/checkpoints/{name}.arrow")

    @property
    def commits(self) -> str:
        """Folder of the commits."""
        return f"{self.root}/commits"

    def commit(self, step: int) -> str:
        return f"{self.commits}/{_number(step, 'step'):08d}.json"

    @property
    def stages(self) -> str:
        """Folder of the records of what the stages did and when."""
        return f"{self.root}/stages"

    def stage_records(self, name: str) -> str:
        return validate_key(f"{self.stages}/{_file_name(name, 'stage records')}.json")

    @property
    def adapters(self) -> str:
        """Folder of the adapter versions."""
        return f"{self.root}/adapters"

    def adapter(self, n: int) -> str:
        """Folder of version `n`, a PEFT folder."""
        return f"{self.adapters}/v{_number(n, 'adapter version')}"

    def adapter_name(self, n: int) -> str:
        """What version `n` is called everywhere: tenant/job/v3."""
        return f"{self.tenant}/{self.job}/v{_number(n, 'adapter version')}"

    def evaluation(self, n: int, filename: str) -> str:
        """A file of the evaluation of version `n`: greedy.parquet, report.html..."""
        folder = f"{self.root}/evaluations/v{_number(n, 'adapter version')}"
        return validate_key(f"{folder}/{_file_name(filename, 'evaluation file')}")


def list_jobs(store: ObjectStore, tenant: str | None = None) -> list[JobLayout]:
    """The jobs in the store, or of one tenant, sorted. A job exists when its spec does."""
    tenants = store.folders(_TENANTS) if tenant is None else [validate_name(tenant, "tenant")]
    jobs = [
        JobLayout(tenant, job)
        for tenant in tenants
        if _DNS_LABEL.fullmatch(tenant)
        for job in store.folders(f"{_TENANTS}/{tenant}")
        if _DNS_LABEL.fullmatch(job)
    ]
    return [layout for layout in jobs if store.exists(layout.spec)]


def _number(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidName(f"{what} {value!r} must be a whole number of at least 0")
    return value


def _file_name(name: str, what: str) -> str:
    if "/" in name:
        raise InvalidName(f"{what} {name!r} must be a name without '/'")
    return name
