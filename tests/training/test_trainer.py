"""The trainer gives each job what it would get alone, and what PEFT and torch would give it."""

import dataclasses

import numpy as np
import pytest
import torch
from engine import random_batch, tenant
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from marlaas.errors import BatchError
from marlaas.lora.peft_format import export_peft, import_peft
from marlaas.training.advantages import group_advantages
from marlaas.training.trainer import Trainer

SPECS = {
    "a/x": tenant("a", lora={"rank": 4, "alpha": 8}, seed=1, optimizer={"learning_rate": 1e-2}),
    "b/x": tenant("b", lora={"rank": 8, "alpha": 8, "targets": ["q_proj", "v_proj"]}, seed=2),
    "c/x": tenant("c", lora={"rank": 2, "alpha": 2}, seed=3, algorithm={"kl_coefficient": 0.1}),
    "d/x": tenant("d", lora={"rank": 4, "alpha": 8}, seed=4, algorithm={"normalize_std": True}),
}


def trainer_of(base, jobs, budget=256):
    trainer = Trainer(base, slots=4, slot_size=40_000, micro_batch_tokens=budget)
    for job in jobs:
        trainer.open(job, SPECS[job])
    return trainer


def run(trainer, jobs, steps=3, base_seed=0):
    for step in range(steps):
        batches = [random_batch(trainer.base, job, base_seed + 100 * step + i) for i, job in enumerate(jobs)]
        results = trainer.update(batches)
        for result in results.values():
            assert not isinstance(result, Exception), result


def test_a_job_trained_with_three_others_equals_the_same_job_trained_alone(tiny):
    together = trainer_of(tiny, SPECS)
    run(together, list(SPECS))
    for index, job in enumerate(SPECS):
        alone = trainer_of(tiny, [job])
        for step in range(3):
            alone.update([random_batch(tiny, job, 100 * step + index)])
        difference = (together[job].weights - alone[job].weights).abs().max()
        moved = (alone[job].weights - trainer_of(tiny, [job])[job].weights).abs().max()
        assert difference <= 1e-5
        assert moved > 1e-4


def test_an_update_is_bitwise_repeatable(tiny):
    first, second = trainer_of(tiny, SPECS), trainer_of(tiny, SPECS)
    run(first, list(SPECS))
    run(second, list(SPECS))
    for job in SPECS:
        assert torch.equal(first[job].weights, second[job].weights)


def test_a_restored_job_continues_bit_for_bit(tiny):
    whole = trainer_of(tiny, ["a/x"])
    run(whole, ["a/x"], steps=2)
    resumed = Trainer(tiny, 1, 40_000, 256)
    resumed.open("a/x", SPECS["a/x"], whole.state("a/x"))
    run(whole, ["a/x"], base_seed=7)
    run(resumed, ["a/x"], base_seed=7)
    assert torch.equal(whole["a/x"].weights, resumed["a/x"].weights)
    assert whole["a/x"].version == resumed["a/x"].version == 5


def test_micro_batches_of_any_size_give_the_same_update(tiny):
    large, small = trainer_of(tiny, SPECS, 4096), trainer_of(tiny, SPECS, 48)
    run(large, list(SPECS), steps=1)
    run(small, list(SPECS), steps=1)
    for job in SPECS:
        assert (large[job].weights - small[job].weights).abs().max() < 1e-5


@pytest.mark.parametrize(("model", "job"), [*(("tiny", job) for job in SPECS), ("tiny_gemma", "a/x")])
def test_the_gradient_is_that_of_peft_and_autograd_one_sample_at_a_time(request, model, job):
    base, spec = request.getfixturevalue(model), SPECS[job]
    trainer = trainer_of(base, [job])
    weights = trainer[job].weights
    weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(5)) * 0.02)
    batch = random_batch(base, job, 11)
    layout = trainer[job].layout
    model, parameters = peft_model(base, spec, layout, weights)
    loss = reference_loss(model, spec, batch)
    loss.backward()
    before = weights.clone()
    trainer.update([batch])
    assert not torch.equal(before, weights)
    for t in layout.tensors(trainer[job].vectors.gradient, base.transformer.sites):
        expected = parameters[t.layer, t.module, t.matrix].grad
        norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters.values()))
        scale = min(1.0, float(spec.optimizer.max_grad_norm / norm))
        torch.testing.assert_close(t.tensor, expected * scale, atol=2e-6, rtol=1e-3)


def test_adamw_matches_torch(tiny):
    from marlaas.training.optimizer import AdamState, adamw_

    spec = tenant(optimizer={"learning_rate": 3e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)}).optimizer
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(50, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1)
    state = AdamState(torch.zeros(50), torch.zeros(50))
    for _ in range(5):
        gradient = torch.randn(50, generator=generator)
        theirs.grad = gradient.clone()
        optimizer.step()
        adamw_(ours, gradient, state, spec, 3e-3)
    torch.testing.assert_close(ours, theirs.data, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ({"reward": float("nan")}, "reward nan is not finite"),
        ({"reward": float("inf")}, "reward inf is not finite"),
        ({"tokens": np.array([1, 2, 10_000])}, "token ids must be in"),
        ({"mask": np.zeros(3, bool)}, "the mask must have a sampled token"),
        ({"logprobs": np.array([0, 0, np.nan])}, "logprobs must be finite"),
        ({"logprobs": np.array([0.0])}, "they must be equally many"),
    ],
)
def test_a_bad_batch_is_refused_and_nobody_else_notices(tiny, harm, says):
    whole = {"group": "g", "tokens": np.array([1, 2, 3]), "mask": np.array([False, False, True])}
    whole |= {"logprobs": np.array([0, 0, -1.0]), "reward": 1.0}
    good, bad = random_batch(tiny, "a/x", 0), random_batch(tiny, "b/x", 1)
    sample = dataclasses.replace(bad.samples[0], **(whole | harm))
    bad = dataclasses.replace(bad, samples=[*bad.samples, sample])
    mixed, alone = trainer_of(tiny, ["a/x", "b/x"]), trainer_of(tiny, ["a/x"])
    untouched = mixed["b/x"].weights.clone()
    results = mixed.update([bad, good])
    alone.update([good])
    assert isinstance(results["b/x"], BatchError)
    assert says in str(results["b/x"])
    assert torch.equal(mixed["a/x"].weights, alone["a/x"].weights)
    assert torch.equal(mixed["b/x"].weights, untouched)


def test_weights_that_overflow_poison_only_their_own_job(tiny):
    mixed, alone = trainer_of(tiny, ["a/x", "b/x"]), trainer_of(tiny, ["a/x"])
    mixed["b/x"].weights.fill_(1e30)
    before = mixed["b/x"].weights.clone()
    results = mixed.update([random_batch(tiny, "b/x", 1), random_batch(tiny, "a/x", 0)])
    alone.update([random_batch(tiny, "a/x", 0)])
    assert "not finite" in str(results["b/x"])
    assert torch.equal(mixed["b/x"].weights, before)
    assert mixed["b/x"].optimizer_step == 0
    torch.testing.assert_close(mixed["a/x"].weights, alone["a/x"].weights, atol=1e-6, rtol=0)


def test_saturated_groups_give_no_advantage_and_are_counted():
    result = group_advantages(["p", "p", "q", "q"], [1.0, 1.0, 0.0, 1.0], normalize_std=False)
    np.testing.assert_allclose(result.advantages, [0, 0, -0.5, 0.5])
    assert result.saturated_share == 0.5


def peft_model(base, spec, layout, weights):
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    config = LoraConfig(
        r=spec.lora.rank, lora_alpha=spec.lora.alpha, target_modules=list(spec.lora.targets), task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, config)
    by_name, parameters = dict(model.named_parameters()), {}
    for t in layout.tensors(weights, base.transformer.sites):
        group = "self_attn" if t.module[0] in "qkvo" else "mlp"
        name = f"base_model.model.model.layers.{t.layer}.{group}.{t.module}.lora_{t.matrix}.default.weight"
        by_name[name].data.copy_(t.tensor)
        parameters[t.layer, t.module, t.matrix] = by_name[name]
    assert import_peft(export_peft(layout, weights, base.transformer, "x"), base.transformer)[1].equal(weights)
    return model, parameters


def reference_loss(model, spec, batch):
    """GRPO as its papers write it, sample by sample, token by token."""
    groups = [s.group for s in batch.samples]
    rewards = np.array([s.reward for s in batch.samples])
    total_tokens = sum(int(s.mask.sum()) for s in batch.samples)
    algorithm, loss = spec.algorithm, 0.0
    for sample in batch.samples:
        of_group = rewards[[g == sample.group for g in groups]]
        advantage = sample.reward - of_group.mean()
        if algorithm.normalize_std:
            advantage /= of_group.std() + 1e-6
        tokens = torch.tensor(sample.tokens)
        logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        with torch.no_grad(), model.disable_adapter():
            reference = model(tokens[None]).logits[0].log_softmax(-1)
        for at in np.nonzero(sample.mask)[0]:
            logprob = logprobs[at - 1, tokens[at]]
            ratio = torch.exp(logprob - float(sample.logprobs[at]))
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage) / total_tokens
            d = reference[at - 1, tokens[at]] - logprob
            loss = loss + algorithm.kl_coefficient * (d.exp() - d - 1) / total_tokens
    return loss
