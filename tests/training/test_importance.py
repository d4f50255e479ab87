"""Truncated importance weights, and conversations that became several samples."""

import numpy as np
import pytest
import torch
from engine import random_batch, tenant

from marlaas.errors import BatchError
from marlaas.training.advantages import conversation_advantages
from marlaas.training.batch import TrainingSample
from marlaas.training.losses.base import TokenInputs
from marlaas.training.losses.truncated import token_loss
from marlaas.training.trainer import Trainer


def test_the_truncated_loss_weighs_each_token_by_its_ratio_up_to_the_cap():
    generator = torch.Generator().manual_seed(0)
    logprobs = (-3 * torch.rand(20, generator=generator)).requires_grad_()
    behaviour, advantages = -3 * torch.rand(20, generator=generator), torch.randn(20, generator=generator)
    spec = tenant(algorithm={"name": "truncated", "importance_cap": 1.5}).algorithm
    token_loss(TokenInputs(logprobs, behaviour, advantages), spec).loss.sum().backward()
    for i in range(20):
        weight = min(float(torch.exp(logprobs[i] - behaviour[i]).detach()), 1.5)
        assert float(logprobs.grad[i]) == pytest.approx(-weight * float(advantages[i]), rel=1e-5)


def test_shares_of_clipped_and_truncated_tokens_are_reported_whatever_the_loss(tiny):
    for name in ("grpo", "truncated"):
        trainer = Trainer(tiny, 1, 40_000, 256)
        trainer.open("a/x", tenant("a", lora={"rank": 4, "alpha": 8}, algorithm={"name": name, "importance_cap": 1.0}))
        metrics = trainer.update([random_batch(tiny, "a/x", 3)])["a/x"].metrics
        assert 0 < metrics["truncated_share"] < 1
        assert 0 < metrics["importance_weight"] <= 1.0
        assert (metrics["clip_share"] > 0) == (name == "grpo")


def test_a_conversation_in_several_samples_counts_once_in_its_group():
    def sample(group, conversation, reward):
        return TrainingSample(group, np.array([1, 2]), np.array([False, True]), np.array([0, -1.0]), reward,
                              conversation=conversation)  # fmt: skip

    samples = [sample("g", "a", 1.0), sample("g", "a", 1.0), sample("g", "a", 1.0), sample("g", "b", 0.0)]
    found = conversation_advantages([*samples, sample("h", "a", 4.0), sample("h", None, 2.0)], normalize_std=False)
    np.testing.assert_allclose(found.advantages, [0.5, 0.5, 0.5, -0.5, 1.0, -1.0])
    np.testing.assert_allclose(found.rewards, [1.0, 0.0, 4.0, 2.0])


def test_an_update_interleaved_with_others_pass_by_pass_is_the_one_it_would_be_alone(tiny):
    specs = {f"{n}/x": tenant(n, lora={"rank": 4, "alpha": 8}, seed=i) for i, n in enumerate("abc")}
    together, steps = Trainer(tiny, 3, 40_000, 48), 0
    for job, spec in specs.items():
        together.open(job, spec)
    batches = {job: random_batch(tiny, job, i, groups=2 + i) for i, job in enumerate(specs)}
    assert together.begin(batches["a/x"])
    together.step(["a/x"])
    assert together.begin(batches["b/x"]) and together.begin(batches["c/x"])  # noqa: PT018
    while together.active:
        together.step(together.active[steps % len(together.active) :])
        steps += 1
    for job, spec in specs.items():
        alone = Trainer(tiny, 1, 40_000, 4096)
        alone.open(job, spec)
        alone.update([batches[job]])
        torch.testing.assert_close(together[job].weights, alone[job].weights, atol=1e-6, rtol=0)
    assert steps > 3


def test_a_pass_that_raises_ends_the_updates_that_were_in_it_and_no_other(tiny, monkeypatch):
    trainer = Trainer(tiny, 2, 40_000, 4096)
    for name in "ab":
        trainer.open(f"{name}/x", tenant(name, lora={"rank": 4, "alpha": 8}))
        trainer.begin(random_batch(tiny, f"{name}/x", 1))
    before = trainer["a/x"].weights.clone()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_accumulate_gradients", lambda micro: 1 / 0)
        failed = trainer.step(["a/x"]).results
    assert isinstance(failed["a/x"], BatchError)
    assert "ZeroDivisionError" in str(failed["a/x"])
    assert torch.equal(trainer["a/x"].weights, before)
    assert trainer.active == ["b/x"]
    assert trainer.step(["b/x"]).results["b/x"].version == 1
    trainer.begin(random_batch(tiny, "a/x", 2))
    trainer.close("a/x")
    assert trainer.active == []


def test_an_optimizer_that_fails_ends_its_own_update_and_no_other(tiny, monkeypatch):
    trainer = Trainer(tiny, 2, 40_000, 4096)
    for name in "ab":
        trainer.open(f"{name}/x", tenant(name, lora={"rank": 4, "alpha": 8}))
    apply = trainer._apply
    monkeypatch.setattr(trainer, "_apply", lambda job, ready: 1 / 0 if job == "a/x" else apply(job, ready))
    results = trainer.update([random_batch(tiny, f"{name}/x", 1) for name in "ab"])
    assert "the optimizer failed: ZeroDivisionError" in str(results["a/x"])
    assert results["b/x"].version == 1
