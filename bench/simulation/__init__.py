"""A discrete-event model of the pool: what a fleet takes on devices that are not here, and which schedule is best."""

from bench.simulation.curves import ServiceCurves, read_curves
from bench.simulation.model import Mode, PoolModel, Result, simulate
from bench.simulation.workload import WorkloadSpec

__all__ = ["Mode", "PoolModel", "Result", "ServiceCurves", "WorkloadSpec", "read_curves", "simulate"]
