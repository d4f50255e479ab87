"""The processor's kernels over the vocabulary agree with the torch definitions that sampler and trainer have."""

import numpy as np
import pytest
import torch

from marlaas.cpu_kernels import as_array
from marlaas.sampling import choice
from marlaas.sampling.distribution import draw
from marlaas.training import logprobs
from marlaas.training.logprobs import Targets
from marlaas_kernels.cpu import vocabulary

TYPES = [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)]


def random_logits(dtype, rows=7, size=1300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * torch.tensor([0.1, 1, 3, 10, 30, 3, 3])[:, None]).to(dtype)


def random_targets(logits, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows, size = logits.shape
    tokens = torch.randint(0, size, (rows,), generator=generator)
    temperature = torch.rand(rows, generator=generator) + 0.5
    return Targets(tokens, temperature, torch.zeros(rows, dtype=torch.int64), torch.ones(rows))


def in_torch(monkeypatch):
    for module in (choice, logprobs):
        monkeypatch.setattr(module, "runs_here", lambda device, dtype: False)


@pytest.mark.parametrize("values", [[1.0, -2.0, 5.0], [-3.0], [-0.0, 0.0], [-torch.inf, -7.0], [torch.inf, 1.0]])
def test_the_largest(values):
    assert vocabulary.largest(np.array(values, dtype=np.float32)) == max(values)


def test_the_largest_of_what_is_not_a_number_is_none():
    assert np.isnan(vocabulary.largest(np.array([1, np.nan, np.inf], dtype=np.float32)))


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_draws_are_those_of_the_definition(dtype, tolerance):
    logits = random_logits(dtype)
    temperature = random_targets(logits).temperature
    same = 0
    for uniform in np.linspace(0, 1 - 1e-12, 50):
        u = torch.full((len(logits),), uniform, dtype=torch.float64)
        tokens, given = choice.draw_at(logits, temperature, u)
        expected, of_expected = draw(logits.float() / temperature[:, None], u)
        same += int((tokens == expected).sum())
        where = tokens == expected
        torch.testing.assert_close(given[where], of_expected[where], rtol=1e-5, atol=1e-5)
    assert same >= 50 * len(logits) - 2, "but for draws that fall on a rounding"


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -torch.inf]]).repeat(20_000, 1)
    uniform = torch.from_numpy(np.random.default_rng(0).random(20_000))
    tokens, _ = choice.draw_at(logits, torch.full((20_000,), 2.0), uniform)
    observed = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(observed, (logits[0] / 2).softmax(-1), rtol=0, atol=0.015)
    assert observed[4] == 0


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_greedy_takes_the_first_of_the_likeliest(dtype, tolerance, monkeypatch):
    logits = random_logits(dtype)
    logits[2, 5] = logits[2, 900] = logits[2].max() + 1
    tokens, given = choice.greedy(logits)
    assert tokens[2] == 5
    in_torch(monkeypatch)
    expected, of_expected = choice.greedy(logits)
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(given, of_expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_logprobs_and_entropy(dtype, tolerance, monkeypatch):
    logits = random_logits(dtype)
    logits[3, 17] = -torch.inf
    targets = random_targets(logits)
    got = logprobs.logprobs_and_entropy(logits, targets)
    in_torch(monkeypatch)
    for mine, expected in zip(got, logprobs.logprobs_and_entropy(logits, targets), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
def test_gradient_of_the_logprobs(dtype, tolerance, monkeypatch):
    logits = random_logits(dtype)
    targets, weight = random_targets(logits), torch.linspace(-2, 2, len(logits))
    got = logprobs.logits_gradient(logits.clone(), targets, weight)
    in_torch(monkeypatch)
    expected = logprobs.logits_gradient(logits.clone(), targets, weight)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 1e-2)
    exact = logits.double().requires_grad_()
    chosen = (exact / targets.temperature[:, None].double()).log_softmax(-1)
    (chosen.gather(1, targets.tokens[:, None]).squeeze(1) * weight.double()).sum().backward()
    torch.testing.assert_close(got.double(), exact.grad, rtol=tolerance, atol=tolerance * 1e-2)


def test_a_row_that_is_not_a_number_spoils_no_other():
    logits = random_logits(torch.float32)
    targets, half = random_targets(logits), torch.full((7,), 0.5, dtype=torch.float64)
    spoiled = logits.clone()
    spoiled[1, 4] = torch.nan
    others = [0, 2, 3, 4, 5, 6]
    for of in (
        lambda x: choice.draw_at(x, targets.temperature, half),
        choice.greedy,
        lambda x: logprobs.logprobs_and_entropy(x, targets),
    ):
        for got, expected in zip(of(spoiled), of(logits), strict=True):
            assert torch.equal(got[others], expected[others])
        assert of(spoiled)[-1][1].isnan()


def test_memory_of_a_tensor_is_shared():
    x = torch.zeros(3)
    as_array(x)[1] = 2
    assert x.tolist() == [0, 2, 0]
