"""What a user may ask for: the fleet and its tenants, with the limits of every field."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from marlaas.errors import SpecError
from marlaas.training.losses import algorithm_names

if TYPE_CHECKING:
    from storage import ObjectStore

DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SECRET_OPTION = re.compile(r"(key|secret|token|password|key_id)$", re.IGNORECASE)
VERSIONS_A_JOB = 3  # resident for sampling, on average: being sampled from, newest, and being made
TOOL_NAME = r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _dns_label(value: str) -> str:
    if not re.fullmatch(DNS_LABEL, value):
        raise ValueError("must be a DNS label: 1 to 63 of a-z, 0-9 and '-', with no '-' at either end")
    return value


def _algorithm(value: str) -> str:
    if value not in algorithm_names():
        raise ValueError(f"must be one of {', '.join(algorithm_names())}")
    return value


Name = Annotated[str, AfterValidator(_dns_label)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class Spec(BaseModel):
    """Base of all specs: unknown keys are refused, values never change after loading.

    Validators of a whole model say `field: what is wrong with it`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSpec(Spec):
    """The base model that all tenants share."""

    source: str = Field(
        "smollm2-135m-instruct",
        min_length=1,
        description="alias, folder with config.json, .gguf file, or hub id",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: str = Field("auto", pattern=r"^(auto|cpu|(cuda|npu)(:\d+)?)$")
    cache: Path = Path("~/.cache/marlaas")


class StoreSpec(Spec):
    """Where artifacts go: a folder, or s3://bucket/prefix with s3fs options."""

    url: str = Field(".marlaas/store", min_length=1)
    options: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="s3fs options; a value `env:NAME` is read where it is used"
    )

    @model_validator(mode="after")
    def _secrets_stay_outside(self) -> StoreSpec:
        for name, value in _leaves(self.options, "options"):
            if _SECRET_OPTION.search(name) and not str(value).startswith("env:"):
                raise ValueError(f"{name}: must be env:NAME, the variable that holds it, and not the secret")
        return self

    def open(self) -> ObjectStore:
        """Opens the store. Raises SpecError when a variable is not set; storage.InvalidName for a bad URL."""
        from storage import open_store

        return open_store(self.url, _resolved(self.options, "store.options"))


def _leaves(options: dict[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{at}.{name}")
        else:
            yield f"{at}.{name}", value


def _resolved(options: dict[str, Any], at: str) -> dict[str, Any]:
    """The options with each `env:NAME` replaced by the variable's value."""
    resolved = {}
    for name, value in options.items():
        if isinstance(value, dict):
            value = _resolved(value, f"{at}.{name}")
        elif isinstance(value, str) and value.startswith("env:"):
            variable = value.removeprefix("env:")
            if variable not in os.environ:
                raise SpecError("fleet", [f"{at}.{name}: the variable {variable!r} is not set"])
            value = os.environ[variable]
        resolved[name] = value
    return resolved


class ServicesSpec(Spec):
    """PostgreSQL, the Prefect server and the MLflow server: embedded, or somebody else's by URL."""

    state: Path = Path(".marlaas")
    database: str = Field("embedded", pattern=r"^(embedded|postgresql://.+)$", repr=False)
    prefect_api_url: str | None = Field(None, pattern=r"^https?://.+")
    mlflow_tracking_uri: str | None = Field(None, pattern=r"^https?://.+")
    max_start_seconds: float = Field(120, gt=0, le=3600)


class PoolSpec(Spec):
    """The shared pool: what fits on it at once."""

    max_rank: int = Field(32, ge=1, le=256)
    max_adapters: int = Field(32, ge=1, le=1024, description="jobs on the device at once; others wait on the host")
    max_jobs: int = Field(1024, ge=1, description="open jobs; more wait to be admitted")
    max_sequences: int = Field(256, ge=1, le=4096, description="sequences in the running batch")
    max_sequence_tokens: int = Field(256, ge=16, le=131072, description="prompt and completion together")
    kept_tokens: int = Field(
        32768, ge=0, description="of conversations that wait for a tool, whose keys and values are kept"
    )
    train_tokens: int = Field(8192, ge=128, description="tokens of one training micro-batch, padding included")
    coalesce_seconds: float = Field(0.05, ge=0, le=10, description="how long an update waits for company")
    threads: int | None = Field(None, ge=1, description="CPU threads of the device; default: all cores")
    address: str | None = Field(
        None,
        pattern=r"^(ray://)?[\w.-]+:\d+$",
        description="a Ray pool, as `marlaas pool up` prints it; default: local",
    )
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="serve Prometheus metrics on this port of 127.0.0.1"
    )


class PromptSpec(Spec):
    """How a question becomes chat messages. `template` must contain `{question}`."""

    system: str | None = None
    template: str = "{question}"
    examples: list[tuple[str, str]] = Field(
        default_factory=list, max_length=16, description="earlier turns shown to the model: question, reply"
    )

    @model_validator(mode="after")
    def _template_has_question(self) -> PromptSpec:
        if "{question}" not in self.template:
            raise ValueError(f"template: {self.template!r} must contain {{question}}")
        return self


class AnswerSpec(Spec):
    """How the answer is taken out of a completion before it is scored."""

    extract: Literal["whole", "last_number", "answer_tag", "last_line", "boxed", "pattern"] = "whole"
    pattern: str | None = Field(None, description="regular expression whose first group is the answer")

    @model_validator(mode="after")
    def _pattern_compiles(self) -> AnswerSpec:
        if (self.extract == "pattern") != (self.pattern is not None):
            raise ValueError("pattern: must be given when extract is 'pattern', and only then")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"pattern: {self.pattern!r} is not a regular expression: {error}") from None
            if groups < 1:
                raise ValueError(f"pattern: {self.pattern!r} must have a group that captures the answer")
        return self


class EnvironmentBase(Spec):
    """What every environment has: a prompt, an answer, a time limit and a limit on concurrency."""

    prompt: PromptSpec = PromptSpec()
    answer: AnswerSpec = AnswerSpec()
    timeout_seconds: float = Field(10, gt=0, le=3600, description="limit of one reset or step")
    concurrency: int = Field(64, ge=1, le=4096, description="calls in flight at once")


class ReasoningGymSpec(EnvironmentBase):
    """A data set of reasoning-gym, scored by its own scorer."""

    kind: Literal["reasoning_gym"]
    dataset: str
    settings: dict[str, Any] = Field(default_factory=dict, description="of the data set; not size or seed")


class DatasetSpec(EnvironmentBase):
    """A JSONL or Parquet file of questions and answers. Held-out examples are split off by a hash."""

    kind: Literal["dataset"]
    path: str
    question_column: str = "prompt"
    answer_column: str = "answer"
    scoring: Literal["exact", "numeric", "math"] = "exact"
    held_out_share: float = Field(0.2, gt=0, lt=1)


class CustomSpec(EnvironmentBase):
    """A user's class, run in a process of its own with limits."""

    kind: Literal["custom"]
    entry: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:Class")
    arguments: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = Field(None, description="folder to import from; default: the fleet file's")
    memory_mb: int = Field(2048, ge=64)


class CalculatorToolSpec(Spec):
    """A calculator: arithmetic and a few functions, nothing that can hang."""

    kind: Literal["calculator"]

    @property
    def name(self) -> str:
        """What the model calls it."""
        return "calculator"


class LookupToolSpec(Spec):
    """A table of a JSONL or Parquet file, looked up by a key, whatever its case and spacing."""

    kind: Literal["lookup"]
    path: str
    key_column: str = "key"
    value_column: str = "value"
    name: str = Field("lookup", pattern=TOOL_NAME, description="what the model calls it")
    description: str = Field("Looks up the value of a key.", min_length=1, description="what the model is told")


class FunctionToolSpec(Spec):
    """A user's Python function, run in a process of its own with limits. Its name, annotations and docstring are what
    the model is told."""

    kind: Literal["function"]
    entry: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function")
    path: Path | None = Field(None, description="folder to import from; default: the fleet file's")

    @property
    def name(self) -> str:
        """What the model calls it."""
        return self.entry.partition(":")[2]


ToolSpec = Annotated[CalculatorToolSpec | LookupToolSpec | FunctionToolSpec, Field(discriminator="kind")]


class LatencySpec(Spec):
    """An extra wait of each tool call: log-normal within bounds, drawn by a hash, so the same call waits as long."""

    median_seconds: float = Field(1.0, gt=0, le=3600)
    sigma: float = Field(0.6, ge=0, le=5, description="standard deviation of the logarithm")
    min_seconds: float = Field(0.5, ge=0, le=3600)
    max_seconds: float = Field(3.0, ge=0, le=3600)
    seed: Seed = 0

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> LatencySpec:
        if not self.min_seconds <= self.median_seconds <= self.max_seconds:
            bounds = f"min_seconds {self.min_seconds:g} and max_seconds {self.max_seconds:g}"
            raise ValueError(f"median_seconds: {self.median_seconds:g} must lie between {bounds}")
        return self


class ToolsSpec(Spec):
    """Questions that the model answers with the help of tools, in several turns. The prompt, the scoring and their
    limits are those of `questions`."""

    kind: Literal["tools"]
    questions: Annotated[ReasoningGymSpec | DatasetSpec, Field(discriminator="kind")]
    tools: tuple[ToolSpec, ...] = Field(min_length=1, max_length=64)
    max_turns: int = Field(4, ge=1, le=64, description="replies of the model; the last is scored whatever it says")
    format: Literal["auto", "hermes", "llama", "mistral"] = Field(
        "auto", description="how calls are written; auto: as the chat template does, and any of them is understood"
    )
    latency: LatencySpec | None = Field(None, description="an extra wait of each call; default: none")
    timeout_seconds: float = Field(10, gt=0, le=3600, description="limit of one tool call, without the extra wait")
    concurrency: int = Field(256, ge=1, le=4096, description="replies being answered at once")
    memory_mb: int = Field(2048, ge=64, description="of the process of each function")

    @model_validator(mode="after")
    def _names_are_distinct(self) -> ToolsSpec:
        names = [tool.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise ValueError(f"tools: the names {', '.join(names)} must be distinct")
        return self


EnvironmentSpec = Annotated[ReasoningGymSpec | DatasetSpec | CustomSpec | ToolsSpec, Field(discriminator="kind")]


def tool_call_format(spec: EnvironmentSpec) -> Literal["auto", "hermes", "llama", "mistral"]:
    """How the environment's tools are called, if it has any."""
    return spec.format if isinstance(spec, ToolsSpec) else "auto"


class LoraSpec(Spec):
    """The shape of a tenant's adapter. The delta of a module is alpha / rank * B A x."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0, le=4096)
    targets: tuple[Literal[TARGETS], ...] = Field(TARGETS, min_length=1)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _targets_are_distinct(self) -> LoraSpec:
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"targets: {list(self.targets)} must be distinct")
        return self


class AlgorithmSpec(Spec):
    """The policy-gradient loss. Clip bounds are those of the ratio: [1 - clip_low, 1 + clip_high]."""

    name: Annotated[str, AfterValidator(_algorithm)] = "grpo"
    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.28, gt=0, le=10)
    importance_cap: float = Field(2.0, ge=1, le=100, description="where importance weights are truncated")
    normalize_std: bool = False
    kl_coefficient: float = Field(0.0, ge=0, le=10)


class SamplingSpec(Spec):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, gt=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: no limit")
    max_tokens: int = Field(64, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), max_length=16)


class OptimizerSpec(Spec):
    """AdamW and its schedule, one for each tenant."""

    learning_rate: float = Field(1e-4, gt=0, le=1)
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    final_share: float = Field(0.1, ge=0, le=1, description="of the learning rate, at the end of cosine")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    epsilon: float = Field(1e-8, gt=0, le=1e-2)
    weight_decay: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(1.0, gt=0)


class QuotaSpec(Spec):
    """A tenant's share of the pool. Higher priority goes first; equals share by weight."""

    weight: float = Field(1.0, gt=0, le=1000)
    priority: int = Field(0, ge=-10, le=10)
    max_sequences: int | None = Field(None, ge=1, description="of this tenant in the running batch")
    max_adapters: int | None = Field(None, ge=1, description="versions of this tenant in slots at once")


class EvaluationSpec(Spec):
    """CoLD evaluation on held-out examples, downstream of training."""

    enabled: bool = True
    examples: int = Field(200, ge=10, le=100_000)
    seed: Seed = 1_000_000
    max_tokens: int | None = Field(None, ge=1, description="default: sampling.max_tokens")
    alpha: float = Field(0.1, gt=0, le=1)
    beta: float = Field(0.5, ge=0, le=10)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    correct_at: float = Field(1.0, gt=0, description="a reward of at least this counts as correct")


class TenantSpec(Spec):
    """One job of one tenant: what to learn, with what, and how long."""

    name: Name
    job: Name | None = Field(None, description="default: the fleet's name")
    environment: EnvironmentSpec
    lora: LoraSpec = LoraSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    group_size: int = Field(8, ge=2, le=1024)
    prompts_per_step: int = Field(8, ge=1, le=4096)
    steps: int = Field(ge=1, le=1_000_000)
    sampling: SamplingSpec = SamplingSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    max_staleness: int = Field(1, ge=0, le=64)
    publish_every: int = Field(10, ge=1, description="steps between published versions; the last always is")
    keep_checkpoints: int = Field(2, ge=1, description="older ones are deleted after each step")
    stage_timeout_seconds: float = Field(3600, gt=0, description="limit of one stage of one step")
    seed: Seed = 0
    quota: QuotaSpec = QuotaSpec()
    evaluation: EvaluationSpec = EvaluationSpec()

    @model_validator(mode="after")
    def _schedule_fits(self) -> TenantSpec:
        if self.optimizer.warmup_steps > self.steps:
            warmup = self.optimizer.warmup_steps
            raise ValueError(f"optimizer.warmup_steps: {warmup} must be at most steps {self.steps}")
        return self


class FleetSpec(Spec):
    """Everything one run needs: the shared parts, and the tenants."""

    name: Name
    model: ModelSpec = ModelSpec()
    store: StoreSpec = StoreSpec()
    services: ServicesSpec = ServicesSpec()
    pool: PoolSpec = PoolSpec()
    tenants: tuple[TenantSpec, ...] = Field(min_length=1)

    def tenant(self, name: str) -> TenantSpec:
        """The tenant of that name. Raises SpecError if there is none."""
        for tenant in self.tenants:
            if tenant.name == name:
                return tenant
        known = ", ".join(t.name for t in self.tenants)
        raise SpecError(self.name, [f"tenant: {name!r} is not one of the fleet's tenants: {known}"])

    def job(self, tenant: TenantSpec) -> str:
        """The name of a tenant's job."""
        return tenant.job or self.name
