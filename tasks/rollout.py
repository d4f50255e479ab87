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
    started = time.perf_counter()
    examples, cursor = await job.environment.training(
        job.spec.prompts_per_step, job.spec.seed, job.cursor, job.held_out
    )
    async with job.pool.lease(job.name) as adapter:
        collected = await collect(job.pool, job.environment, job.spec, step, examples, adapter)
    job.cursor = cursor
    seconds = time.perf_counter() - started
    # A shard's name is its writer's own: two runners of one job never overwrite each other's rollouts.
    key = job.layout.rollout(step, uuid.uuid4().hex[:12])
    data = await asyncio.to_thread(encode_rollouts, collected.rollouts)
    await asyncio.to_thread(job.store.put, key, data)
    tokens = sum(sum(r.loss_mask) for r in collected.rollouts)
    job.board.set(job.spec.name, tokens_per_second=tokens / seconds)
    return RolloutRef(
        step=step,
        key=key,
        version=adapter.version,
        samples=len(collected.rollouts),
        tokens=int(tokens),
        cursor=cursor,
        failures=sum(collected.failures.values()),
        rollout_seconds=seconds,
        environment_seconds=collected.environment_seconds,
    )
