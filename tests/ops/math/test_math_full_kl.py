"""The divergence over the whole vocabulary: by hand, gradients, garbage, against estimates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.ops.math.kl import full_kl, token_kl

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, False]])


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_both_directions_by_hand():
    """pi is (1/2, 1/4, 1/4), the reference (1/4, 1/2, 1/4)."""
    pi, ref = rows([[0.5, 0.25, 0.25]] * 2).log(), rows([[0.25, 0.5, 0.25]] * 2).log()
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    found = full_kl(pi[None, 0], ref[None, 0], MASK)
    torch.testing.assert_close(found, rows([expected, 0.0]), rtol=1e-12, atol=0)
    skewed = rows([[0.8, 0.1, 0.1]] * 2).log()
    reverse = 0.8 * math.log(0.8 / 0.25) + 0.1 * math.log(0.1 / 0.5) + 0.1 * math.log(0.1 / 0.25)
    forward = 0.25 * math.log(0.25 / 0.8) + 0.5 * math.log(0.5 / 0.1) + 0.25 * math.log(2.5)
    assert pytest.approx(reverse) == full_kl(skewed[None, 0], ref[None, 0], MASK)[0, 0].item()
    both = full_kl(skewed[None, 0], ref[None, 0], MASK, forward=True)
    assert pytest.approx(forward) == both[0, 0].item()


@pytest.mark.parametrize("forward", [False, True])
@given(seed=st.integers(0, 500))
def test_it_is_torchs_and_never_negative(seed, forward):
    generator = torch.Generator().manual_seed(seed)
    logits, other = 2 * torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=generator) < 0.7
    pi, ref = (x.log_softmax(-1) for x in (logits, other))
    found = full_kl(pi, ref, mask, forward=forward)
    first, second = (ref, pi) if forward else (pi, ref)
    expected = torch.nn.functional.kl_div(second, first, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, expected.where(mask, 0.0), rtol=1e-10, atol=1e-13)
    assert (found >= -1e-12).all()
    assert not full_kl(pi, pi, mask).any()


def test_its_gradient_is_the_expectation_of_that_of_k2():
    """E_pi[x grad log pi] over the vocabulary is the gradient of KL(pi || pi_ref)."""
    generator = torch.Generator().manual_seed(3)
    logits, other = torch.randn(2, 1, 1, 6, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    leaf = logits.clone().requires_grad_()
    full_kl(leaf.log_softmax(-1), other.log_softmax(-1), mask).sum().backward()
    again = logits.clone().requires_grad_()
    pi, ref = again.log_softmax(-1)[0], other.log_softmax(-1)[0]
    every = torch.ones(1, 6, dtype=torch.bool)
    (pi.detach().exp() * token_kl(pi, ref, every, kind="k2")).sum().backward()
    torch.testing.assert_close(again.grad, leaf.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_garbage_in_masked_log_softmaxes_reaches_no_gradient(bad):
    pi = rows([[0.5, 0.5], [bad, bad]])[None, 0].log()
    pi[0, 1] = bad
    leaf, ref = pi.requires_grad_(), pi.detach().clone() - 0.1
    full_kl(leaf, ref, MASK).sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[0, 0].all()
    assert not leaf.grad[0, 1].any()


def test_an_impossible_token_adds_nothing():
    pi = rows([[0.5, 0.5, 0.0]]).log()[None]
    ref = rows([[0.25, 0.25, 0.5]]).log()[None]
    leaf = pi.clone().requires_grad_()
    found = full_kl(leaf, ref, torch.tensor([[True]]))
    found.sum().backward()
    assert pytest.approx(math.log(2)) == found.item()
    assert leaf.grad.isfinite().all()
    assert math.inf == full_kl(ref, pi, torch.tensor([[True]])).item()
