"""One tenant's loop: rollouts and updates side by side, at most `max_staleness` versions apart."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact

from flows.runtime import RUNTIME, STARTED, tracker
from marlaas.errors import JobTaken
from marlaas.jobs import Job, RolloutRef
from marlaas.specs import FleetSpec
from storage import read_commits
from tasks.publish import publish
from tasks.rollout import rollout
from tasks.update import update


@flow(name="train-tenant", flow_run_name="train-{tenant}", validate_parameters=True, persist_result=False)
async def train_tenant(
    fleet: FleetSpec, tenant: str, evaluation: Literal["event", "inline"] = "event"
) -> dict[str, Any]:
    """Trains one tenant's adapter to its last step, from wherever its last commit left it.

    evaluation: `event` leaves CoLD evaluation to whoever listens for `marlaas.adapter.published`; `inline` tells
    listeners that the caller does it. Returns what `summary` says of the job.
    """
    board, spec = RUNTIME.board, fleet.tenant(tenant)
    board.add(tenant, spec.steps)
    async with RUNTIME.pool(fleet.model, fleet.pool) as pool:
        with tracker() as tracking:
            job = await Job.open(fleet, tenant, pool, tracking, board, STARTED.get())
            board.set(tenant, step=job.step, stage="resumed" if job.step else "started")
            STARTED.get()()
            try:
                await _train(job, evaluation)
            except BaseException as error:
                status = "KILLED" if isinstance(error, asyncio.CancelledError) else "FAILED"
                board.set(tenant, stage=status.lower(), note=_reason(error))
                if not isinstance(error, JobTaken):  # then the MLflow run is the other runner's to end
                    await asyncio.shield(asyncio.to_thread(job.run.finish, status))
                raise
            finally:
                await asyncio.shield(job.close())
            await asyncio.to_thread(job.run.finish)
            result = await asyncio.to_thread(summary, job)
    board.set(tenant, stage="trained", reward=result["reward_last"])
    await acreate_markdown_artifact(_markdown(result), key=f"{tenant}-{job.layout.job}-training")
    return result


async def _train(job: Job, evaluation: str) -> None:
    rolled: asyncio.Queue[asyncio.Task[RolloutRef]] = asyncio.Queue(maxsize=job.spec.max_staleness + 1)
    first = job.step
    try:
        async with asyncio.TaskGroup() as stages:
            stages.create_task(_roll_out(job, first, rolled, stages), name=f"{job.name} rollouts")
            stages.create_task(_update(job, first, rolled, evaluation), name=f"{job.name} updates")
    except* BaseException as group:  # one reason is enough: the other stage was only cancelled for it
        raise _first(group) from None


async def _roll_out(
    job: Job, first: int, rolled: asyncio.Queue[asyncio.Task[RolloutRef]], stages: asyncio.TaskGroup
) -> None:
    """Starts each step's rollouts as soon as they may be: up to `max_staleness` steps are rolled out ahead at once."""
    stage = rollout.with_options(timeout_seconds=job.spec.stage_timeout_seconds)
    for step in range(first, job.spec.steps):
        await job.may_roll_out(step)
        await rolled.put(stages.create_task(stage(job, step), name=f"{job.name} rollout {step}"))


async def _update(job: Job, first: int, rolled: asyncio.Queue[asyncio.Task[RolloutRef]], evaluation: str) -> None:
    stage = update.with_options(timeout_seconds=job.spec.stage_timeout_seconds)
    await _publish_missed(job, evaluation)
    for step in range(first, job.spec.steps):
        metrics = await stage(job, await (await rolled.get()))
        if job.publication_due:
            await publish(job, job.version, step, metrics, evaluation)


async def _publish_missed(job: Job, evaluation: str) -> None:
    """Publishes the version that the job resumes with, if its runner ended between committing and publishing it."""
    if job.resumed is None or not job.publication_due:
        return
    known = await asyncio.to_thread(job.run.tracker.versions, job.layout.tenant, job.layout.job)
    if all(version.adapter_version != job.version for version in known):
        await publish(job, job.version, job.resumed.step, job.resumed.metrics, evaluation)


def summary(job: Job) -> dict[str, Any]:
    """What the job reached, from its commits: plain values, fit for a table."""
    commits = read_commits(job.store, job.layout)
    rewards = [c.metrics["reward_mean"] for c in commits]
    return {
        "tenant": job.layout.tenant,
        "job": job.layout.job,
        "steps": len(commits),
        "version": commits[-1].adapter_version,
        "adapter": job.layout.adapter_name(commits[-1].adapter_version),
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "sampled_tokens": int(sum(c.metrics["sampled_tokens"] for c in commits)),
        "environment_failures": int(sum(c.metrics["environment_failures"] for c in commits)),
        "dropped_conversations": int(sum(c.metrics["dropped_conversations"] for c in commits)),
        "split_conversations": int(sum(c.metrics["split_conversations"] for c in commits)),
        "saturated_share_last": commits[-1].metrics["saturated_share"],
        "mlflow_run": job.run.url,
    }


def _markdown(result: dict[str, Any]) -> str:
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in result.items())
    return f"# {result['adapter']}\n\n| | |\n| --- | --- |\n{rows}\n"


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _reason(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
