"""The policy term of another policy's samples: denominators and normalised weights.

A divisor of the whole optimizer step (kept tokens, mean weight) is summed over parts first;
what is reweighed or left out is the policy term, no other.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlflow.ops.corrections import ImportanceSampling, Rejection
from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.importance import normalized, weight_sums
from rlflow.ops.math.losses.clipped import value_loss
from rlflow.ops.math.losses.mismatch import step_sums
from rlflow.ops.math.losses.objective import policy_objective

pytestmark = pytest.mark.torch

TOKEN = Rejection("k1", high=1.5)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_errors_beyond_huber_count_as_a_line(clip):
    """Errors 0.5, -3, 4 with d = 2: 0.125, 2 (3 - 1), 2 (4 - 1); clipped values near the old."""
    values = torch.tensor([[0.5, -3.0, 4.0, math.nan]], dtype=torch.float64).requires_grad_()
    zeros, mask = torch.zeros(1, 4), torch.tensor([[True, True, True, False]])
    loss = value_loss(values, zeros, zeros, mask, clip=clip, huber=2.0)
    loss.sum().backward()
    assert pytest.approx([0.125, 4.0, 6.0, 0.0]) == loss[0].tolist()
    assert pytest.approx([0.5, -2.0, 2.0, 0.0]) == values.grad[0].tolist()
    old = torch.tensor([[0.0, -9.0, 9.0, 0.0]])
    held = value_loss(values.detach(), old, zeros, mask, clip=0.5, huber=2.0)
    assert pytest.approx([0.125, 2 * (8.5 - 1), 2 * (8.5 - 1), 0.0]) == held[0].tolist()


def two_rows() -> dict[str, Tensor]:
    """Ratios pi_old / pi_rollout of 1, 4 | 1; token losses (-advantage) of -1, -2 | -3."""
    old = torch.full((2, 2), -2.0, dtype=torch.float64)
    rollout = old - torch.tensor([[1.0, 4.0], [1.0, 7.0]], dtype=torch.float64).log()
    return {
        "log_probs": old.clone(),
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "ref_log_probs": old - 1.0,
        "advantages": torch.tensor([[1.0, 2.0], [3.0, 0.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[True, True], [True, False]]),
    }


@pytest.mark.parametrize(
    ("over", "mode", "every", "kept"),
    [
        ("token", "token-mean", -4 / 3, -4 / 2),
        ("token", "seq-mean-token-sum", -4 / 2, -4 / 2),
        ("token", "seq-mean-token-mean", (-1 / 2 - 3) / 2, (-1 - 3) / 2),
        ("row-mean", "token-mean", -3 / 3, -3 / 1),
        ("row-mean", "seq-mean-token-sum", -3 / 2, -3 / 1),
        ("row-mean", "seq-mean-token-mean", -3 / 2, -3 / 1),
    ],
)
def test_the_denominator_of_what_is_kept_by_hand(over, mode, every, kept):
    """The second token is rejected, or the whole first row (geometric mean 2, above 1.9)."""
    data, totals = two_rows(), Totals(tokens=3, rows=2)
    for which, expected in (("all", every), ("kept", kept)):
        rule = Rejection("k1", over=over, high=1.9, count=which)
        spec = PolicyLoss(rejection=rule, old="recomputed", aggregate=mode, kl_coef=0.5)
        with_sums = Totals(tokens=3, rows=2, sums=step_sums(spec, lambda: data))
        loss, metrics = policy_objective(spec, data, data, with_sums)
        assert pytest.approx(expected, rel=1e-12) == metrics["policy_loss"].item()
        assert pytest.approx(1 / 3 if over == "token" else 2 / 3) == metrics["rejected"].item()
        spec = PolicyLoss(old="recomputed", aggregate=mode, kl_coef=0.5)
        plain, whole = policy_objective(spec, data, data, totals)
        term = plain.item() - whole["policy_loss"].item()
        assert pytest.approx(expected + term, rel=1e-12) == loss.item()


@pytest.mark.parametrize(("level", "mean"), [("token", (1 + 2 + 1) / 3), ("sequence", (2 + 1) / 2)])
def test_normalised_weights_by_hand(level, mean):
    """Weights 1, 2 | 1 of tokens after the cap of 2; 2, 2 | 1 of sequences, a mean over rows."""
    data = two_rows()
    weights = {"token": (1, 2, 1), "sequence": (2, 2, 1)}[level]
    spec = PolicyLoss(old="recomputed", correction=ImportanceSampling(level=level, normalize=True))
    totals = Totals(tokens=3, rows=2, sums=step_sums(spec, lambda: data))
    _, metrics = policy_objective(spec, data, data, totals)
    expected = -(weights[0] * 1 + weights[1] * 2 + weights[2] * 3) / mean / 3
    assert pytest.approx(expected, rel=1e-12) == metrics["policy_loss"].item()
    assert pytest.approx(sum(weights) / 3, rel=1e-12) == metrics["importance_mean"].item()


def test_weights_of_mean_nearly_0_stay():
    weight = torch.tensor([[1e-9, 0.0]])
    assert torch.equal(weight, normalized(weight, total=1e-9, count=2))
    assert torch.equal(weight, normalized(weight, total=0.0, count=0))


def test_rows_without_a_token_have_no_weight():
    weight = torch.tensor([[2.0, 4.0], [9.0, 9.0], [1.0, 9.0]])
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    assert (7.0, 3.0) == weight_sums(weight, mask, level="token")
    assert (4.0, 2.0) == weight_sums(weight, mask, level="sequence")


def test_a_loss_that_needs_no_sums_pads_nothing():
    def never() -> dict[str, Tensor]:
        raise AssertionError("called")

    assert {} == step_sums(PolicyLoss(rejection=TOKEN, correction=ImportanceSampling()), never)


def test_what_rejects_nothing_leaves_the_loss_as_it_is():
    data, totals = two_rows(), Totals(tokens=3, rows=2)
    plain, _ = policy_objective(PolicyLoss(old="recomputed"), data, data, totals)
    for which in ("all", "kept"):
        spec = PolicyLoss(old="recomputed", rejection=Rejection("k1", high=5.0, count=which))
        sums = Totals(tokens=3, rows=2, sums=step_sums(spec, lambda: data))
        assert torch.equal(plain, policy_objective(spec, data, data, sums)[0])


def test_bypass_rejects_by_the_current_policy():
    data = two_rows()
    data["log_probs"] = data["rollout_log_probs"].clone()
    data["log_probs"][0, 0] += 2.0
    spec = PolicyLoss(old="rollout", rejection=Rejection("k1", high=2.0))
    _, metrics = policy_objective(spec, data, data, Totals(tokens=3, rows=2))
    assert pytest.approx(1 / 3) == metrics["rejected"].item()


@pytest.mark.parametrize("kind", ["k2", "k3", "abs"])
def test_an_unbiased_estimate_by_hand(kind):
    """rho f(x) has the gradient rho (f(x) + f'(x)); of k3 that is rho x."""
    data, totals = two_rows(), Totals(tokens=3, rows=2)
    shift = torch.tensor([[0.3, -0.2], [0.1, 0.0]], dtype=torch.float64)
    leaf = (data["old_log_probs"] + shift).requires_grad_()
    spec = PolicyLoss(old="recomputed", kl_coef=1.0, kl=kind, kl_unbiased=True, clip=math.inf)
    data["advantages"] = torch.zeros_like(data["advantages"])
    loss, _ = policy_objective(spec, {"log_probs": leaf}, data, totals)
    loss.backward()
    x, rho = 1.0 + shift, shift.exp()
    value = {"k2": x**2 / 2, "k3": (-x).exp() + x - 1, "abs": x.abs()}[kind]
    slope = {"k2": x, "k3": 1 - (-x).exp(), "abs": x.sign()}[kind]
    mask = data["response_mask"]
    assert pytest.approx(((rho * value)[mask].sum() / 3).item(), rel=1e-12) == loss.item()
    expected = torch.where(mask, rho * (value + slope), 0.0) / 3
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-15)
    if kind == "k3":
        torch.testing.assert_close(expected, torch.where(mask, rho * x, 0.0) / 3)


def test_every_rule_has_to_keep_a_token_and_an_empty_row_still_counts():
    """The first rule drops ratio 4 and the second drops 1/4; the row without a token is a row."""
    old = torch.full((2, 3), -2.0, dtype=torch.float64)
    ratio = torch.tensor([[4.0, 1.0, 0.25], [1.0, 1.0, 1.0]], dtype=torch.float64)
    data = {
        "log_probs": old,
        "old_log_probs": old,
        "rollout_log_probs": old - ratio.log(),
        "advantages": torch.tensor([1.0, 1.0], dtype=torch.float64),
        "response_mask": torch.tensor([[True, True, True], [False, False, False]]),
    }
    high = Rejection("k1", high=2.0, low=0.1, count="kept")
    low = Rejection("k1", high=9.0, low=0.5, count="kept")
    for rules in ((high, low), (low, high)):
        spec = PolicyLoss(old="recomputed", rejection=rules, aggregate="seq-mean-token-sum")
        sums = step_sums(spec, lambda: data)
        assert {"kept_tokens": 1.0, "kept_rows": 2.0} == sums
        totals = Totals(tokens=3, rows=2, sums=sums)
        _, metrics = policy_objective(spec, data, data, totals)
        assert pytest.approx(-1 / 2) == metrics["policy_loss"].item()
        assert pytest.approx(2 / 3) == metrics["rejected"].item()
