"""What a pool does for the stages. Every call is a coroutine; nothing here blocks on another tenant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from marlaas.pool.stats import PoolStats
from marlaas.sampling.protocol import Sample, SamplingRequest
from marlaas.specs import TenantSpec
from marlaas.training.batch import TrainingBatch, UpdateResult
from marlaas.training.trainer import JobState

ADMISSION_SECONDS = 0.5
"""How often a job that waits to be admitted asks again."""


def adapter_name(job: str, version: int) -> str:
    """`{tenant}/{job}/v{n}`: immutable, never reused."""
    return f"{job}/v{version}"


@dataclass(frozen=True)
class AdapterLease:
    """An adapter version that stays resident while it is held."""

    name: str
    version: int


class Pool(Protocol):
    """One base model, many jobs. Jobs are named `{tenant}/{job}`."""

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer, a transformers one with a chat template."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a reply."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: `pool.max_sequence_tokens`."""

    @property
    def base_name(self) -> str:
        """What the base model was asked for as."""

    @property
    def base_fingerprint(self) -> str:
        """Identifies the base weights; checkpoints of another base are refused."""

    async def open_job(
        self,
        job: str,
        spec: TenantSpec,
        state: JobState | None = None,
        on_wait: Callable[[str], None] = lambda reason: None,
    ) -> int:
        """Takes a job in and makes its version resident for sampling; returns that version.

        Waits while the pool has as many jobs as it takes; `on_wait` is told why, each time it has asked in vain.
        """

    async def close_job(self, job: str) -> None:
        """Lets a job go: its waiting work is cancelled, its slots are freed."""

    def lease(self, job: str) -> AbstractAsyncContextManager[AdapterLease]:
        """Holds the job's newest version."""

    def lease_files(self, name: str, files: Mapping[str, bytes]) -> AbstractAsyncContextManager[AdapterLease]:
        """Holds an adapter given as PEFT files, under a name of its own, for sampling only."""

    async def generate(self, request: SamplingRequest) -> Sample:
        """One completion. Raises RequestError; cancelling the call drops the request."""

    def end_session(self, session: str) -> None:
        """The conversation is over; what was kept for its next turn is freed."""

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        """One optimizer step; its new version is resident when this returns. Raises BatchError."""

    async def state(self, job: str) -> JobState:
        """The job's training state, for a checkpoint."""

    async def export(self, job: str) -> dict[str, bytes]:
        """The job's newest version as PEFT files, fp32."""

    async def stats(self) -> PoolStats:
        """What the pool has done so far, and what is waiting."""

    async def close(self) -> None:
        """Ends the pool; waiting work gets PoolClosed."""
