"""From the rows of an evaluation to its report: every number and every sentence, computed once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime

from marlaas.evaluation.schema import (
    Comparison,
    Contender,
    Decoding,
    DecodingResult,
    EvaluationReport,
    Sample,
    SampleReply,
)
from marlaas.evaluation.statistics import CommonAnswer, accuracy, commonest, cost, holm, paired_difference
from marlaas.evaluation.wording import headline, verdict, warnings
from storage.evaluations import EvaluationRow

CurvePoint = Mapping[str, float]

DECODINGS: tuple[Decoding, ...] = ("base", "greedy", "cold")
PAIRS: tuple[tuple[Contender, Contender], ...] = (("greedy", "base"), ("cold", "greedy"), ("cold", "base"))
_SAMPLES = 6
_SAMPLE_CHARACTERS = 1500


def build_report(
    *,
    tenant: str,
    job: str,
    version: int,
    base_model: str,
    environment: str,
    alpha: float,
    beta: float,
    confidence: float,
    created_at: datetime,
    rows: Mapping[str, Sequence[EvaluationRow]],
    curve: Sequence[CurvePoint],
    settings: Mapping[str, str],
    provenance: Mapping[str, str],
) -> EvaluationReport:
    """Builds the report of one adapter version. The same input gives the same report.

    Args:
        environment: a short description, such as "reasoning_gym chain_sum (2 terms of 1 digit)".
        alpha: CoLD's plausibility mask, in (0, 1]. beta: its penalty on the base model. confidence: of all intervals.
        created_at: with a time zone.
        rows: by decoding, "base", "greedy" and "cold"; each has the same examples, in any order.
        curve: training metrics up to this version, each with "step"; values that are not finite are left out.
        settings: what the tenant chose, shown as it is. provenance: versions, fingerprints and keys, likewise.

    Raises:
        ValueError: a decoding is missing or unknown, they do not have the same examples and answers, or a point of
            the curve has no step.
    """
    aligned = _aligned(rows)
    answers = [row.answer for row in aligned["base"]]
    common = commonest(answers)
    points = _finite(curve)
    results: dict[Contender, DecodingResult] = {d: _result(d, aligned[d], confidence) for d in DECODINGS}
    comparisons = _comparisons(aligned, common, confidence)
    by_pair = {(c.candidate, c.reference): c for c in comparisons}
    return EvaluationReport(
        tenant=tenant,
        job=job,
        version=version,
        base_model=base_model,
        environment=environment,
        alpha=alpha,
        beta=beta,
        confidence=confidence,
        created_at=created_at,
        examples=len(answers),
        headline=headline(results, by_pair, common, confidence),
        warnings=warnings(results, by_pair, common, points),
        commonest=common,
        results=list(results.values()),
        comparisons=comparisons,
        curve=points,
        samples=_samples(aligned),
        settings=dict(settings),
        provenance=dict(provenance),
    )


def _aligned(rows: Mapping[str, Sequence[EvaluationRow]]) -> dict[Decoding, list[EvaluationRow]]:
    """The rows of every decoding in the order of the base model's, checked to be of the same examples."""
    if set(rows) != set(DECODINGS):
        raise ValueError(f"rows has the decodings {sorted(rows)}: must be exactly {sorted(DECODINGS)}")
    order = {row.example_id: row for row in rows["base"]}
    if not order:
        raise ValueError("rows['base'] is empty: an evaluation needs at least one example")
    aligned: dict[Decoding, list[EvaluationRow]] = {}
    for decoding in DECODINGS:
        by_id = {row.example_id: row for row in rows[decoding]}
        if len(by_id) != len(rows[decoding]):
            raise ValueError(f"rows[{decoding!r}] has an example twice: example ids must be distinct")
        if different := sorted(by_id.keys() ^ order.keys()):
            raise ValueError(
                f"rows[{decoding!r}] and rows['base'] must have the same examples: "
                f"{len(different)} are in one only, such as {different[0]!r}"
            )
        if changed := next((i for i, row in by_id.items() if row.answer != order[i].answer), None):
            raise ValueError(f"rows[{decoding!r}]: example {changed!r} has another answer than in rows['base']")
        aligned[decoding] = [by_id[example_id] for example_id in order]
    return aligned


def _finite(curve: Sequence[CurvePoint]) -> list[dict[str, float]]:
    points = [{key: float(x) for key, x in point.items() if math.isfinite(x)} for point in curve]
    for i, point in enumerate(points):
        if "step" not in point:
            raise ValueError(f"curve[{i}] must have a finite 'step', has {dict(curve[i])}")
    return points


def _result(decoding: Decoding, rows: Sequence[EvaluationRow], confidence: float) -> DecodingResult:
    return DecodingResult(
        decoding=decoding,
        accuracy=accuracy([row.correct for row in rows], confidence),
        reward_mean=math.fsum(row.reward for row in rows) / len(rows),
        given=commonest([row.extracted for row in rows]),
        unanswered_share=sum(row.extracted is None for row in rows) / len(rows),
        truncated_share=sum(row.finish_reason == "length" for row in rows) / len(rows),
        cost=cost([row.seconds for row in rows], [row.tokens for row in rows]),
    )


def _comparisons(
    aligned: Mapping[Decoding, Sequence[EvaluationRow]], common: CommonAnswer | None, confidence: float
) -> list[Comparison]:
    correct: dict[Contender, list[bool]] = {d: [row.correct for row in rows] for d, rows in aligned.items()}
    pairs = list(PAIRS)
    if common is not None:
        correct["commonest"] = [row.answer.strip() == common.answer for row in aligned["base"]]
        pairs.append(("greedy", "commonest"))
    paired = [paired_difference(correct[a], correct[b], confidence) for a, b in pairs]
    comparisons = []
    for (a, b), difference, p in zip(pairs, paired, holm([d.p_value for d in paired]), strict=True):
        real = p <= 1 - confidence
        comparisons.append(
            Comparison(
                candidate=a,
                reference=b,
                difference=difference,
                p_adjusted=p,
                distinguishable=real,
                verdict=verdict(a, b, difference, p, real),
            )
        )
    return comparisons


def _samples(aligned: Mapping[Decoding, Sequence[EvaluationRow]]) -> list[Sample]:
    """A few examples on which the decodings differ, in turn from each way in which they do.

    They differ in who is right; only where that never happens, in what they say.
    """
    examples = list(zip(*aligned.values(), strict=True))
    differing = [e for e in examples if len({row.correct for row in e}) > 1]
    differing = differing or [e for e in examples if len({row.completion for row in e}) > 1]
    patterns: dict[tuple[bool, ...], list[tuple[EvaluationRow, ...]]] = {}
    for example in differing:
        patterns.setdefault(tuple(row.correct for row in example), []).append(example)
    turns = [(turn, i) for i, found in enumerate(patterns.values()) for turn in range(len(found))]
    queues = list(patterns.values())
    return [_sample(queues[i][turn], tuple(aligned)) for turn, i in sorted(turns)[:_SAMPLES]]


def _sample(example: Sequence[EvaluationRow], decodings: Sequence[Decoding]) -> Sample:
    replies = [
        SampleReply(
            decoding=d,
            completion=_cut(row.completion),
            extracted=None if row.extracted is None else _cut(row.extracted),
            correct=row.correct,
        )
        for d, row in zip(decodings, example, strict=True)
    ]
    first = example[0]
    return Sample(example_id=first.example_id, prompt=_cut(first.prompt), answer=_cut(first.answer), replies=replies)


def _cut(text: str) -> str:
    return text if len(text) <= _SAMPLE_CHARACTERS else text[:_SAMPLE_CHARACTERS] + " […]"
