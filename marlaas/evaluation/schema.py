"""The evaluation report as data: what report.json holds, and what every rendering is made from."""

from __future__ import annotations

from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict

from marlaas.evaluation.statistics import Accuracy, CommonAnswer, Cost, PairedDifference

SCHEMA_VERSION: Literal[1] = 1

Decoding = Literal["base", "greedy", "cold"]
Contender = Literal["base", "greedy", "cold", "commonest"]


class Record(BaseModel):
    """Base of the report's parts: unknown keys are refused, values never change and are always finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DecodingResult(Record):
    """One decoding on all examples. `given` is the answer that it gave most often, right or wrong."""

    decoding: Decoding
    accuracy: Accuracy
    reward_mean: float
    given: CommonAnswer | None
    unanswered_share: float
    truncated_share: float
    cost: Cost


class Comparison(Record):
    """Candidate against reference on the same examples.

    p_adjusted: Holm's, over all comparisons of the report. distinguishable: whether it is at most 1 - confidence.
    """

    candidate: Contender
    reference: Contender
    difference: PairedDifference
    p_adjusted: float
    distinguishable: bool
    verdict: str


class SampleReply(Record):
    """One decoding's reply to a sample; `completion` is cut to a readable length."""

    decoding: Decoding
    completion: str
    extracted: str | None
    correct: bool


class Sample(Record):
    """An example that the decodings answered differently."""

    example_id: str
    prompt: str
    answer: str
    replies: list[SampleReply]


class EvaluationReport(Record):
    """An adapter version's evaluation; `model_dump_json(indent=2)` is report.json.

    commonest: the answer most examples have, and the accuracy of always giving it; None without reference answers.
    curve: one dict a training step, "step" and the step's metrics.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    tenant: str
    job: str
    version: int
    base_model: str
    environment: str
    alpha: float
    beta: float
    confidence: float
    created_at: AwareDatetime
    examples: int
    headline: str
    warnings: list[str]
    commonest: CommonAnswer | None
    results: list[DecodingResult]
    comparisons: list[Comparison]
    curve: list[dict[str, float]]
    samples: list[Sample]
    settings: dict[str, str]
    provenance: dict[str, str]

    @property
    def title(self) -> str:
        """The adapter version's name."""
        return f"{self.tenant}/{self.job}/v{self.version}"

    def result(self, decoding: Decoding) -> DecodingResult:
        """The result of a decoding."""
        return next(result for result in self.results if result.decoding == decoding)

    def comparison(self, candidate: Contender, reference: Contender) -> Comparison | None:
        """The comparison of those two; None if the report has none, as with "commonest" when there is none."""
        found = (c for c in self.comparisons if (c.candidate, c.reference) == (candidate, reference))
        return next(found, None)
