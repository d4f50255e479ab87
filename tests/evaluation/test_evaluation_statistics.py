"""Accuracy, paired differences and costs against slow and obvious references."""

from math import comb

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import xlogy
from scipy.stats import norm

from marlaas.evaluation.statistics import (
    accuracy,
    commonest,
    cost,
    holm,
    mcnemar_p_value,
    paired_difference,
    tango_interval,
)


def constrained_likelihood(gained, lost, total, delta):
    """Log-likelihood maximised over the nuisance parameter q = P(lost), with P(gained) = q + delta."""

    def negative(q):
        return -(xlogy(gained, q + delta) + xlogy(lost, q) + xlogy(total - gained - lost, 1 - 2 * q - delta))

    low, high = max(0.0, -delta), (1 - delta) / 2
    best = minimize_scalar(negative, bounds=(low, high), method="bounded", options={"xatol": 1e-12})
    return min((negative(low), low), (best.fun, best.x), (negative(high), high))[1]


def tango_by_grid(gained, lost, total, confidence):
    """Every difference of a fine grid that the score test does not reject."""
    z = norm.ppf((1 + confidence) / 2)
    kept = []
    for delta in np.linspace(-0.999, 0.999, 1999):
        q = constrained_likelihood(gained, lost, total, delta)
        variance = total * (2 * q + delta * (1 - delta))
        if (gained - lost - total * delta) ** 2 <= z * z * variance:
            kept.append(delta)
    return kept[0], kept[-1]


def test_wilson_interval_solves_its_equation():
    result = accuracy([True] * 37 + [False] * 63, confidence=0.9)
    z = norm.ppf(0.95)
    for bound in (result.low, result.high):
        assert (0.37 - bound) ** 2 == pytest.approx(z * z * bound * (1 - bound) / 100)
    assert (result.correct, result.total, result.share) == (37, 100, 0.37)
    assert result.low < 0.37 < result.high


def test_accuracy_of_all_right_still_has_a_width():
    result = accuracy([True] * 20)
    assert result.high == 1
    assert 0.8 < result.low < 0.9


def test_accuracy_of_no_examples_is_refused():
    with pytest.raises(ValueError, match="empty"):
        accuracy([])


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (0, 7), (5, 5), (12, 3), (40, 61)])
def test_mcnemar_is_the_binomial_tail_doubled(gained, lost):
    n, few = gained + lost, min(gained, lost)
    doubled = 2 * sum(comb(n, k) for k in range(few + 1)) / 2**n
    assert mcnemar_p_value(gained, lost) == pytest.approx(min(1.0, doubled))


@pytest.mark.parametrize(
    ("gained", "lost", "total"), [(0, 0, 50), (1, 7, 21), (7, 1, 21), (40, 20, 160), (3, 0, 30), (15, 15, 30)]
)
def test_tango_interval_agrees_with_a_grid_of_score_tests(gained, lost, total):
    found = tango_interval(gained, lost, total, 0.95)
    assert found == pytest.approx(tango_by_grid(gained, lost, total, 0.95), abs=1.1e-3)


def test_tango_interval_has_published_values():
    # Airway hyper-responsiveness of Bentur et al. (2009), in Fagerland, Lydersen and Laake, "Recommended tests and
    # confidence intervals for paired binomial proportions", Statistics in Medicine 33 (2014).
    assert tango_interval(1, 7, 21) == pytest.approx((-0.517, -0.026), abs=5e-4)


@pytest.mark.parametrize(("gained", "lost", "bound"), [(30, 0, 1.0), (0, 30, -1.0)])
def test_tango_interval_of_a_sweep_reaches_the_end_and_keeps_a_width(gained, lost, bound):
    low, high = tango_interval(gained, lost, 30)
    assert bound in (low, high)
    assert 0.1 < high - low < 0.4


def test_tango_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    cells, n, repeats = np.array([0.18, 0.06, 0.76]), 120, 4000
    covered = 0
    for gained, lost, _ in rng.multinomial(n, cells, size=repeats):
        low, high = tango_interval(int(gained), int(lost), n)
        covered += low <= 0.12 <= high
    assert 0.94 < covered / repeats < 0.96


def test_tango_interval_mirrors_when_the_two_swap():
    low, high = tango_interval(9, 4, 60)
    assert tango_interval(4, 9, 60) == pytest.approx((-high, -low))


def test_paired_difference_counts_discordant_examples_only():
    candidate = [True, True, True, False, False]
    reference = [True, False, False, True, False]
    paired = paired_difference(candidate, reference)
    assert (paired.gained, paired.lost, paired.total) == (2, 1, 5)
    assert paired.difference == pytest.approx(0.2)
    assert paired.low < 0.2 < paired.high
    assert paired.p_value == 1


@pytest.mark.parametrize(("candidate", "reference"), [([True], [True, False]), ([], [])])
def test_paired_difference_of_unlike_lengths_is_refused(candidate, reference):
    with pytest.raises(ValueError, match=f"{len(candidate)} and reference {len(reference)}"):
        paired_difference(candidate, reference)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_rejects_what_the_step_down_procedure_rejects():
    rng = np.random.default_rng(1)
    for _ in range(200):
        p_values = (rng.random(5) ** 3).tolist()
        rejected = set()
        for rank, i in enumerate(np.argsort(p_values)):
            if p_values[i] > 0.05 / (5 - rank):
                break
            rejected.add(int(i))
        assert {i for i, p in enumerate(holm(p_values)) if p <= 0.05} == rejected


def test_cost_summarises_time_and_tokens():
    result = cost(seconds=[1.0, 2.0, 3.0, 4.0, 10.0], tokens=[10, 10, 10, 10, 20])
    assert (result.seconds_median, result.seconds_mean, result.seconds_p90) == pytest.approx((3, 4, 7.6))
    assert (result.tokens_mean, result.tokens_total, result.tokens_per_second) == pytest.approx((12, 60, 3))
    assert cost(seconds=[0.0], tokens=[3]).tokens_per_second == 0


def test_commonest_answer_counts_missing_ones_and_breaks_ties_by_the_alphabet():
    found = commonest(["b", "a", " b", "a ", None, "", "c", "d"])
    assert found is not None
    assert (found.answer, found.share) == ("a", 0.25)
    assert commonest([None, " "]) is None
