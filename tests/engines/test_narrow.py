"""Drawing without float64 over the vocabulary: the reference's tokens, and how far it is off."""

from __future__ import annotations

import pytest
import torch

from rlflow.contract.values import Sampling
from rlflow.engines.hf.generate.narrow import PART, draw_narrow, drop_unlikely
from rlflow.engines.hf.generate.sampling import draw_tokens, log_distribution, top_candidates
from rlflow.engines.hf.generate.waits import HostWaits

pytestmark = pytest.mark.torch

WAYS = {
    "all": {},
    "warm": {"temperature": 1.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 40, "top_p": 0.7, "temperature": 0.6},
    "one": {"top_p": 1e-6},
    "beyond": {"top_k": 10_000},
}


def logits_of(rows, vocabulary, dtype=torch.float32, spread=3.0):
    made = torch.Generator().manual_seed(vocabulary)
    return (spread * torch.randn(rows, vocabulary, generator=made)).to(dtype)


@pytest.mark.rows(24)
@pytest.mark.parametrize("vocabulary", [1, 30, PART, 3 * PART + 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_and_log_probs_are_the_references(way, vocabulary, dtype):
    """In bfloat16 many scores are equal, so who is kept among equals matters too."""
    logits = logits_of(400, vocabulary, dtype)
    uniform = (torch.randperm(400, generator=torch.Generator().manual_seed(1)).double() + 0.5) / 400
    sampling = Sampling(max_new_tokens=1, **WAYS[way])
    expected, expected_probs = draw_tokens(logits, uniform, sampling)
    tokens, log_probs = draw_narrow(logits, uniform, sampling)
    assert torch.equal(expected, tokens)
    assert torch.equal(expected_probs, log_probs)


@pytest.mark.parametrize("way", ["top_k", "top_p", "both", "one"])
def test_what_is_kept_is_what_the_reference_keeps(way):
    logits = logits_of(50, 700, torch.bfloat16, spread=0.5)
    sampling = Sampling(max_new_tokens=1, **WAYS[way])
    scores = log_distribution(logits, sampling.temperature)
    kept = top_candidates(scores.double().exp(), sampling) > 0
    probs = scores.exp()
    drop_unlikely(probs, scores, sampling)
    assert 0 < int(kept.sum()) < kept.numel()
    assert torch.equal(kept, probs > 0)


def test_bounds_of_the_distribution_function_are_within_a_millionth():
    """A number 1e-6 beside a bound draws what is on its side, over 150 000 tokens."""
    logits = logits_of(4, 150_001, spread=2.0)
    sampling = Sampling(max_new_tokens=1)
    mass = log_distribution(logits, 1.0).double().exp().cumsum(-1)
    mass = mass / mass[:, -1:]
    for token in torch.arange(1000, 150_000, 4973).tolist():
        bound = mass[:, token]
        below, _ = draw_narrow(logits, (bound - 1e-6).clamp(min=1e-17), sampling)
        above, _ = draw_narrow(logits, bound + 1e-6, sampling)
        assert bool((below <= token).all())
        assert bool((above > token).all())


def test_the_last_number_draws_a_token_that_has_a_probability():
    logits = torch.full((3, 2 * PART), float("-inf"))
    logits[:, 5] = 0.0
    logits[1, PART + 7] = -3.0
    logits[2, 2 * PART - 1] = -20.0
    uniform = torch.full((3,), 1 - 2**-53, dtype=torch.float64)
    tokens, log_probs = draw_narrow(logits, uniform, Sampling(max_new_tokens=1))
    assert [5, PART + 7, 2 * PART - 1] == tokens.tolist()
    assert torch.isfinite(log_probs).all()


@pytest.mark.parametrize("way", WAYS)
def test_nothing_waits_and_nothing_wide_is_as_large_as_the_vocabulary(way):
    sampling = Sampling(max_new_tokens=1, **WAYS[way])
    logits, uniform = logits_of(4, 5 * PART), torch.full((4,), 0.3).double()
    with HostWaits() as found:
        draw_narrow(logits, uniform, sampling)
    assert 0 == found.count
    assert found.largest[torch.float64] < logits.numel() // 2
    with HostWaits() as reference:
        draw_tokens(logits, uniform, sampling)
    assert way == "greedy" or reference.largest[torch.float64] >= logits.numel()
    draw_narrow(logits.to("meta"), uniform.to("meta"), sampling)
