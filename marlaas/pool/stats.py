"""What a pool can say of itself at any moment: for metrics, status and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TenantStats:
    """One tenant. Token counts and device seconds only grow; the others are of this moment.

    running: sequences in the batch; parked: conversations whose keys and values are kept while a tool runs.
    """

    waiting: int = 0
    running: int = 0
    parked: int = 0
    updates_waiting: int = 0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    trained_tokens: int = 0
    device_seconds: float = 0.0


@dataclass(frozen=True)
class DeviceStats:
    """One device. Seconds only grow; batch_fill is the running share of `max_sequences`.

    scheduling_seconds: of the device thread, spent in taking requests in and in deciding who is next.
    """

    name: str
    uptime_seconds: float
    sampling_seconds: float
    training_seconds: float
    scheduling_seconds: float
    batch_fill: float
    resident_adapters: int
    paged_adapters: int


@dataclass(frozen=True)
class PoolStats:
    """All devices and tenants of a pool. Tenants by name."""

    devices: list[DeviceStats] = field(default_factory=list)
    tenants: dict[str, TenantStats] = field(default_factory=dict)
