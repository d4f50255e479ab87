"""The update stage of one step: a rollout shard in; a checkpoint and the step's commit out."""

from __future__ import annotations

import asyncio
import time
import uuid

from prefect import task

from marlaas.checkpoints import encode_state
from marlaas.errors import JobTaken
from marlaas.jobs import Job, RolloutRef
from marlaas.rollouts import training_batch
from storage import Commit, StepAlreadyCommitted, decode_rollouts, read_commit, write_commit
from tasks.options import STAGE


@task(name="update", task_run_name="update-{rollouts.step}", **STAGE)
async def update(job: Job, rollouts: RolloutRef) -> dict[str, float]:
    """Trains on the shard and commits the step; returns its metrics. Raises JobTaken if another runner has."""
    job.board.set(job.spec.name, stage="update")
    started = time.time()
    rows = await asyncio.to_thread(lambda: decode_rollouts(job.store.get(rollouts.key)))
    batch = training_batch(job.name, rows, job.version - rollouts.version)
    result = await job.pool.update(batch)
    trained = time.time()
    state = await job.pool.state(job.name)
    await job.advance(result.version)
    own = {"update_seconds": trained - started, "update_device_seconds": result.device_seconds}
    metrics = result.metrics | rollouts.metrics | own
    tokens = int(sum(len(row.token_ids) for row in rows))
    job.record("update", rollouts.step, started, trained, tokens=tokens, device_seconds=result.device_seconds)
    cursor = {"next": rollouts.cursor}
    data = await asyncio.to_thread(
        encode_state, state, job.spec, job.layout.job, rollouts.step, cursor, job.pool.base_fingerprint
    )
    await asyncio.to_thread(_commit, job, rollouts, result.version, data, metrics)
    await asyncio.to_thread(job.write_records)
    job.run.log_step(rollouts.step, metrics)
    first = {"reward_first": metrics["reward_mean"]} if rollouts.step == 0 else {}
    job.board.set(job.spec.name, step=rollouts.step + 1, reward=metrics["reward_mean"], **first)
    return metrics


def _commit(job: Job, rollouts: RolloutRef, version: int, checkpoint: bytes, metrics: dict[str, float]) -> None:
    """Checkpoint first, then the commit that makes the step exist; then checkpoints past keeping go."""
    step, key = rollouts.step, job.layout.checkpoint(rollouts.step, uuid.uuid4().hex[:12])
    job.store.put(key, checkpoint)
    commit = Commit(
        tenant=job.layout.tenant,
        job=job.layout.job,
        step=step,
        adapter_version=version,
        rollouts=[rollouts.key],
        rollout_versions=[rollouts.version],
        checkpoint=key,
        metrics=metrics,
    )
    try:
        write_commit(job.store, job.layout, commit)
    except StepAlreadyCommitted:
        job.store.delete(key)
        raise JobTaken(f"another runner of {job.name} has committed step {step}; this one ends") from None
    if step >= job.spec.keep_checkpoints:
        job.store.delete(read_commit(job.store, job.layout, step - job.spec.keep_checkpoints).checkpoint)
