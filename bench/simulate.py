"""A discrete-event model of the pool: checked against measurements, then asked about fleets that are not here.

python -m bench.simulate [--curves FILE] [--measured FILE] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bench.common import median, table, write_json
from bench.simulation import Mode, PoolModel, Result, ServiceCurves, WorkloadSpec, read_curves, simulate
from bench.workloads import WORKLOADS

CURVES = Path(__file__).parent / "curves" / "cpu-2core.json"
TOLERANCE = 0.15  # relative error of a simulated figure, beyond which it is flagged
TENANTS, QUICK_TENANTS = (32, 128, 512, 1024, 4096), (32, 128, 512)
DEVICES, QUICK_DEVICES = (1, 2, 8, 32, 128, 512), (1, 2, 8, 32)
TRAINING_SHARES = (Fraction(1, 4), Fraction(3, 8), Fraction(1, 2))  # of the devices
POLICIES: dict[str, dict[str, Any]] = {  # of one device; the first is the pool's own
    "eager": {},
    "coalesce_0.5s": {"coalesce_seconds": 0.5},
    "coalesce_2s": {"coalesce_seconds": 2.0},
    "coalesce_10s": {"coalesce_seconds": 10.0},
    "alternate_1": {"decode_between": 1},
    "alternate_4": {"decode_between": 4},
    "alternate_16": {"decode_between": 16},
    "grouped": {"rows": "grouped"},
    "grouped_coalesce_2s": {"rows": "grouped", "coalesce_seconds": 2.0},
}
POLICY_TENANTS, QUICK_POLICY_TENANTS = (8, 32, 128, 512), (8, 32)
COLUMNS = {
    "measured": "mode tenants measured_seconds simulated_seconds error measured_busy simulated_busy busy_error flag",
    "scaling": "devices split wall_seconds tokens_per_second busy_share busy bottleneck best",
    "policy": "workload tenants policy wall_seconds over_eager mean_tenant_seconds prefilled_tokens adapters_per_step",
}

Rows = list[dict[str, Any]]


class MeasuredPoint(BaseModel):
    """A run of the real pool: what it did and what it took. pool: a fleet's usual one, on one device, if not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: WorkloadSpec
    mode: Mode
    tenants: int = Field(ge=1)
    wall_seconds: float = Field(gt=0)
    busy_share: float | None = Field(None, gt=0, le=1.05)
    pool: PoolModel = PoolModel()


def read_measured(path: Path) -> list[MeasuredPoint]:
    """The points in a file, a JSON list. Raises OSError, pydantic's ValidationError."""
    return TypeAdapter(list[MeasuredPoint]).validate_json(path.read_text())


def validate(curves: ServiceCurves, points: Sequence[MeasuredPoint]) -> tuple[Rows, dict[str, float]]:
    """Each measured point beside its simulation, with relative errors; ratios: simulated over measured, by mode."""
    rows: Rows = []
    for point in points:
        result = simulate(curves, point.workload, point.tenants, point.pool, point.mode)
        row: dict[str, Any] = {
            "what": "measured",
            "tenants": point.tenants,
            "mode": point.mode.value,
            "measured_seconds": point.wall_seconds,
            "simulated_seconds": result.wall_seconds,
            "error": result.wall_seconds / point.wall_seconds - 1,
            "measured_busy": point.busy_share,
            "simulated_busy": result.busy_share,
        }
        if point.busy_share is not None:
            row["busy_error"] = result.busy_share / point.busy_share - 1
        off = [name for name in ("error", "busy_error") if abs(row.get(name, 0.0)) > TOLERANCE]
        rows.append(row | {"flag": " ".join(off)})
    ratios = {
        f"simulated_over_measured_{mode}": median(1 + row["error"] for row in rows if row["mode"] == mode)
        for mode in dict.fromkeys(row["mode"] for row in rows)
    }
    return rows, ratios


def pools(devices: int, hosts: int) -> Iterator[PoolModel]:
    """Ways to use so many devices: all for both, or some for training."""
    yield PoolModel(devices=devices, hosts=hosts)
    trainers = {max(1, round(devices * share)) for share in TRAINING_SHARES}
    for training in sorted(t for t in trainers if t < devices):
        yield PoolModel(devices=devices - training, trainers=training, hosts=hosts)


def scale(curves: ServiceCurves, workload: WorkloadSpec, tenants: int, devices: Sequence[int], hosts: int) -> Rows:
    """A fleet of `tenants` on pools of each size, in several splits; the best of each size is marked."""
    rows: Rows = []
    for number in devices:
        found = []
        for pool in pools(number, hosts):
            result = simulate(curves, workload, tenants, pool)
            found.append({"what": "scaling", "devices": number, "split": pool.split, **_figures(result)})
        best = min(found, key=lambda row: row["wall_seconds"])
        rows += [row | {"best": "*" if row is best else ""} for row in found]
    return rows


def compare_policies(
    curves: ServiceCurves, workloads: Mapping[str, WorkloadSpec], tenants: Sequence[int]
) -> tuple[Rows, dict[str, float]]:
    """Each policy on one device; ratios: its wall time over that of `eager`."""
    rows: Rows = []
    for name, workload in workloads.items():
        for number in tenants:
            eager = simulate(curves, workload, number)
            for policy, settings in POLICIES.items():
                result = simulate(curves, workload, number, PoolModel(**settings)) if settings else eager
                over = result.wall_seconds / eager.wall_seconds
                mean = sum(result.tenant_seconds) / number
                row = {"what": "policy", "workload": name, "policy": policy, **_figures(result)}
                rows.append(row | {"over_eager": over, "mean_tenant_seconds": mean})
    ratios = {
        f"{policy}_over_eager": median(row["over_eager"] for row in rows if row["policy"] == policy)
        for policy in POLICIES
        if policy != "eager"
    }
    return rows, ratios


def _figures(result: Result) -> dict[str, Any]:
    return {
        "tenants": result.tenants,
        "wall_seconds": result.wall_seconds,
        "tokens_per_second": result.sampled_tokens / result.wall_seconds,
        "prefilled_tokens": result.prefilled_tokens,
        "adapters_per_step": result.adapters_per_step,
        "busy_share": result.busy_share,
        "busy": " ".join(f"{kind} {share:.2f}" for kind, share in result.busy.items()),
        "bottleneck": result.bottleneck,
        "utilisation": result.utilisation,
        "waits": result.waits,
        "longest_waits": result.longest_waits,
    }


def scaling_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over fleets and pools of more than one device: the best with trainers apart over all devices shared."""
    sizes = {(row["tenants"], row["devices"]) for row in rows if row["devices"] > 1}
    over = []
    for size in sizes:
        walls = {row["split"]: row["wall_seconds"] for row in rows if (row["tenants"], row["devices"]) == size}
        shared = walls.pop(f"{size[1]} shared")
        over.append(min(walls.values()) / shared)
    return {"best_split_over_shared": median(over)} if over else {}


def say_curves(curves: ServiceCurves) -> None:
    """Prints what the figures rest on."""
    print(f"curves: {curves.name}. {curves.note}".rstrip())
    if not curves.measured:
        print("These are no measurements of such a device: read the figures as ratios.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulates, prints and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, default=CURVES, metavar="FILE", help="service times of one device")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="runs of the real pool, to check the model by")
    parser.add_argument("--quick", action="store_true", help="smaller fleets and pools")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--workload", choices=WORKLOADS, default="tool", help="of the scaling table")
    parser.add_argument(
        "--device-speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="of the scaling table: each device is taken to be so many times as fast as the curves say",
    )
    parser.add_argument("--hosts", type=int, default=1, help="of the scaling table: steps orchestrated at once")
    options = parser.parse_args(arguments)
    for name in ("device_speed", "hosts"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: {getattr(options, name)} must be above 0")
    try:
        curves = read_curves(options.curves)
        points = read_measured(options.measured) if options.measured else []
    except (OSError, ValidationError) as error:
        parser.error(str(error))
    say_curves(curves)
    rows, ratios = validate(curves, points)
    if points:
        table(rows, COLUMNS["measured"].split(), f"measured and simulated; flagged beyond {TOLERANCE:.0%}")

    scaled = curves.scaled(options.device_speed)
    print()
    say_curves(scaled)
    workload = WorkloadSpec.of(WORKLOADS[options.workload])
    speed = f"device speed x {options.device_speed:g}"
    scaling: Rows = []
    for tenants in QUICK_TENANTS if options.quick else TENANTS:
        found = scale(scaled, workload, tenants, QUICK_DEVICES if options.quick else DEVICES, options.hosts)
        table(
            found, COLUMNS["scaling"].split(), f"{tenants} tenants, {options.workload}; split: rollout:trainer; {speed}"
        )
        scaling += found
    ratios |= scaling_ratios(scaling)

    workloads = {name: WorkloadSpec.of(w) for name, w in WORKLOADS.items()}
    policies, over_eager = compare_policies(
        curves, workloads, QUICK_POLICY_TENANTS if options.quick else POLICY_TENANTS
    )
    table(policies, COLUMNS["policy"].split(), "scheduling policies on one device")
    ratios |= over_eager
    table([{"ratio": name, "median": value} for name, value in ratios.items()], ["ratio", "median"], "ratios")
    winner, value = min(over_eager.items(), key=lambda item: item[1])
    gain = f"{winner.removesuffix('_over_eager')}, by {1 - value:.1%} of eager's wall time" if value < 1 else "eager"
    print(f"policy with the shortest wall time (median): {gain}")
    documents = {"curves": curves.model_dump(mode="json"), "device_speed": options.device_speed}
    write_json(options.json, "simulate", [*rows, *scaling, *policies], ratios, **documents)


if __name__ == "__main__":
    main()
