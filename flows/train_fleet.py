"""A whole fleet at once: every tenant trains, and is evaluated as soon as it has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from prefect import flow

from flows.evaluate_adapter import evaluate_adapter
from flows.runtime import RUNTIME, STARTED
from flows.train_tenant import train_tenant
from marlaas.errors import MarlaasError
from marlaas.specs import FleetSpec

STARTS = 4
"""Tenants that open their jobs at once. Were it all of them, none would train before the last one's was open."""

logger = logging.getLogger(__name__)


@flow(name="train-fleet", flow_run_name="{fleet.name}", persist_result=False)
async def train_fleet(fleet: FleetSpec) -> list[dict[str, Any]]:
    """Trains and evaluates all tenants side by side; one that fails does not stop the others.

    Returns a row a tenant: its training summary and its scores, or its error.
    """
    for tenant in fleet.tenants:
        RUNTIME.board.add(tenant.name, tenant.steps)
    async with RUNTIME.pool(fleet.model, fleet.pool):
        places = asyncio.Semaphore(STARTS)
        rows = await asyncio.gather(*(_tenant(fleet, t.name, places) for t in fleet.tenants))
    failed = [r for r in rows if "error" in r]
    if len(failed) == len(rows):
        raise MarlaasError("; ".join(f"{r['tenant']}: {r['error']}" for r in failed))
    return rows


async def _tenant(fleet: FleetSpec, name: str, places: asyncio.Semaphore) -> dict[str, Any]:
    spec = fleet.tenant(name)
    try:
        row = await _train(fleet, name, places)
        if spec.evaluation.enabled:
            RUNTIME.board.set(name, stage="evaluate")
            row |= await evaluate_adapter(fleet.store, name, fleet.job(spec), row["version"])
    except Exception as error:  # the boundary between tenants: one's failure is a row, not the others' end
        RUNTIME.board.set(name, stage="failed", note=str(error).split("\n")[0])
        if not isinstance(error, MarlaasError):
            logger.exception("tenant %s failed", name)
        return {"tenant": name, "error": str(error)}
    RUNTIME.board.set(name, stage="done")
    return row


async def _train(fleet: FleetSpec, name: str, places: asyncio.Semaphore) -> dict[str, Any]:
    """Trains the tenant; it has one of the places until its job is open, or waits for more than a place."""
    with contextlib.ExitStack() as place:
        await places.acquire()
        place.callback(places.release)
        STARTED.set(place.close)
        return await train_tenant(fleet, name, evaluation="inline")
