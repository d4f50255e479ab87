"""Updates pass by pass: jobs that come and go in between, and what each of them gets in the end."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from engine import random_batch, tenant

from marlaas.errors import BatchError
from marlaas.training.advantages import conversation_advantages
from marlaas.training.batch import TrainingBatch, TrainingSample
from marlaas.training.losses.base import TokenInputs
from marlaas.training.losses.truncated import token_loss
from marlaas.training.metrics import TokenSums
from marlaas.training.trainer import Trainer, take_rows

ALGORITHMS = {"a": {}, "b": {"name": "truncated"}, "c": {"kl_coefficient": 0.1}, "d": {}}
SPECS = {
    f"{n}/x": tenant(n, lora={"rank": 4, "alpha": 8}, seed=i, optimizer={"learning_rate": 1e-2}, algorithm=fields)
    for i, (n, fields) in enumerate(ALGORITHMS.items())
}
JOBS = list(SPECS)
SIZE, PASS = 40_000, 48  # a pass is small, so that an update takes several


def trainer_of(base, jobs=JOBS, slots=4, budget=PASS):
    trainer = Trainer(base, slots, SIZE, budget)
    for job in jobs:
        trainer.open(job, SPECS[job])
    return trainer


def finish(trainer):
    results = {}
    while trainer.active:
        results |= trainer.step(trainer.active).results
    return results


def alone(base, job, batches):
    trainer = trainer_of(base, [job], slots=1)
    for batch in batches:
        assert trainer.update([batch])[job].version
    return trainer[job].stored_weights()


@pytest.mark.parametrize("slots", [1, 2])
def test_jobs_that_are_paged_out_between_updates_are_bitwise_those_that_stay(tiny, slots):
    roomy, tight = trainer_of(tiny), trainer_of(tiny, slots=slots)
    assert tight.paged == 4 - slots
    for step in range(3):
        for index, job in enumerate(JOBS):
            for trainer in (roomy, tight):
                result = trainer.update([random_batch(tiny, job, 10 * step + index)])[job]
                assert result.version == step + 1
    for job in JOBS:
        assert torch.equal(roomy._slots.read(job), tight._slots.read(job)), "weights and both moments"
        mine, theirs = roomy.state(job), tight.state(job)
        assert mine.optimizer_step == theirs.optimizer_step == 3
        assert all(torch.equal(mine.second[name], theirs.second[name]) for name in mine.second)


def test_more_updates_than_slots_take_turns_and_give_what_enough_slots_give(tiny):
    roomy, tight = trainer_of(tiny), trainer_of(tiny, slots=2)
    for step in range(2):
        batches = [random_batch(tiny, job, 10 * step + i, groups=1 + i) for i, job in enumerate(JOBS)]
        assert [r.version for r in tight.update(batches).values()] == [step + 1] * 4
        roomy.update(batches)
    for job in JOBS:
        torch.testing.assert_close(tight._slots.read(job), roomy._slots.read(job), atol=1e-6, rtol=0)


def test_an_update_under_way_keeps_its_slot_and_the_next_begins_when_it_is_done(tiny):
    trainer = trainer_of(tiny, ["a/x", "b/x"], slots=1)
    first, second = random_batch(tiny, "a/x", 1), random_batch(tiny, "b/x", 2)
    assert trainer.begin(first)
    assert trainer.step(["a/x"]).results == {}
    assert not trainer.begin(second)
    assert trainer.open("c/x", SPECS["c/x"]).version == 0, "a job that comes meanwhile waits on the host"
    assert trainer.paged == 2
    assert set(finish(trainer)) == {"a/x"}
    assert trainer.begin(second)
    finish(trainer)
    assert torch.equal(trainer["a/x"].stored_weights(), alone(tiny, "a/x", [first]))
    assert torch.equal(trainer["b/x"].stored_weights(), alone(tiny, "b/x", [second]))


def test_weights_and_state_are_those_before_the_update_until_its_last_pass(tiny):
    trainer = trainer_of(tiny, ["a/x"])
    before, passes = trainer.state("a/x"), 0
    trainer.begin(random_batch(tiny, "a/x", 1))
    while True:
        done = trainer.step(["a/x"]).results
        passes += 1
        if done:
            break
        now = trainer.state("a/x")
        assert (now.version, now.optimizer_step) == (0, 0)
        for kind in ("weights", "first", "second"):
            assert all(torch.equal(t, getattr(before, kind)[n]) for n, t in getattr(now, kind).items())
    assert passes > 2
    after = trainer.state("a/x")
    assert (after.version, after.optimizer_step) == (1, 1)
    assert any(not torch.equal(t, before.weights[n]) for n, t in after.weights.items())


def test_updates_that_join_and_overtake_others_give_each_what_it_gets_alone(tiny):
    rng = np.random.default_rng(0)
    trainer = trainer_of(tiny)
    queued = {job: [random_batch(tiny, job, 10 * s + i, groups=2 + s) for s in range(3)] for i, job in enumerate(JOBS)}
    given, seconds, results, shared = {job: [] for job in JOBS}, dict.fromkeys(JOBS, 0.0), [], 0
    while any(queued.values()) or trainer.active:
        for job in JOBS:
            if queued[job] and job not in trainer.active and rng.random() < 0.5:
                given[job].append(queued[job].pop(0))
                assert trainer.begin(given[job][-1])
        order = [str(job) for job in rng.permutation(trainer.active)][: 1 + rng.integers(4)]
        done = trainer.step(order)
        assert set(done.results) <= set(done.seconds) <= set(order)
        shared += len(done.seconds) > 1
        for job, share in done.seconds.items():
            seconds[job] += share
        results += done.results.items()
    assert shared > 5
    for job in JOBS:
        torch.testing.assert_close(trainer[job].weights, alone(tiny, job, given[job]), atol=2e-5, rtol=0)
        mine = [result for name, result in results if name == job]
        assert [result.version for result in mine] == [1, 2, 3]
        assert sum(result.device_seconds for result in mine) == pytest.approx(seconds[job])


def test_a_job_closed_in_the_middle_of_its_update_leaves_no_trace_in_its_slot_or_in_others(tiny):
    trainer = trainer_of(tiny, ["a/x", "b/x"], slots=2)
    kept = random_batch(tiny, "b/x", 2)
    trainer.begin(random_batch(tiny, "a/x", 1))
    trainer.begin(kept)
    trainer.step(["a/x", "b/x"])
    assert trainer["a/x"].vectors.gradient.abs().max() > 0
    trainer.close("a/x")
    assert trainer.active == ["b/x"]
    trainer.open("d/x", SPECS["d/x"])  # gets the slot that a/x had
    newcomer = random_batch(tiny, "d/x", 3)
    assert trainer.begin(newcomer)
    assert set(finish(trainer)) == {"b/x", "d/x"}
    for job, batch in (("b/x", kept), ("d/x", newcomer)):
        torch.testing.assert_close(trainer[job].weights, alone(tiny, job, [batch]), atol=2e-5, rtol=0)
    assert trainer.open("a/x", SPECS["a/x"]).version == 0


def test_what_a_failed_pass_had_added_up_is_gone_when_the_job_tries_again(tiny, monkeypatch):
    trainer = trainer_of(tiny, ["a/x", "b/x"])
    batches = {job: random_batch(tiny, job, i) for i, job in enumerate(["a/x", "b/x"])}
    for batch in batches.values():
        trainer.begin(batch)
    trainer.step(["a/x", "b/x"])
    half = trainer["a/x"].vectors.gradient.clone()
    backward = torch.autograd.backward

    def fails_at_the_end(losses):
        backward(losses)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", fails_at_the_end)
        failed = trainer.step(["a/x"])
    assert isinstance(failed.results["a/x"], BatchError)
    assert "the pass failed: RuntimeError: out of memory" in str(failed.results["a/x"])
    assert failed.seconds["a/x"] > 0, "the time was spent all the same"
    assert not torch.equal(half, trainer["a/x"].vectors.gradient), "it was half done"
    assert trainer["a/x"].version == trainer["a/x"].optimizer_step == 0
    trainer.begin(batches["a/x"])
    results = finish(trainer)
    for job, batch in batches.items():
        assert results[job].version == 1
        torch.testing.assert_close(trainer[job].weights, alone(tiny, job, [batch]), atol=1e-6, rtol=0)


def test_rows_are_taken_in_order_up_to_the_budget_and_at_least_one(tiny):
    trainer = trainer_of(tiny, JOBS[:3])
    for i, job in enumerate(JOBS[:3]):
        trainer.begin(random_batch(tiny, job, i, groups=4))
    rows = {job: list(ready.rows) for job, ready in trainer._active.items()}
    taken = {job: [] for job in rows}
    while any(ready.rows for ready in trainer._active.values()):
        order = [job for job in ("c/x", "a/x", "b/x") if trainer._active[job].rows]
        micro = take_rows([(job, trainer._active[job]) for job in order], 40)
        assert micro[0].job == order[0]
        used = sum(part.padded_tokens for part in micro)
        assert used <= 40 or sum(len(part.rows) for part in micro) == 1
        for part in micro:
            taken[part.job] += part.rows
    assert all([id(r) for r in rows[job]] == [id(r) for r in taken[job]] for job in rows)
    assert all([len(r) for r in rows[job]] == sorted(len(r) for r in rows[job]) for job in rows)
    [micro] = take_rows([("a/x", dataclasses.replace(trainer._active["a/x"], rows=rows["a/x"][-2:]))], 1)
    assert len(micro.rows) == 1
    assert take_rows([], 40) == []


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_the_truncated_loss_is_what_a_loop_and_autograd_say(coefficient):
    generator = torch.Generator().manual_seed(1)
    logprobs, behaviour, reference = (-4 * torch.rand(40, generator=generator) for _ in range(3))
    behaviour[0] = -60.0  # a token that the sampler thought all but impossible
    advantages = torch.randn(40, generator=generator)
    algorithm = {"name": "truncated", "importance_cap": 1.5, "kl_coefficient": coefficient}
    spec = tenant(algorithm=algorithm).algorithm
    mine = logprobs.clone().requires_grad_()
    found = token_loss(TokenInputs(mine, behaviour, advantages, reference if coefficient else None), spec)
    found.loss.sum().backward()
    capped = 0
    for i in range(40):
        theirs = logprobs[i].clone().double().requires_grad_()
        with torch.no_grad():
            weight = min(math.exp(min(float(theirs - behaviour[i]), 20.0)), 1.5)
        capped += weight == 1.5
        d = reference[i].double() - theirs
        loss = -weight * advantages[i].double() * theirs + coefficient * (torch.exp(d) - d - 1)
        loss.backward()
        assert float(found.loss[i].detach()) == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        assert float(mine.grad[i]) == pytest.approx(theirs.grad.item(), rel=1e-4, abs=1e-5)
    assert 0 < capped < 40
    assert not found.clipped.any()


def test_importance_metrics_are_means_over_the_tokens_of_all_passes():
    sums = TokenSums(cap=2.0)
    zero = torch.zeros
    sums.add(zero(2), zero(2), zero(2), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1 - math.log(4)]), None)
    sums.add(zero(1), zero(1), zero(1), torch.tensor([-1.0]), torch.tensor([-1 + math.log(2)]), None)
    assert sums.tokens == 3
    assert sums.importance == pytest.approx(1 + 2 + 0.5), "of 1, 4 and 1/2; the second is truncated"
    assert sums.truncated == 1
    assert sums.gap == pytest.approx(3 * math.log(2))


def sample(group, conversation, reward, tokens=(1, 2, 3)):
    mask = np.array([False, *[True] * (len(tokens) - 1)])
    return TrainingSample(
        group, np.array(tokens), mask, np.where(mask, -5.0, 0.0), reward, conversation=conversation
    )  # fmt: skip


def test_a_split_conversation_has_one_vote_in_its_group_s_mean_and_spread():
    # p: conversations worth 3 (in three parts), 0 and 0: mean 1, deviation sqrt 2. q: all 2. Parts come in any order.
    samples = [
        sample("p", "one", 3.0), sample("q", "one", 2.0), sample("p", "two", 0.0), sample("p", "one", 3.0),
        sample("p", None, 0.0), sample("q", "two", 2.0), sample("p", "one", 3.0), sample("q", "two", 2.0),
    ]  # fmt: skip
    plain = conversation_advantages(samples, normalize_std=False)
    np.testing.assert_allclose(plain.advantages, [2, 0, -1, 2, -1, 0, 2, 0])
    assert sorted(plain.rewards) == [0, 0, 2, 2, 3]
    assert plain.saturated_share == 0.5
    scaled = conversation_advantages(samples, normalize_std=True)
    np.testing.assert_allclose(scaled.advantages, np.array([2, 0, -1, 2, -1, 0, 2, 0]) / math.sqrt(2), rtol=1e-5)


def test_an_update_reports_a_split_conversation_once_and_trains_on_all_of_its_parts(tiny):
    trainer = trainer_of(tiny, ["a/x"], budget=4096)
    seen = []
    entry = trainer["a/x"]
    real = entry.token_loss
    entry.token_loss = lambda inputs, spec: (seen.append(inputs), real(inputs, spec))[1]
    parts = [sample("g", "one", 1.0, (1, 2, 3, 4)), sample("g", "one", 1.0, (1, 5, 6)), sample("g", "two", 0.0)]
    metrics = trainer.update([TrainingBatch("a/x", parts)])["a/x"].metrics
    assert metrics["reward_mean"] == 0.5
    assert metrics["reward_std"] == 0.5
    assert metrics["sampled_tokens"] == 7
    assert metrics["completion_tokens_mean"] == 3.5, "of a conversation"
    [inputs] = seen
    assert sorted(inputs.advantages.tolist()) == [-0.5] * 2 + [0.5] * 5
