from __future__ import annotations

import pytest
import torch

from rlflow.contract.values import Sampling
from rlflow.engines.hf.generate.narrow import draw_narrow
from rlflow.engines.hf.generate.sampling import (
    draw_tokens,
    invert,
    require_finite,
    top_candidates,
)
from rlflow.errors import NumericsError

pytestmark = pytest.mark.torch


def test_invert_finds_the_interval_that_holds_the_number():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]], dtype=torch.float64).expand(5, 5)
    uniform = torch.tensor([1e-17, 0.24, 0.25, 0.9, 1 - 2**-53], dtype=torch.float64)
    assert [1, 1, 3, 3, 3] == invert(probs, uniform).tolist()


def test_frequencies_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0]]).expand(100_000, 3)
    uniform = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    tokens, log_probs = draw_tokens(logits, uniform, Sampling(max_new_tokens=1, temperature=0.5))
    expected = (logits[0] / 0.5).softmax(-1)
    assert torch.allclose(expected, tokens.bincount() / 100_000, atol=2e-5)
    assert torch.equal(expected.log()[tokens].float(), log_probs) or torch.allclose(
        expected.log()[tokens], log_probs, atol=1e-6
    )


def test_greedy_gives_log_probs_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, log_probs = draw_tokens(
        logits, torch.zeros(1).double(), Sampling(max_new_tokens=1, temperature=0)
    )
    assert [1] == tokens.tolist()
    assert torch.allclose(logits.log_softmax(-1)[0, 1:2], log_probs)


@pytest.mark.parametrize(
    ("expected", "top_k", "top_p"),
    [
        ([0.4, 0.3, 0.2, 0.1], 0, 1.0),
        ([0.4, 0.3, 0.0, 0.0], 2, 1.0),
        ([0.4, 0.3, 0.0, 0.0], 0, 0.6),
        ([0.4, 0.0, 0.0, 0.0], 0, 0.01),
        ([0.4, 0.0, 0.0, 0.0], 2, 0.5),
    ],
)
def test_top_k_and_top_p_keep_the_likeliest(expected, top_k, top_p):
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double()
    sampling = Sampling(max_new_tokens=1, top_k=top_k, top_p=top_p)
    assert torch.allclose(torch.tensor([expected]).double(), top_candidates(probs, sampling))


def test_log_probs_are_of_the_whole_distribution_under_top_k():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    sampling = Sampling(max_new_tokens=1, top_k=1)
    _, log_probs = draw_tokens(logits, torch.tensor([0.9]).double(), sampling)
    assert torch.allclose(logits.log_softmax(-1)[0, 1:2], log_probs)


@pytest.mark.parametrize("draw", [draw_tokens, draw_narrow])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_draw_a_token_whose_log_prob_says_so(draw, temperature, value):
    logits = torch.tensor([[0.0, 1.0, -1.0], [0.0, value, -1.0]])
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    tokens, log_probs = draw(logits, torch.tensor([0.5, 0.5]).double(), sampling)

    assert tokens.max() < 3
    assert [True, False] == log_probs.isfinite().tolist()
    with pytest.raises(NumericsError, match=r"E652(?s:.*)1 of 2 sampled tokens"):
        require_finite(log_probs)
    require_finite(log_probs[:1])
