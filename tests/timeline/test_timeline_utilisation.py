"""The figures of a run against numbers worked out by hand."""

import numpy as np
import pytest

from marlaas.timeline import Run, utilisation
from marlaas.timeline.clock import clock, length_text, merged
from marlaas.timeline.utilisation import jain, spread
from storage import StageRecord

START = 1_760_000_000.0


def stage(tenant, name, step, start, end, **fields):
    return StageRecord(tenant=tenant, job="sums", stage=name, step=step, start=START + start, end=START + end, **fields)


ACME = [
    stage("acme", "rollout", 0, 0, 4, tokens=100, device_seconds=2),
    stage("acme", "interact", 0, 1, 3, calls=4, waited_seconds=6),
    stage("acme", "rollout", 1, 4, 8, tokens=100, device_seconds=2),
    stage("acme", "update", 0, 4, 6, tokens=150, device_seconds=1),
    stage("acme", "interact", 1, 5, 6, calls=2, waited_seconds=3),
    stage("acme", "update", 1, 8, 10, tokens=150, device_seconds=1),
]
GLOBEX = [
    stage("globex", "rollout", 0, 6, 10, tokens=40, device_seconds=2),
    stage("globex", "update", 0, 12, 15, tokens=60, device_seconds=3),
    stage("globex", "publish", 0, 15, 16),
    stage("globex", "evaluate", 0, 16, 20, tokens=80, device_seconds=1),
]
BOTH = Run("sums", {"acme": ACME, "globex": GLOBEX}, silent=("initech",))


def moved(records, seconds):
    return [r.model_copy(update={"start": r.start + seconds, "end": r.end + seconds}) for r in records]


def test_the_figures_of_a_run():
    use = utilisation(BOTH, devices=2)
    assert (use.run, use.devices, use.silent) == ("sums", 2, ("initech",))
    assert (use.wall_seconds, use.pauses, use.paused_seconds) == (20, 0, 0)
    assert use.device_seconds == 12
    assert use.busy_share == 12 / 40
    assert use.busy_by_stage == {"rollout": 6 / 40, "update": 5 / 40, "evaluate": 1 / 40}
    assert use.overlap == (10 + 12) / 20  # globex has nothing in progress from 10 to 12


def test_the_figures_of_a_tenant():
    acme, globex = utilisation(BOTH).tenants
    assert (acme.tenant, acme.steps, acme.span_seconds) == ("acme", 2, 10)
    assert (acme.sampled_tokens, acme.trained_tokens, acme.tokens_per_second) == (200, 300, 20)
    assert (acme.device_seconds, acme.device_share) == (6, 0.5)
    assert (acme.step_seconds_mean, acme.step_seconds_median) == (6, 6)
    assert (acme.environment_share, acme.call_seconds) == (0.3, 1.5)
    assert (globex.sampled_tokens, globex.tokens_per_second) == (120, 120 / 14)
    assert (globex.step_seconds_mean, globex.environment_share, globex.call_seconds) == (9, 0, None)


def test_mean_and_median_step_seconds_differ_where_the_steps_do():
    lengths = [1, 2, 9]
    records = []
    for step, length in enumerate(lengths):
        records += [stage("a", "rollout", step, 10 * step, 10 * step + length / 2)]
        records += [stage("a", "update", step, 10 * step + length / 2, 10 * step + length)]
    (tenant,) = utilisation(Run("sums", {"a": records})).tenants
    assert (tenant.step_seconds_mean, tenant.step_seconds_median) == (4, 2)


def test_a_step_that_was_done_again_counts_once_and_with_its_last_time():
    """A runner died between update and commit; the next one repeats the step after a long pause."""
    again = moved([r for r in ACME if r.step == 1], 1000)
    use = utilisation(Run("sums", {"acme": ACME + again}))
    (tenant,) = use.tenants
    assert tenant.steps == 2
    assert tenant.step_seconds_mean == 6
    assert (use.pauses, use.wall_seconds) == (1, 16)


def test_a_tenant_without_an_update_has_no_step_time():
    (tenant,) = utilisation(Run("sums", {"acme": ACME[:1]})).tenants
    assert (tenant.steps, tenant.step_seconds_mean, tenant.step_seconds_median) == (0, None, None)


@pytest.mark.parametrize(
    ("shares", "index"),
    [([5, 5, 5], 1), ([1, 0, 0, 0], 1 / 4), ([1, 1, 0, 0], 1 / 2), ([1, 2, 3], 36 / 42), ([7], 1)],
)
def test_jains_index_of_known_vectors(shares, index):
    assert jain(shares) == pytest.approx(index, rel=1e-12)
    assert jain([1e-6 * share for share in shares]) == pytest.approx(index, rel=1e-12)


@pytest.mark.parametrize("shares", [[], [0, 0], [1, -1]])
def test_jains_index_of_nothing_is_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        jain(shares)


def test_fairness_counts_the_device_seconds_while_all_were_active():
    """From 6 to 10: acme has half of its second rollout and its last update, globex its rollout."""
    use = utilisation(BOTH)
    assert use.fair_seconds == 4
    assert use.fairness == pytest.approx(jain([1 + 1, 2]))
    unequal = Run("sums", {"acme": ACME, "globex": [stage("globex", "rollout", 0, 0, 10, device_seconds=2)]})
    assert utilisation(unequal).fairness == pytest.approx(jain([6, 2]))


@pytest.mark.parametrize(
    "globex", [moved(GLOBEX, 100), [stage("globex", "interact", 0, 0, 10)]], ids=["one after another", "no device"]
)
def test_fairness_is_none_where_it_has_no_meaning(globex):
    run = Run("sums", {"acme": [r.model_copy(update={"device_seconds": 0}) for r in ACME], "globex": globex})
    assert utilisation(run).fairness is None


def test_a_run_of_no_length_has_figures():
    use = utilisation(Run("sums", {"a": [stage("a", "rollout", 0, 5, 5, tokens=3, device_seconds=0)]}))
    assert (use.wall_seconds, use.busy_share, use.overlap, use.tenants[0].tokens_per_second) == (0, 0, 0, 0)


def test_a_gap_of_more_than_ten_median_stages_is_cut():
    """Six stages of 1 to 4 seconds, median 2: a gap of 20 stays, a longer one goes."""
    stays = clock(ACME + moved(ACME, 30))
    assert (stays.pauses, stays.wall_seconds) == ((), 40)
    cut = clock(ACME + moved(ACME, 30.5) + moved(ACME, 3600))
    assert [(a - START, b - START) for a, b in cut.pauses] == [(10, 30.5), (40.5, 3600)]
    assert cut.wall_seconds == 30
    moments = [START + t for t in (0, 10, 20, 30.5, 40.5, 2000, 3600, 3605)]
    assert cut.seconds(moments).tolist() == [0, 10, 10, 10, 20, 20, 20, 25]


def test_a_gap_in_which_another_tenant_worked_is_none():
    run = Run("sums", {"acme": ACME + moved(ACME, 100), "globex": [stage("globex", "rollout", 0, 0, 110)]})
    assert utilisation(run).pauses == 0


def test_the_figures_of_a_resumed_run_are_without_its_pause():
    use = utilisation(Run("sums", {"acme": ACME + moved(ACME, 5000)}))
    assert (use.pauses, use.paused_seconds, use.wall_seconds) == (1, 4990, 20)
    assert use.busy_share == 12 / 20
    assert use.tenants[0].span_seconds == 20


def test_intervals_merge_where_they_touch_or_are_near():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert merged([(0, 1), (1.5, 2), (4, 5)], apart=0.5) == [(0, 2), (4, 5)]


def test_device_seconds_are_spread_evenly_over_a_stage():
    seconds = spread(ACME, clock(ACME), np.linspace(0, 10, 6))
    assert seconds.tolist() == pytest.approx([1, 1, 1 + 1, 1, 1])


def test_spread_loses_nothing_of_stages_without_length_or_around_a_pause():
    last = stage("acme", "update", 2, 5010, 5010, device_seconds=7)
    records = [*ACME, *moved(ACME, 5000), last]
    seconds = spread(records, clock(records), np.linspace(0, 20, 201))
    assert seconds.sum() == pytest.approx(19)
    assert seconds[-1] >= 7
    assert seconds.min() >= 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 0 s"),
        (117.2, "1 min 57 s"),
        (3599.6, "1 h 0 min"),
        (3700, "1 h 2 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_a_length_of_time_in_words(seconds, text):
    assert length_text(seconds) == text
