"""MLflow tracking: one run a job, one registered model a job, one model version a published adapter.

Metrics of steps go through a queue, so that a slow or absent server never holds up training. Everything that
decides what is published (versions, aliases, evaluations) is written at once and raises when MLflow refuses
it.
"""

from __future__ import annotations

import logging
import math
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow.exceptions
import requests
import tenacity
from mlflow.entities import Experiment, Metric, Param, RunTag
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.tracking import MlflowClient

from marlaas.errors import MarlaasError

logger = logging.getLogger(__name__)

_QUEUE_STEPS = 10_000
_ATTEMPTS = 5
_PERMANENT = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"}
_PARAMS_A_BATCH = 100
_SCORE_TAG = "score."


@dataclass(frozen=True)
class AdapterVersion:
    """A published adapter as the registry knows it.

    Attributes:
        adapter_version: the n of `{tenant}/{job}/v{n}`.
        mlflow_version: the registry's own number.
        step: training step that made it.
        reward: mean reward of that step; None if it was not given.
        url: its folder in the object store.
        aliases: "latest" (the highest) and, where set, "champion".
        scores: results of evaluations by name.
    """

    adapter_version: int
    mlflow_version: int
    step: int
    reward: float | None
    url: str
    aliases: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _StepLog:
    run_id: str
    label: str
    metrics: list[Metric]
    tags: list[RunTag]


class Tracker:
    """All tracking of one process, on one MLflow server. Thread-safe; use as a context manager or close it."""

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri.rstrip("/")
        self.client = MlflowClient(tracking_uri=self.tracking_uri, registry_uri=self.tracking_uri)
        self.lost_steps = 0
        self._closing = threading.Event()
        self._steps: queue.Queue[_StepLog] = queue.Queue(_QUEUE_STEPS)
        self._writer = threading.Thread(target=self._write_steps, name="mlflow-writer", daemon=True)
        self._writer.start()

    def job(self, tenant: str, job: str, params: Mapping[str, Any], tags: Mapping[str, str]) -> JobRun:
        """The run of a job in experiment `marlaas/{tenant}`, created on first use and found again on resume.

        The job's registered model names its run. Its creation is atomic on the server, so of several processes that
        start a job at once all get the same run.

        Args:
            params: nested mappings are flattened with dots. A parameter whose value differs from that of the first
                start is kept as the tag `resumed.{name}`, since MLflow's parameters never change.
            tags: of the run and, at creation, of the registered model.
        """
        experiment = self._experiment(tenant)
        identity = {**tags, "marlaas.tenant": tenant, "marlaas.job": job}
        run_id = self._known_run(model_name(tenant, job))
        if run_id is None:
            created = self.client.create_run(experiment.experiment_id, run_name=job, tags=identity)
            run_id = self._claim_model(tenant, job, created.info.run_id, identity)
        run = JobRun(self, tenant, job, run_id, experiment.experiment_id)
        run._resume(params, identity)
        return run

    def find(self, tenant: str, job: str) -> JobRun:
        """The run of a job that `job` has made before; neither its status nor its parameters are touched.

        Raises MarlaasError if the server knows no such job.
        """
        run_id = self._known_run(model_name(tenant, job))
        if run_id is None:
            raise MarlaasError(f"{tenant}/{job} is not known to MLflow at {self.tracking_uri}")
        return JobRun(self, tenant, job, run_id, self.client.get_run(run_id).info.experiment_id)

    def champion(self, tenant: str, job: str) -> tuple[int, float] | None:
        """Adapter version and score of the job's champion (NaN if a person chose it); None while there is none."""
        for version in self.versions(tenant, job):
            if "champion" in version.aliases:
                return version.adapter_version, version.scores.get("champion", math.nan)
        return None

    def versions(self, tenant: str, job: str) -> list[AdapterVersion]:
        """The job's published adapters, oldest first; empty when the job is unknown."""
        name = model_name(tenant, job)
        if (model := self._model(name)) is None:
            return []
        first: dict[str, ModelVersion] = {}  # two racing publishers may have registered a version twice
        for entry in sorted(self._model_versions(name), key=lambda entry: int(entry.version)):
            first.setdefault(entry.tags["adapter_version"], entry)
        aliases: dict[int, list[str]] = {}
        for alias, number in model.aliases.items():
            aliases.setdefault(int(number), []).append(alias)
        if first:
            aliases.setdefault(max(int(entry.version) for entry in first.values()), []).append("latest")
        return [_adapter_version(entry, tuple(aliases.get(int(entry.version), ()))) for entry in first.values()]

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all steps logged so far are written or given up; False if not."""
        with self._steps.all_tasks_done:
            return self._steps.all_tasks_done.wait_for(lambda: not self._steps.unfinished_tasks, timeout)

    def close(self, timeout: float = 30) -> None:
        """Write what is queued for up to `timeout` seconds, then give up the rest with a warning."""
        written = self.flush(timeout)
        self._closing.set()
        if not written:
            self.lost_steps += self._steps.qsize()
            logger.warning("MLflow at %s: gave up %d queued steps", self.tracking_uri, self._steps.qsize())

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _enqueue(self, entry: _StepLog) -> None:
        if self._closing.is_set():
            return self._lose(entry, "the tracker is closed")
        try:
            self._steps.put_nowait(entry)
        except queue.Full:
            return self._lose(entry, f"{_QUEUE_STEPS} steps are waiting already")

    def _write_steps(self) -> None:
        while not self._closing.is_set():
            try:
                entry = self._steps.get(timeout=0.5)
            except queue.Empty:
                continue
            try:
                self._retrying()(self.client.log_batch, entry.run_id, metrics=entry.metrics, tags=entry.tags)
            except Exception as error:  # isolation boundary: tracking never stops training or later steps
                self._lose(entry, str(error))
            finally:
                self._steps.task_done()

    def _retrying(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(_ATTEMPTS) | tenacity.stop_when_event_set(self._closing),
            wait=tenacity.wait_exponential_jitter(0.5, max=8),
            sleep=tenacity.sleep_using_event(self._closing),
            reraise=True,
        )

    def _lose(self, entry: _StepLog, reason: str) -> None:
        logger.warning("MLflow at %s: metrics of %s are lost: %s", self.tracking_uri, entry.label, reason)
        self.lost_steps += 1  # after the warning: whoever sees the count finds the reason in the log

    def _experiment(self, tenant: str) -> Experiment:
        name = f"marlaas/{tenant}"
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None:
            with _tolerate("RESOURCE_ALREADY_EXISTS"):
                self.client.create_experiment(name, tags={"marlaas.tenant": tenant})
            experiment = self.client.get_experiment_by_name(name)
            assert experiment is not None
        if experiment.lifecycle_stage == "deleted":
            self.client.restore_experiment(experiment.experiment_id)
        return experiment

    def _model(self, name: str) -> RegisteredModel | None:
        with _tolerate("RESOURCE_DOES_NOT_EXIST"):
            return self.client.get_registered_model(name)
        return None

    def _known_run(self, name: str) -> str | None:
        """The run that the registered model names, unless somebody has deleted it."""
        model = self._model(name)
        run_id = model.tags.get("marlaas.run") if model else None
        if run_id is not None:
            with _tolerate("RESOURCE_DOES_NOT_EXIST"):
                if self.client.get_run(run_id).info.lifecycle_stage == "active":
                    return run_id
        return None

    def _claim_model(self, tenant: str, job: str, run_id: str, tags: Mapping[str, str]) -> str:
        """Create the job's registered model naming `run_id`; the run that it names in the end."""
        name = model_name(tenant, job)
        description = f"LoRA adapters of job {job} of tenant {tenant}, trained by MARLaaS"
        try:
            self.client.create_registered_model(name, {**tags, "marlaas.run": run_id}, description)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            if (other := self._known_run(name)) is not None:
                self.client.delete_run(run_id)
                return other
            self.client.set_registered_model_tag(name, "marlaas.run", run_id)
        return run_id

    def _model_versions(self, name: str, condition: str = "") -> Iterator[ModelVersion]:
        token = None
        while True:
            page = self.client.search_model_versions(f"name='{name}'{condition}", page_token=token)
            yield from (entry for entry in page if "adapter_version" in entry.tags)
            if not (token := page.token):
                return


@dataclass(frozen=True)
class JobRun:
    """The MLflow run and the registered model of one job; made by `Tracker.job`."""

    tracker: Tracker
    tenant: str
    job: str
    run_id: str
    experiment_id: str

    @property
    def url(self) -> str:
        """The run's page in MLflow's UI."""
        return f"{self.tracker.tracking_uri}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    @property
    def model_name(self) -> str:
        """The registered model: `models:/{model_name}@champion` is a PEFT folder."""
        return model_name(self.tenant, self.job)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a training step; never blocks and never raises for MLflow's sake.

        MLflow stores infinities as 1.8e308, which ruins every chart, so a value that is not finite is logged as NaN
        and the tag `nonfinite.{name}` says what it was.
        """
        now = int(time.time() * 1000)
        clean = {_key(name): float(value) for name, value in metrics.items()}
        odd = {name: value for name, value in clean.items() if not math.isfinite(value)}
        entries = [Metric(name, math.nan if name in odd else value, now, step) for name, value in clean.items()]
        tags = [RunTag(f"nonfinite.{name}", f"{value} at step {step}") for name, value in odd.items()]
        self.tracker._enqueue(_StepLog(self.run_id, f"{self.tenant}/{self.job} step {step}", entries, tags))

    def register_adapter(
        self, version: int, files: Mapping[str, bytes], url: str, step: int, metrics: Mapping[str, float]
    ) -> AdapterVersion:
        """Publish adapter `v{version}`; the registry's "latest" moves to it. Publishing it again changes nothing.

        Args:
            files: its PEFT folder, by file name; stored as artifacts `adapters/v{version}`.
            url: its folder in the object store.
            metrics: become tags of the model version; "reward" is the one that `AdapterVersion` shows.
        """
        if (known := self._find(version)) is not None:
            return known
        source = self._log_files(f"adapters/v{version}", files)
        tags = {_key(name): repr(float(value)) for name, value in metrics.items()}
        tags |= {"adapter_version": str(version), "step": str(step), "url": url}
        self.tracker.client.create_model_version(self.model_name, source, self.run_id, tags, await_creation_for=0)
        registered = self._find(version)
        assert registered is not None
        return registered

    def log_evaluation(self, version: int, scores: Mapping[str, float]) -> None:
        """Scores of adapter `v{version}`: metrics `evaluation/{name}` at its step, and tags of its model version."""
        entry, client = self._require(version), self.tracker.client
        now = int(time.time() * 1000)
        metrics = [Metric(_key(f"evaluation/{key}"), float(x), now, entry.step) for key, x in scores.items()]
        client.log_batch(self.run_id, metrics=metrics)
        for key, score in scores.items():
            self._tag_score(entry, key, score)

    def log_report(self, version: int, files: Mapping[str, bytes]) -> str:
        """Store the evaluation report of adapter `v{version}`; its artifact URI."""
        return self._log_files(f"evaluations/v{version}", files)

    def set_champion(self, version: int, score: float) -> None:
        """Make adapter `v{version}` what `models:/{tenant}.{job}@champion` loads."""
        entry = self._require(version)
        self._tag_score(entry, "champion", score)
        number = str(entry.mlflow_version)
        self.tracker.client.set_registered_model_alias(self.model_name, "champion", number)

    def finish(self, status: str = "FINISHED", timeout: float = 30) -> None:
        """Write what is queued, then end the run as "FINISHED", "FAILED" or "KILLED"."""
        if status not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError(f"status={status!r}: must be FINISHED, FAILED or KILLED")
        if not self.tracker.flush(timeout):
            logger.warning("MLflow at %s: steps are still queued after %g s", self.tracker.tracking_uri, timeout)
        self.tracker.client.set_terminated(self.run_id, status)

    def _resume(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        client = self.tracker.client
        run = client.get_run(self.run_id)
        client.update_run(self.run_id, status="RUNNING")
        wanted = {_key(name): str(value) for name, value in _flatten(params)}
        known = run.data.params
        changed = {name: value for name, value in wanted.items() if known.get(name, value) != value}
        entries = [Param(name, value) for name, value in wanted.items() if name not in known]
        notes = {**tags, **{f"resumed.{name}": value for name, value in changed.items()}}
        client.log_batch(self.run_id, tags=[RunTag(name, str(value)) for name, value in notes.items()])
        for start in range(0, len(entries), _PARAMS_A_BATCH):
            client.log_batch(self.run_id, params=entries[start : start + _PARAMS_A_BATCH])

    def _log_files(self, path: str, files: Mapping[str, bytes]) -> str:
        with tempfile.TemporaryDirectory(prefix="marlaas-artifacts-") as folder:
            for name, content in files.items():
                target = Path(folder) / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            self.tracker.client.log_artifacts(self.run_id, folder, path)
        return f"{self.tracker.client.get_run(self.run_id).info.artifact_uri}/{path}"

    def _find(self, version: int) -> AdapterVersion | None:
        known = self.tracker.versions(self.tenant, self.job)
        return next((entry for entry in known if entry.adapter_version == version), None)

    def _require(self, version: int) -> AdapterVersion:
        if (entry := self._find(version)) is None:
            raise ValueError(f"version={version}: no such adapter version of {self.tenant}/{self.job}")
        return entry

    def _tag_score(self, entry: AdapterVersion, name: str, score: float) -> None:
        key, number = _key(_SCORE_TAG + name), str(entry.mlflow_version)
        self.tracker.client.set_model_version_tag(self.model_name, number, key, repr(float(score)))


def model_name(tenant: str, job: str) -> str:
    """The registered model of a job. Names are DNS labels, so the dot keeps it unique."""
    return f"{tenant}.{job}"


def _adapter_version(entry: ModelVersion, aliases: tuple[str, ...]) -> AdapterVersion:
    tags = entry.tags
    return AdapterVersion(
        adapter_version=int(tags["adapter_version"]),
        mlflow_version=int(entry.version),
        step=int(tags["step"]),
        reward=float(tags["reward"]) if "reward" in tags else None,
        url=tags["url"],
        aliases=aliases,
        scores={
            name.removeprefix(_SCORE_TAG): float(value) for name, value in tags.items() if name.startswith(_SCORE_TAG)
        },
    )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _key(name: str) -> str:
    """`name` with what MLflow's keys may not contain replaced, since one bad key makes it refuse a whole batch."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _may_pass(error: BaseException) -> bool:
    """Whether trying again can help."""
    if isinstance(error, mlflow.exceptions.MlflowException):
        return error.error_code not in _PERMANENT
    return isinstance(error, (requests.RequestException, OSError))


@contextmanager
def _tolerate(code: str) -> Iterator[None]:
    """Swallow MLflow's error of that code: it is the expected answer."""
    try:
        yield
    except mlflow.exceptions.MlflowException as error:
        if error.error_code != code:
            raise
