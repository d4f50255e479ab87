import math
import threading
from datetime import UTC, datetime

import pytest

from storage import (
    Commit,
    CorruptObject,
    InvalidName,
    JobLayout,
    ObjectExists,
    ObjectNotFound,
    StepAlreadyCommitted,
    committed_steps,
    latest_commit,
    read_commit,
    read_commits,
    write_commit,
)


def make_commit(layout, step, **changes):
    values = {
        "tenant": layout.tenant,
        "job": layout.job,
        "step": step,
        "adapter_version": step + 1,
        "rollouts": [layout.rollout(step, 0)],
        "rollout_versions": [step],
        "checkpoint": layout.checkpoint(step, "x"),
        "metrics": {"reward": 0.1 + 0.2},
    }
    return Commit(**(values | changes))


def commit_step(store, layout, step, **changes):
    store.put(layout.checkpoint(step, "x"), b"checkpoint")
    commit = make_commit(layout, step, **changes)
    write_commit(store, layout, commit)
    return commit


def test_a_commit_reads_back_as_it_was_written(store, layout):
    before = datetime.now(UTC)
    commit = commit_step(store, layout, 3)
    assert read_commit(store, layout, 3) == commit
    assert before <= commit.created_at <= datetime.now(UTC)


def test_metrics_that_are_not_finite_survive(store, layout):
    commit_step(store, layout, 0, metrics={"kl": math.inf, "gap": math.nan})
    metrics = read_commit(store, layout, 0).metrics
    assert metrics["kl"] == math.inf
    assert math.isnan(metrics["gap"])


def test_commits_come_in_the_order_of_their_steps(store, layout):
    assert latest_commit(store, layout) is None
    assert read_commits(store, layout) == []
    commits = {step: commit_step(store, layout, step) for step in (10, 2, 100_000_000, 9)}
    commit_step(store, JobLayout("acme", "sums-2"), 200_000_000)
    assert committed_steps(store, layout) == [2, 9, 10, 100_000_000]
    assert read_commits(store, layout) == [commits[step] for step in (2, 9, 10, 100_000_000)]
    assert latest_commit(store, layout) == commits[100_000_000]


def test_a_step_is_committed_once(store, layout):
    first = commit_step(store, layout, 1)
    for again in (first, make_commit(layout, 1, adapter_version=9)):
        with pytest.raises(StepAlreadyCommitted, match="step 1") as caught:
            write_commit(store, layout, again)
        assert isinstance(caught.value, ObjectExists)
    assert read_commit(store, layout, 1) == first


def test_of_eight_runners_of_a_job_one_commits_the_step(store, layout):
    store.put(layout.checkpoint(0, "x"), b"checkpoint")
    barrier, outcomes = threading.Barrier(8), {}

    def run(i):
        barrier.wait(timeout=10)
        try:
            write_commit(store, layout, make_commit(layout, 0, adapter_version=i))
            outcomes[i] = "committed"
        except StepAlreadyCommitted:
            outcomes[i] = "refused"

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    winners = [i for i, outcome in outcomes.items() if outcome == "committed"]
    assert len(outcomes) == 8
    assert winners == [read_commit(store, layout, 0).adapter_version]


def test_a_step_without_its_checkpoint_cannot_be_committed(store, layout):
    with pytest.raises(ObjectNotFound, match=r"step 0 .*checkpoints/00000000-x\.arrow"):
        write_commit(store, layout, make_commit(layout, 0))
    assert latest_commit(store, layout) is None


def test_a_commit_of_another_job_is_refused(store, layout):
    other = JobLayout("beta", "sums")
    store.put(other.checkpoint(0, "x"), b"checkpoint")
    with pytest.raises(InvalidName, match="beta/sums"):
        write_commit(store, layout, make_commit(other, 0))


@pytest.mark.parametrize("data", [b"", b"{", b"{}", b"[]", b"\xff"])
def test_a_damaged_commit_is_corrupt_and_named(store, layout, data):
    store.put(layout.commit(0), data)
    with pytest.raises(CorruptObject, match=r"commits/00000000\.json"):
        latest_commit(store, layout)


def test_a_commit_under_the_key_of_another_step_is_corrupt(store, layout):
    store.put(layout.commit(1), make_commit(layout, 0).model_dump_json().encode())
    with pytest.raises(CorruptObject, match="step 0"):
        read_commit(store, layout, 1)


def test_a_missing_commit_is_not_found(store, layout):
    with pytest.raises(ObjectNotFound, match=r"commits/00000005\.json"):
        read_commit(store, layout, 5)
