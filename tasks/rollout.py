"""The rollout and interact stages of one step: conversations in, a Parquet shard of rollouts out.

They are one task run, because each conversation alternates between the two at its own pace.
"""

from __future__ import annotations

import asyncio
import time
import uuid

from prefect import task

from marlaas.jobs import Job, RolloutRef
from marlaas.rollouts import collect
from storage import encode_rollouts
from tasks.options import STAGE


@task(name="rollout", task_run_name="rollout-{step}", **STAGE)
async def rollout(job: Job, step: int) -> RolloutRef:
    """Samples the step's prompts with the newest adapter and writes the scored rollouts."""
    job.board.set(job.spec.name, stage="rollout")
    started = time.time()
    examples, cursor = await job.draw(step)
    async with job.pool.lease(job.name) as adapter:
        found = await collect(job.pool, job.environment, job.spec, step, examples, adapter)
    seconds = time.time() - started
    # A shard's name is its writer's own: two runners of one job never overwrite each other's rollouts.
    key = job.layout.rollout(step, uuid.uuid4().hex[:12])
    data = await asyncio.to_thread(encode_rollouts, found.rollouts)
    await asyncio.to_thread(job.store.put, key, data)
    tokens = int(sum(sum(r.loss_mask) for r in found.rollouts))
    job.board.set(job.spec.name, tokens_per_second=tokens / seconds)
    job.record("rollout", step, started, time.time(), tokens=tokens, device_seconds=found.device_seconds)
    job.record("interact", step, *found.interacting, calls=found.calls, waited_seconds=found.environment_seconds)
    return RolloutRef(
        step=step,
        key=key,
        version=adapter.version,
        cursor=cursor,
        metrics={
            "rollout_seconds": seconds,
            "rollout_device_seconds": found.device_seconds,
            "environment_seconds": found.environment_seconds,
            "environment_failures": float(sum(found.failures.values())),
            "dropped_conversations": float(found.dropped),
            "split_conversations": float(found.split),
            "reused_tokens": float(found.reused_tokens),
        },
    )
