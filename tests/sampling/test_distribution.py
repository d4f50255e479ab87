"""Draws follow the distribution whose log-probs are recorded."""

import numpy as np
import pytest
import torch
from scipy import stats

from marlaas.sampling.distribution import adjusted_logits, draw, uniforms


def column(value, n, dtype=torch.float32):
    return torch.full((n,), value, dtype=dtype)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.3, 40, 0.9)])
def test_draws_have_the_frequencies_of_their_logprobs(temperature, top_k, top_p):
    n, vocabulary = 40_000, 700
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    adjusted = adjusted_logits(
        logits.expand(1, -1), column(temperature, 1), column(top_k, 1, torch.long), column(top_p, 1)
    )
    u = torch.from_numpy(uniforms(np.arange(n), np.zeros(n)))
    tokens, logprobs = zip(*(draw(adjusted.expand(len(part), -1), part) for part in u.split(1000)), strict=True)
    tokens, logprobs = torch.cat(tokens), torch.cat(logprobs)
    expected = adjusted[0].softmax(-1)
    torch.testing.assert_close(logprobs, adjusted[0].log_softmax(-1)[tokens], atol=1e-5, rtol=1e-5)
    counts = torch.bincount(tokens, minlength=vocabulary).double()
    assert (counts[expected == 0] == 0).all()
    often = expected * n >= 5
    rest = float((expected[~often]).sum()) * n
    observed = np.append(counts[often].numpy(), float(counts[~often].sum()))
    wanted = np.append((expected[often] * n).numpy(), rest)
    if rest < 5:
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_mass():
    logits = torch.full((2, 600), -torch.inf)
    logits[:, [5, 300, 555]] = 0.0
    tokens, logprobs = draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [5, 555]
    assert torch.isfinite(logprobs).all()


def test_uniforms_are_uniform_and_independent_of_neighbouring_seeds():
    u = uniforms(np.repeat(np.arange(200), 50), np.tile(np.arange(50), 200))
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    grid = u.reshape(200, 50)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05


def test_the_token_that_was_drawn_is_kept_whatever_the_limits_say():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    kept = adjusted_logits(logits, column(1.0, 1), column(1, 1, torch.long), column(1.0, 1), always_N=torch.tensor([3]))
    assert torch.isfinite(kept).tolist() == [[True, False, False, True]]
