"""The publish stage: the newest version as a PEFT folder, a registered model version, and an event."""

from __future__ import annotations

import asyncio
import time

from prefect import task
from prefect.events import emit_event

from marlaas.jobs import Job
from storage import write_adapter
from tasks.options import STAGE

PUBLISHED = "marlaas.adapter.published"


@task(name="publish", task_run_name="publish-v{version}", **STAGE)
async def publish(job: Job, version: int, step: int, metrics: dict[str, float], evaluation: str) -> str:
    """Publishes version `version`; returns its name. evaluation: who evaluates it, `event` or `inline`."""
    job.board.set(job.spec.name, stage="publish")
    started = time.time()
    files = await job.pool.export(job.name)
    name, url = job.layout.adapter_name(version), job.store.url(job.layout.adapter(version))
    await asyncio.to_thread(write_adapter, job.store, job.layout, version, files)
    shown = {"reward": metrics["reward_mean"], "kl_to_base": metrics["kl_to_base"]}
    await asyncio.to_thread(job.run.register_adapter, version, files, url, step, shown)
    job.record("publish", step, started, time.time())
    emit_event(
        PUBLISHED,
        resource={
            "prefect.resource.id": f"marlaas.adapter.{name.replace('/', '.')}",
            "prefect.resource.name": name,
            "marlaas.evaluation": evaluation if job.spec.evaluation.enabled else "off",
        },
        payload={
            "tenant": job.layout.tenant,
            "job": job.layout.job,
            "version": version,
            "step": step,
            "store": job.store_spec.model_dump(mode="json"),
            "url": url,
            "reward_mean": metrics["reward_mean"],
        },
    )
    return name
