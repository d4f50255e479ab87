"""The evaluate stage: an adapter version on held-out examples; Parquet rows, a report and scores out."""

from __future__ import annotations

import asyncio
import platform
import time
import uuid
from datetime import UTC, datetime
from importlib.metadata import version as installed

from prefect import task

from marlaas.environments import open_environment
from marlaas.evaluation import EvaluationReport, build_report, render_html
from marlaas.evaluation.decode import decode_examples
from marlaas.evaluation.schema import Decoding
from marlaas.job_records import JobRecord
from marlaas.pool import Pool
from marlaas.specs import EnvironmentSpec, TenantSpec
from marlaas.tracking import JobRun
from storage import (
    JobLayout,
    ObjectStore,
    StageRecord,
    decode_evaluation,
    encode_evaluation,
    read_adapter,
    read_commits,
    write_stages,
)
from tasks.options import STAGE

DECODINGS: tuple[Decoding, ...] = ("base", "greedy", "cold")


@task(name="evaluate", task_run_name="evaluate-v{version}", **STAGE)
async def evaluate(store: ObjectStore, layout: JobLayout, record: JobRecord, version: int, pool: Pool) -> None:
    """Writes one Parquet object a decoding."""
    tenant, started = record.tenant, time.time()
    files = await asyncio.to_thread(read_adapter, store, layout, version)
    environment = open_environment(tenant.environment)
    try:
        examples = await environment.held_out(tenant.evaluation.examples, tenant.evaluation.seed)
        async with pool.lease_files(layout.adapter_name(version), files) as adapter:
            decoded = await decode_examples(pool, environment, tenant, examples, adapter.name)
    finally:
        await environment.close()
    for decoding, found in decoded.rows.items():
        data = await asyncio.to_thread(encode_evaluation, found)
        await asyncio.to_thread(store.put, layout.evaluation(version, f"{decoding}.parquet"), data)
    stage = StageRecord(
        tenant=layout.tenant,
        job=layout.job,
        stage="evaluate",
        step=max(0, version - 1),
        start=started,
        end=time.time(),
        tokens=sum(row.tokens for found in decoded.rows.values() for row in found),
        device_seconds=decoded.device_seconds,
    )
    await asyncio.to_thread(write_stages, store, layout, f"evaluate-v{version}-{uuid.uuid4().hex[:12]}", [stage])


@task(name="report", task_run_name="report-v{version}", **STAGE)
async def report(
    store: ObjectStore, layout: JobLayout, record: JobRecord, version: int, run: JobRun
) -> EvaluationReport:
    """Builds the report from the rows, stores it, and tells MLflow; report.json comes last and marks it complete."""
    result = await asyncio.to_thread(_build, store, layout, record, version)
    files = {"report.html": render_html(result).encode(), "report.json": result.model_dump_json(indent=2).encode()}
    for name, data in files.items():
        await asyncio.to_thread(store.put, layout.evaluation(version, name), data)
    await asyncio.to_thread(_track, run, version, result, files)
    return result


def _build(store: ObjectStore, layout: JobLayout, record: JobRecord, version: int) -> EvaluationReport:
    tenant = record.tenant
    commits = [c for c in read_commits(store, layout) if c.adapter_version <= version]
    return build_report(
        tenant=layout.tenant,
        job=layout.job,
        version=version,
        base_model=record.model.source,
        environment=_environment(tenant.environment),
        alpha=tenant.evaluation.alpha,
        beta=tenant.evaluation.beta,
        confidence=tenant.evaluation.confidence,
        created_at=datetime.now(UTC),
        rows={d: decode_evaluation(store.get(layout.evaluation(version, f"{d}.parquet"))) for d in DECODINGS},
        curve=[{"step": float(c.step), **c.metrics} for c in commits],
        settings=_settings(tenant),
        provenance={
            "adapter": store.url(layout.adapter(version)),
            "base model fingerprint": record.base_fingerprint,
            "marlaas": installed("marlaas"),
            "torch": installed("torch"),
            "machine": f"{platform.machine()}, {record.model.device}, {record.model.dtype}",
        },
    )


def _environment(environment: EnvironmentSpec) -> str:
    if environment.kind == "reasoning_gym":
        settings = ", ".join(f"{k} {v}" for k, v in environment.settings.items())
        return f"reasoning_gym {environment.dataset}" + (f" ({settings})" if settings else "")
    if environment.kind == "tools":
        return f"{_environment(environment.questions)} with tools {', '.join(tool.name for tool in environment.tools)}"
    return f"{environment.kind} {environment.path if environment.kind == 'dataset' else environment.entry}"


def _settings(tenant: TenantSpec) -> dict[str, str]:
    lora, optimizer, sampling = tenant.lora, tenant.optimizer, tenant.sampling
    return {
        "algorithm": f"{tenant.algorithm.name}, {tenant.prompts_per_step} prompts x {tenant.group_size} samples a step",
        "steps": str(tenant.steps),
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}",
        "optimizer": f"AdamW, learning rate {optimizer.learning_rate:g}, {optimizer.schedule}",
        "sampling": f"temperature {sampling.temperature:g}, at most {sampling.max_tokens} tokens",
        "max staleness": str(tenant.max_staleness),
        "held-out examples": f"{tenant.evaluation.examples}, seed {tenant.evaluation.seed}",
        "seed": str(tenant.seed),
    }


def _track(run: JobRun, version: int, result: EvaluationReport, files: dict[str, bytes]) -> None:
    scores = {f"accuracy_{d}": result.result(d).accuracy.share for d in DECODINGS}
    if result.commonest is not None:
        scores["accuracy_commonest"] = result.commonest.share
    run.log_evaluation(version, scores)
    run.log_report(version, files)
    best = run.tracker.champion(run.tenant, run.job)
    if best is None or scores["accuracy_greedy"] >= best[1]:
        run.set_champion(version, scores["accuracy_greedy"])
