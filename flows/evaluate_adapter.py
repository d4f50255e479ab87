"""CoLD evaluation of published adapters: downstream of training, by event, on a schedule, or by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact, acreate_table_artifact

from flows.runtime import RUNTIME, tracker
from marlaas.errors import MarlaasError
from marlaas.evaluation import EvaluationReport, render_markdown, report_table
from marlaas.job_records import read_record
from marlaas.specs import StoreSpec
from storage import JobLayout, ObjectNotFound, ObjectStore, list_adapters, list_jobs
from tasks.evaluate import evaluate, report


@flow(name="evaluate-adapter", flow_run_name="evaluate-{tenant}", persist_result=False)
async def evaluate_adapter(
    store: StoreSpec, tenant: str, job: str, version: int | None = None, force: bool = False
) -> dict[str, Any]:
    """Evaluates one published version (default: the newest) against the base model, greedy and with CoLD.

    A version that has a report is not evaluated again, unless forced. Returns `scores` of the report.
    """
    opened, layout = store.open(), JobLayout(tenant, job)
    version = await asyncio.to_thread(_newest, opened, layout) if version is None else version
    result = None if force else await asyncio.to_thread(read_report, opened, layout, version)
    if result is None:
        record = await asyncio.to_thread(read_record, opened, layout)
        # The port belongs to whoever trains; an evaluation may run beside it.
        async with RUNTIME.pool(record.model, record.pool.model_copy(update={"metrics_port": None})) as pool:
            await evaluate(opened, layout, record, version, pool)
        with tracker() as tracking:
            run = await asyncio.to_thread(tracking.find, tenant, job)
            result = await report(opened, layout, record, version, run)
    key = f"{tenant}-{job}-v{version}"
    await acreate_markdown_artifact(render_markdown(result), key=f"{key}-evaluation")
    await acreate_table_artifact(report_table(result), key=f"{key}-accuracy", description=result.headline)
    return scores(result, opened, layout)


@flow(name="evaluate-pending", persist_result=False)
async def evaluate_pending(store: StoreSpec) -> list[dict[str, Any]]:
    """Evaluates the newest version of every job that has no report yet; made to run on a schedule.

    One that fails does not stop the others; raises MarlaasError after all of them.
    """
    opened = store.open()
    results, failed = [], []
    for layout in await asyncio.to_thread(list_jobs, opened):
        try:
            version = await asyncio.to_thread(_pending, opened, layout)
            if version is not None:
                results.append(await evaluate_adapter(store, layout.tenant, layout.job, version))
        except Exception as error:  # the boundary between jobs: one's failure is told, not the others' end
            failed.append(f"{layout.tenant}/{layout.job}: {error}")
    if failed:
        raise MarlaasError("; ".join(failed))
    return results


def read_report(store: ObjectStore, layout: JobLayout, version: int) -> EvaluationReport | None:
    """The report of a version; None if it has not been evaluated."""
    try:
        return EvaluationReport.model_validate_json(store.get(layout.evaluation(version, "report.json")))
    except ObjectNotFound:
        return None


def scores(result: EvaluationReport, store: ObjectStore, layout: JobLayout) -> dict[str, Any]:
    """The report's accuracies as plain values, and where it lies."""
    return {
        "tenant": result.tenant,
        "adapter": result.title,
        **{decoding: result.result(decoding).accuracy.share for decoding in ("base", "greedy", "cold")},
        "commonest": None if result.commonest is None else result.commonest.share,
        "examples": result.examples,
        "headline": result.headline,
        "report": store.url(layout.evaluation(result.version, "report.html")),
    }


def _pending(store: ObjectStore, layout: JobLayout) -> int | None:
    """The newest version of a job, if it wants evaluation and has none."""
    versions = list_adapters(store, layout)
    if not versions or read_report(store, layout, versions[-1]) is not None:
        return None
    return versions[-1] if read_record(store, layout).tenant.evaluation.enabled else None


def _newest(store: ObjectStore, layout: JobLayout) -> int:
    versions = list_adapters(store, layout)
    if not versions:
        raise MarlaasError(f"{layout.tenant}/{layout.job} has no published adapter to evaluate")
    return versions[-1]
