"""Statistics of an evaluation: how accurate a decoding is, and whether two decodings differ beyond chance.

All decodings answer the same examples, so they are compared in pairs: only examples that one of the two gets right
and the other wrong say anything about the difference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binomtest, norm

_NUDGE = 1e-12


@dataclass(frozen=True)
class Accuracy:
    """`correct` right out of `total`; `low` and `high` bound the true share."""

    correct: int
    total: int
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """What a candidate gains over a reference on the same examples.

    gained: examples only the candidate gets right (McNemar's b). lost: only the reference (c). difference: the
    candidate's accuracy minus the reference's, within `low` and `high`. p_value: exact McNemar, two-sided.
    """

    total: int
    gained: int
    lost: int
    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class Cost:
    """Time and tokens of a decoding. Seconds are of one example; tokens_per_second is all tokens over all seconds."""

    seconds_median: float
    seconds_mean: float
    seconds_p90: float
    tokens_mean: float
    tokens_total: int
    tokens_per_second: float


@dataclass(frozen=True)
class CommonAnswer:
    """The answer that occurs most often, and its share of all examples."""

    answer: str
    share: float


def accuracy(correct: Sequence[bool], confidence: float = 0.95) -> Accuracy:
    """The share of correct examples with Wilson's score interval (JASA 22, 1927). Raises ValueError if empty."""
    if not correct:
        raise ValueError("correct is empty: an accuracy needs at least one example")
    right, total = sum(correct), len(correct)
    interval = binomtest(right, total).proportion_ci(confidence, method="wilson")
    return Accuracy(right, total, right / total, float(interval.low), float(interval.high))


def paired_difference(
    candidate: Sequence[bool], reference: Sequence[bool], confidence: float = 0.95
) -> PairedDifference:
    """Compares two decodings, `[examples]` correct each, in the same order. Raises ValueError if that cannot be."""
    if not candidate or len(candidate) != len(reference):
        raise ValueError(
            f"candidate has {len(candidate)} and reference {len(reference)} examples: must be as many, at least one"
        )
    gained = sum(c and not r for c, r in zip(candidate, reference, strict=True))
    lost = sum(r and not c for c, r in zip(candidate, reference, strict=True))
    total = len(candidate)
    low, high = tango_interval(gained, lost, total, confidence)
    return PairedDifference(total, gained, lost, (gained - lost) / total, low, high, mcnemar_p_value(gained, lost))


def mcnemar_p_value(gained: int, lost: int) -> float:
    """McNemar's exact two-sided p-value: the discordant pairs as fair coin tosses; 1 when there are none."""
    return float(binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0


def tango_interval(gained: int, lost: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The score interval of a difference of paired proportions, (gained - lost) / total.

    It holds the differences that the score test does not reject, the nuisance parameter at its maximum likelihood
    given the difference: T. Tango, "Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design", Statistics in Medicine 17 (1998), 891-908. Unlike Wald's it keeps its coverage when
    discordant pairs are few or none.
    """
    assert min(gained, lost, total - gained - lost) >= 0
    assert total > 0
    z = float(norm.ppf((1 + confidence) / 2))
    return _lower_bound(gained, lost, total, z), -_lower_bound(lost, gained, total, z)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the given order: S. Holm, Scandinavian Journal of Statistics 6 (1979), 65-70."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        running = max(running, (len(p_values) - rank) * p_values[i])
        adjusted[i] = min(1.0, running)
    return adjusted


def cost(seconds: Sequence[float], tokens: Sequence[int]) -> Cost:
    """Summarises the time and tokens of `[examples]` each; 0 tokens a second where no time passed."""
    total_seconds, total_tokens = math.fsum(seconds), int(sum(tokens))
    return Cost(
        seconds_median=float(np.median(seconds)),
        seconds_mean=total_seconds / len(seconds),
        seconds_p90=float(np.quantile(seconds, 0.9)),
        tokens_mean=total_tokens / len(tokens),
        tokens_total=total_tokens,
        tokens_per_second=total_tokens / total_seconds if total_seconds > 0 else 0.0,
    )


def commonest(answers: Sequence[str | None]) -> CommonAnswer | None:
    """The commonest answer that is not missing or blank, the first in the alphabet of equals; None without any."""
    counts = Counter(answer.strip() for answer in answers if answer and answer.strip())
    if not counts:
        return None
    answer, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return CommonAnswer(answer, count / len(answers))


def _lower_bound(gained: int, lost: int, total: int, z: float) -> float:
    """The difference below the estimate at which the score statistic reaches z."""

    def excess(delta: float) -> float:
        variance = total * (2 * _lost_share(gained, lost, total, delta) + delta * (1 - delta))
        return gained - lost - total * delta - z * math.sqrt(max(0.0, variance))

    estimate = (gained - lost) / total
    if estimate == -1:
        return -1.0
    # At the estimate itself the variance may vanish (no discordant pairs, or all of them), a root that bounds nothing.
    return float(brentq(excess, -1.0, estimate - _NUDGE, xtol=1e-12))


def _lost_share(gained: int, lost: int, total: int, delta: float) -> float:
    """Maximum-likelihood probability of a lost pair, given that a gained pair's is `delta` higher."""
    linear = -gained - lost + (2 * total - gained + lost) * delta
    constant = -lost * delta * (1 - delta)
    root = math.sqrt(max(0.0, linear * linear - 8 * total * constant))
    return (root - linear) / (4 * total)
