"""The simulated pool: its devices, its host, its tenants' loops, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, Literal

import simpy
from pydantic import BaseModel, ConfigDict, Field

from bench.simulation.curves import ServiceCurves
from bench.simulation.device import Conversation, Device, DeviceLimits, Events, Update, Waits
from bench.simulation.workload import WorkloadSpec

STAGES = ("rollout", "host", "update")


class Mode(StrEnum):
    """together: all tenants share. sequential: one after another. slices: one tenant's stage has a device at a time."""

    TOGETHER = "together"
    SEQUENTIAL = "sequential"
    SLICES = "slices"


class PoolModel(BaseModel):
    """The pool. trainers 0: every device both samples and trains. Defaults are those of a fleet's `pool`.

    hosts: tenant steps that are orchestrated at once. decode_between: sampling steps after each training pass, if there
    are rows. rows: `fair` deals single tokens; `grouped` all rows of a tenant at a time, for fewer adapters in a step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: int = Field(1, ge=1, description="that sample")
    trainers: int = Field(0, ge=0)
    hosts: int = Field(1, ge=1)
    max_sequences: int = Field(256, ge=1)
    prefill_tokens: int = Field(1024, ge=1)
    train_tokens: int = Field(8192, ge=1)
    coalesce_seconds: float = Field(0.05, ge=0)
    decode_between: int = Field(0, ge=0)
    rows: Literal["fair", "grouped"] = "fair"

    @property
    def split(self) -> str:
        """As `7:1`, or `8 shared`."""
        return f"{self.devices}:{self.trainers}" if self.trainers else f"{self.devices} shared"


@dataclass(frozen=True)
class Result:
    """What a run came to; seconds and shares of the wall time.

    sampled_tokens, prefilled_tokens: computed one at a time, and many at once. adapters_per_step: distinct ones in a
    decoding step. busy: of each kind of device, `shared` or `rollout` and `trainer`. tenant_seconds: when each tenant
    ended. waits: mean seconds in the queue of each stage. utilisation: of everything that could be the bottleneck; of
    `tools` it is the longest chain of tool calls of each step, over the steps that a tenant may have open at once.
    """

    mode: Mode
    tenants: int
    wall_seconds: float
    device_seconds: float
    sampled_tokens: int
    prefilled_tokens: int
    adapters_per_step: float
    busy_share: float
    busy: dict[str, float]
    tenant_seconds: tuple[float, ...]
    waits: dict[str, float]
    longest_waits: dict[str, float]
    utilisation: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """What is used most."""
        return max(self.utilisation, key=lambda name: self.utilisation[name])


def simulate(
    curves: ServiceCurves,
    workload: WorkloadSpec,
    tenants: int,
    pool: PoolModel | None = None,
    mode: Mode = Mode.TOGETHER,
) -> Result:
    """Runs `tenants` jobs from their first rollout to their last version. The same arguments give the same result."""
    pool = PoolModel() if pool is None else pool
    if tenants < 1:
        raise ValueError(f"tenants: {tenants} must be at least 1")
    if mode is Mode.SEQUENTIAL:
        return _in_a_row([_Run(curves, workload, pool, [tenant], mode).result() for tenant in range(tenants)])
    return _Run(curves, workload, pool, range(tenants), mode).result()


@dataclass
class _Tenant:
    number: int
    version: int = 0
    started: int = 0
    rolled: list[simpy.Event] = field(default_factory=list)
    ended: float = 0.0
    tool_seconds: float = 0.0


class _Run:
    """One simulation."""

    def __init__(
        self, curves: ServiceCurves, workload: WorkloadSpec, pool: PoolModel, tenants: Sequence[int], mode: Mode
    ) -> None:
        self._curves, self._workload, self._pool, self._mode = curves, workload, pool, mode
        self._clock = simpy.Environment()
        self._waits = {stage: Waits() for stage in STAGES}
        self._samplers = self._make_devices(pool.devices)
        self._trainers = self._make_devices(pool.trainers) if pool.trainers else self._samplers
        self._host = simpy.Resource(self._clock, pool.hosts)
        self._host_seconds = 0.0
        self._free_samplers = self._free(self._samplers)
        self._free_trainers = self._free(self._trainers) if pool.trainers else self._free_samplers
        self._groups = count()
        self._tenants = [_Tenant(number) for number in tenants]
        for tenant in self._tenants:
            self._trainer(tenant).jobs += 1

    def result(self) -> Result:
        """Runs to the end."""
        loops = [self._clock.process(self._loop(tenant)) for tenant in self._tenants]
        self._clock.run(until=self._clock.all_of(loops))
        wall = self._clock.now
        kinds = {"shared": self._samplers}
        if self._pool.trainers:
            kinds = {"rollout": self._samplers, "trainer": self._trainers}
        spent = {kind: sum(map(_busy_seconds, devices)) for kind, devices in kinds.items()}
        busy = {kind: spent[kind] / (wall * len(devices)) for kind, devices in kinds.items()}
        at_once = self._workload.max_staleness + 1
        tools = sum(tenant.tool_seconds / (at_once * tenant.ended) for tenant in self._tenants) / len(self._tenants)
        host = self._host_seconds / (wall * self._pool.hosts)
        return Result(
            mode=self._mode,
            tenants=len(self._tenants),
            wall_seconds=wall,
            device_seconds=sum(spent.values()),
            sampled_tokens=sum(device.sampled_tokens for device in self._samplers),
            prefilled_tokens=sum(device.prefilled_tokens for device in self._samplers),
            adapters_per_step=sum(d.adapter_steps for d in self._samplers)
            / max(1, sum(d.steps for d in self._samplers)),
            busy_share=sum(spent.values()) / (wall * sum(map(len, kinds.values()))),
            busy=busy,
            tenant_seconds=tuple(tenant.ended for tenant in self._tenants),
            waits={stage: w.total / max(1, w.number) for stage, w in self._waits.items()},
            longest_waits={stage: w.longest for stage, w in self._waits.items()},
            utilisation={**busy, "tools": tools, "orchestration host": host},
        )

    def _make_devices(self, number: int) -> list[Device]:
        pool = self._pool
        limits = DeviceLimits(
            max_sequences=pool.max_sequences,
            prefill_tokens=pool.prefill_tokens,
            train_tokens=pool.train_tokens,
            coalesce_seconds=pool.coalesce_seconds,
            decode_between=pool.decode_between,
            by_tenant=pool.rows == "grouped",
        )
        answer = self._workload.answer_tokens
        return [Device(self._clock, self._curves, limits, answer, self._waits) for _ in range(number)]

    def _free(self, devices: Sequence[Device]) -> simpy.Store:
        """Devices that no stage has, when stages have them for themselves."""
        store = simpy.Store(self._clock)
        store.items.extend(devices)
        return store

    def _trainer(self, tenant: _Tenant) -> Device:
        """Where the tenant's optimizer state is."""
        return self._trainers[tenant.number % len(self._trainers)]

    def _loop(self, tenant: _Tenant) -> Events:
        """A tenant's job: rollouts ahead of updates by at most `max_staleness` versions."""
        groups = self._draw(tenant)
        for step in range(self._workload.steps):
            while (
                tenant.started < self._workload.steps
                and tenant.started - tenant.version <= self._workload.max_staleness
            ):
                tenant.rolled.append(self._clock.event())
                self._clock.process(self._roll_out(tenant, tenant.started, groups[tenant.started]))
                tenant.started += 1
            yield tenant.rolled[step]
            yield from self._orchestrate()
            yield from self._update(tenant, groups[step])
            tenant.version += 1
        tenant.ended = self._clock.now
        self._trainer(tenant).jobs -= 1
        if self._mode is Mode.TOGETHER:
            self._trainer(tenant).look_again()

    def _draw(self, tenant: _Tenant) -> list[list[list[tuple[list[int], list[float]]]]]:
        """Of each step, prompt and conversation: the tokens of its turns, and the seconds between them."""
        lengths, waits = self._workload.lengths(tenant.number), self._workload.waits(tenant.number)
        tenant.tool_seconds = float(waits.sum(-1).max((1, 2)).sum())
        return [
            [list(zip(*group, strict=True)) for group in zip(*step, strict=True)]
            for step in zip(lengths.tolist(), waits.tolist(), strict=True)
        ]

    def _roll_out(self, tenant: _Tenant, step: int, groups: Any) -> Events:
        """Samples a step's conversations; each group goes to the device with the fewest."""
        w, held, asked = self._workload, None, self._clock.now
        version = tenant.version
        if self._mode is Mode.SLICES:
            held = yield self._free_samplers.get()
            version = tenant.version
        left = sum(map(len, groups))
        done = tenant.rolled[step] if held is None else self._clock.event()

        def end() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done.succeed()

        for group in groups:
            device = held or min(self._samplers, key=lambda device: device.conversations)
            prompt = next(self._groups)
            for turns, waits in group:
                device.submit(
                    Conversation(
                        tenant=tenant.number,
                        weight=w.weight(tenant.number),
                        adapter=(tenant.number, version),
                        prompt=prompt,
                        pending=w.prompt_tokens,
                        turns=turns,
                        waits=waits,
                        done=end,
                    ),
                    asked,
                )
        if held is not None:
            yield done
            yield self._free_samplers.put(held)
            tenant.rolled[step].succeed()

    def _orchestrate(self) -> Events:
        asked = self._clock.now
        with self._host.request() as turn:
            yield turn
            self._waits["host"].note(self._clock.now - asked)
            yield self._clock.timeout(self._curves.host_seconds_per_step)
        self._host_seconds += self._curves.host_seconds_per_step

    def _update(self, tenant: _Tenant, groups: Any) -> Events:
        update = Update(tenant.number, sorted(self._sequences(groups)), self._clock.now, self._clock.event())
        if self._mode is Mode.SLICES:
            device = yield self._free_trainers.get()
            device.update(update)
            yield update.done
            yield self._free_trainers.put(device)
        else:
            self._trainer(tenant).update(update)
            yield update.done

    def _sequences(self, groups: Any) -> Iterator[int]:
        """Tokens to train of each conversation; a group's prompt is packed with the first of them."""
        w = self._workload
        answers = (w.turns - 1) * w.answer_tokens
        for group in groups:
            for member, (turns, _) in enumerate(group):
                yield sum(turns) + answers + (0 if member else w.prompt_tokens)


def _busy_seconds(device: Device) -> float:
    return device.sampling_seconds + device.training_seconds


def _in_a_row(alone: Sequence[Result]) -> Result:
    """Results of jobs one after another, as one."""
    wall = sum(result.wall_seconds for result in alone)
    ends, now = [], 0.0
    for result in alone:
        now += result.wall_seconds
        ends.append(now)

    def mean(name: str) -> dict[str, float]:
        """Each job counts as long as it took."""
        first: dict[str, float] = getattr(alone[0], name)
        return {key: sum(getattr(r, name)[key] * r.wall_seconds for r in alone) / wall for key in first}

    return Result(
        mode=Mode.SEQUENTIAL,
        tenants=len(alone),
        wall_seconds=wall,
        device_seconds=sum(result.device_seconds for result in alone),
        sampled_tokens=sum(result.sampled_tokens for result in alone),
        prefilled_tokens=sum(result.prefilled_tokens for result in alone),
        adapters_per_step=sum(result.adapters_per_step for result in alone) / len(alone),
        busy_share=sum(result.busy_share * result.wall_seconds for result in alone) / wall,
        busy=mean("busy"),
        tenant_seconds=tuple(ends),
        waits={stage: sum(r.waits[stage] for r in alone) / len(alone) for stage in STAGES},
        longest_waits={stage: max(r.longest_waits[stage] for r in alone) for stage in STAGES},
        utilisation=mean("utilisation"),
    )
