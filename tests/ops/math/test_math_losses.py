"""Token losses and KL estimators: values and gradients by hand, garbage under the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.kl import token_kl
from rlflow.ops.math.losses.clipped import clipped, log_ratio, nll, ppo_clip, value_loss
from tests.budget import examples

pytestmark = pytest.mark.torch

LN2 = math.log(2)


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everywhere(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def close(expected: Tensor, got: Tensor) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=1e-12, atol=1e-12)


def value_and_gradient(function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = function(x)
    value.sum().backward()
    return value.detach(), x.grad


# PPO clip


def test_ppo_clip_by_hand():
    """Ratio above, above, below, below, at 1; the clipped branch holds in 1st and 4th."""
    ratio, gain = f64([1.5, 1.5, 0.5, 0.5, 1.0]), f64([1, -1, 1, -1, 2])
    old = f64([-0.5, -0.6, -0.7, -0.8, -0.9])
    value, gradient = value_and_gradient(
        lambda x: ppo_clip(x, old, gain, everywhere(x), clip=(0.2, 0.2))[0], old + ratio.log()
    )
    close(f64([-1.2, 1.5, -0.5, 0.8, -2.0]), value)
    close(f64([0, 1.5, -0.5, 0, -2]), gradient)


def test_clip_higher_has_a_side_of_its_own():
    ratio = f64([1.25, 1.35, 0.75])
    value, gradient = value_and_gradient(
        lambda x: ppo_clip(x, torch.zeros_like(x), f64(1), everywhere(x), clip=(0.2, 0.28))[0],
        ratio.log(),
    )
    close(f64([-1.25, -1.28, -0.75]), value)
    close(f64([-1.25, 0, -0.75]), gradient)


def test_dual_clip_binds_where_the_advantage_is_negative():
    ratio, gain = f64([5, 5, 2, 0.5]), f64([-1, 1, -1, -1])
    value, gradient = value_and_gradient(
        lambda x: ppo_clip(
            x, torch.zeros_like(x), gain, everywhere(x), clip=(0.2, 0.2), dual_clip=3.0
        )[0],
        ratio.log(),
    )
    close(f64([3, -1.2, 2, 0.8]), value)
    close(f64([0, 0, 2, 0]), gradient)


def test_an_advantage_per_row_is_one_per_token():
    log_probs, mask = f64([-1, -2], [-3, -4]), torch.tensor([[True, True], [True, False]])
    old = log_probs + 0.1
    row = ppo_clip(log_probs, old, f64(1, -2), mask, clip=(0.2, 0.2))[0]
    token = ppo_clip(log_probs, old, f64([1, 1], [-2, -2]), mask, clip=(0.2, 0.2))[0]
    assert torch.equal(row, token)


def test_the_ratio_is_finite_however_far_the_policy_moved():
    far = f64([-1000, 0, -1]), f64([0, -1000, -1])
    value, gradient = value_and_gradient(lambda x: log_ratio(x, far[1], everywhere(x)), far[0])
    assert [[-20.0, 20.0, 0.0]] == value.tolist()
    assert [[0.0, 0.0, 1.0]] == gradient.tolist()


def test_clipped_is_strict():
    ratio = f64([1.2, 1.2000001, 0.8, 0.7999999, 1.5, 1.5])
    gain, mask = f64([1, 1, -1, -1, -1, 1]), torch.tensor([[True] * 5 + [False]])
    expected = [[False, True, False, True, False, False]]
    assert expected == clipped(ratio, gain, mask, clip=(0.2, 0.2)).tolist()


@settings(deadline=None, max_examples=examples(30), derandomize=True)
@given(st.integers(0, 10**6))
def test_without_bounds_ppo_is_the_plain_surrogate(seed):
    draw = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = everywhere(draw[0])
    loss, ratio = ppo_clip(draw[0], draw[1], draw[2], mask, clip=(math.inf, math.inf))
    close(-draw[2] * (draw[0] - draw[1]).exp(), loss)
    assert not clipped(ratio, draw[2], mask, clip=(math.inf, math.inf)).any()


def test_at_the_old_policy_the_gradient_is_that_of_reinforce():
    draw = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, gradient = value_and_gradient(
        lambda x: ppo_clip(x, draw[0], draw[1], everywhere(x), clip=(0.2, 0.2), dual_clip=2.0)[0],
        draw[0],
    )
    assert torch.equal(-draw[1], gradient)


# value loss and likelihood


def test_clipped_value_loss_by_hand():
    """Old value 0, clip 1/2: clipped branch larger and flat; inside; free larger; as first."""
    values, returns = f64([2, 0.2, 2, -0.7]), f64([3, 3, 0, -3])
    value, gradient = value_and_gradient(
        lambda v: value_loss(v, torch.zeros_like(v), returns, everywhere(v), clip=0.5), values
    )
    close(f64([3.125, 3.92, 2, 3.125]), value)
    close(f64([0, -2.8, 2, 0]), gradient)


def test_unclipped_value_loss_is_half_the_squared_error():
    values, returns = f64([2, 0.2]), f64([3, 3])
    value, gradient = value_and_gradient(
        lambda v: value_loss(v, None, returns, everywhere(v), clip=None), values
    )
    close(f64([0.5, 3.92]), value)
    close(f64([-1, -2.8]), gradient)


def test_nll_is_minus_the_log_probs():
    value, gradient = value_and_gradient(
        lambda x: nll(x, torch.tensor([[True, False]])), f64([-3, -4])
    )
    assert [[3.0, 0.0]] == value.tolist()
    assert [[-1.0, 0.0]] == gradient.tolist()


# KL


@pytest.mark.parametrize(
    ("kind", "difference", "value", "gradient"),
    [
        ("k1", LN2, LN2, 1),
        ("k1", -LN2, -LN2, 1),
        ("abs", -LN2, LN2, -1),
        ("k2", -LN2, LN2**2 / 2, -LN2),
        ("k3", LN2, LN2 - 0.5, 0.5),
        ("k3", -LN2, 1 - LN2, -1),
        ("k3", 25.0, 10.0, 0),
        ("k3", -4.0, 10.0, 0),
        ("k1+", -LN2, -LN2, -LN2),
        ("abs+", -LN2, LN2, -LN2),
        ("k2+", LN2, LN2**2 / 2, LN2),
        ("k3+", LN2, LN2 - 0.5, LN2),
        ("k3+", -4.0, 10.0, -4),
    ],
)
def test_kl_estimators_by_hand(kind, difference, value, gradient):
    got = value_and_gradient(
        lambda x: token_kl(x, f64([-3]), everywhere(x), kind=kind), f64([-3 + difference])
    )
    assert pytest.approx(value, rel=1e-12) == got[0].item()
    assert pytest.approx(gradient, rel=1e-12) == got[1].item()


@settings(deadline=None, max_examples=examples(40), derandomize=True)
@given(st.floats(-3, 2))
def test_k2_and_k3_are_never_negative_and_agree_near_zero(difference):
    x, ref = f64([difference, difference * 1e-3]), f64([0, 0])
    k2, k3 = (token_kl(x, ref, everywhere(x), kind=kind) for kind in ("k2", "k3"))
    assert (k2 >= 0).all()
    assert (k3 >= 0).all()
    assert (k2 - k3)[0, 1].abs() <= 0.18 * abs(difference * 1e-3) ** 3 + 1e-18


def test_k3_keeps_its_digits_near_zero_in_float32():
    """exp(y) - y - 1 would be 0 or 1.2e-7 here."""
    x = torch.tensor([[1e-4]])
    got = token_kl(x, torch.zeros_like(x), everywhere(x), kind="k3").item()
    assert pytest.approx(5e-9, rel=1e-2) == got


MASK = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])


def test_a_row_advantage_that_is_nan_in_an_empty_row_is_not_seen():
    log_probs = torch.zeros(3, 3, requires_grad=True)
    gain = torch.tensor([1.0, 2.0, math.nan])
    loss, _ = ppo_clip(log_probs, torch.zeros(3, 3), gain, MASK, clip=(0.2, 0.2))
    loss.sum().backward()
    assert [-1.0, -2.0, 0.0] == loss.sum(-1).div(MASK.sum(-1).clamp(min=1)).tolist()
    assert log_probs.grad.isfinite().all()
