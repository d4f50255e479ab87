"""Where each tenant is right now: written by the stages, read by whoever shows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TenantProgress:
    """reward: mean of the last step; tokens_per_second: sampled, of the last rollout stage."""

    tenant: str
    steps: int
    step: int = 0
    stage: str = "waiting"
    reward_first: float | None = None
    reward: float | None = None
    tokens_per_second: float | None = None
    note: str = ""


class Board:
    """The tenants' progress, in the order they came. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, TenantProgress] = {}

    def add(self, tenant: str, steps: int) -> None:
        with self._lock:
            self._rows[tenant] = TenantProgress(tenant, steps)

    def set(self, tenant: str, **fields: object) -> None:
        """Replaces some fields of a tenant's row."""
        with self._lock:
            self._rows[tenant] = replace(self._rows[tenant], **fields)  # type: ignore[arg-type]

    def rows(self) -> list[TenantProgress]:
        with self._lock:
            return list(self._rows.values())
