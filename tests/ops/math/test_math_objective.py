"""Objectives: terms and metrics by hand, which old policy, garbage, cost of one call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.ops.losses.losses import POLICY_LOSSES, LossKind, PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.diagnostics import finished
from rlflow.ops.math.losses.objective import (
    policy_objective,
    sft_objective,
    value_objective,
)
from tests.ops.math.distributions import combine

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, False], [True, False, False]])
TOTALS = Totals(tokens=3, rows=2)


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def policy_case() -> tuple[Tensor, dict[str, Tensor]]:
    """Ratios 1.5, 0.5 | 1.0; advantages 1 | -1: token losses -1.2, -0.5 | 1.0."""
    old = f64([-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0])
    log_probs = old + f64([1.5, 0.5, 1.0], [1.0, 1.0, 1.0]).log()
    batch = {
        "response_mask": MASK,
        "advantages": f64(1, -1),
        "old_log_probs": old,
        "rollout_log_probs": old - f64([0.1, -0.3, 9.0], [0.2, 9.0, 9.0]),
        "ref_log_probs": log_probs - f64([1.0, -1.0, 5.0], [2.0, 5.0, 5.0]),
    }
    return log_probs.requires_grad_(), batch


def test_the_policy_objective_by_hand():
    """k2 of 1, -1 | 2 is 0.5, 0.5 | 2; entropies 1, 2 | 6.

    Old minus rollout is 0.1, -0.3 | 0.2; its measures are tried in test_math_diagnostics.
    """
    log_probs, batch = policy_case()
    entropy = f64([1, 2, 7], [6, 7, 7]).requires_grad_()
    spec = PolicyLoss(kl_coef=0.1, kl="k2", entropy_coef=0.01)
    loss, metrics = policy_objective(
        spec, {"log_probs": log_probs, "entropy": entropy}, batch, TOTALS
    )
    loss.backward()
    expected = {
        "policy_loss": -0.7 / 3,
        "clip_fraction": 1 / 3,
        "approx_kl": -math.log(0.75) / 3,
        "ratio_max": 1.5,
        "kl": 1.0,
        "entropy": 3.0,
        "rollout_gap": 0.2,
        "rollout_gap_max": 0.3,
        "rollout_difference": 0.0,
    }
    compared = {name: metrics.pop(name) for name in sorted(metrics) if "rollout_" in name}
    found = {**metrics, **{name: compared[name] for name in expected if name in compared}}
    assert pytest.approx(expected, rel=1e-12, abs=1e-15) == {k: v.item() for k, v in found.items()}
    assert pytest.approx(-0.7 / 3 + 0.1 * 1.0 - 0.01 * 3.0, rel=1e-12) == loss.item()
    gradient = f64([0 + 0.1, -0.5 - 0.1, 0], [1.0 + 0.2, 0, 0]) / 3
    torch.testing.assert_close(log_probs.grad, gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(entropy.grad, -0.01 * MASK.double() / 3)
    assert not any(value.requires_grad or value.dim() for value in metrics.values())


def test_all_terms_are_averaged_the_same_way():
    """Row means: policy -0.85 and 1.0, k2 0.5 and 2, entropy 1.5 and 6."""
    log_probs, batch = policy_case()
    entropy = f64([1, 2, 7], [6, 7, 7])
    spec = PolicyLoss(kl_coef=0.1, kl="k2", entropy_coef=0.01, aggregate="seq-mean-token-mean")
    loss, metrics = policy_objective(
        spec, {"log_probs": log_probs, "entropy": entropy}, batch, TOTALS
    )
    assert pytest.approx(0.075 + 0.1 * 1.25 - 0.01 * 3.75, rel=1e-12) == loss.item()
    assert pytest.approx(1.0, rel=1e-12) == metrics["kl"].item()
    assert pytest.approx(3.0, rel=1e-12) == metrics["entropy"].item()


def test_fields_that_carry_no_coefficient_are_only_measured():
    log_probs, batch = policy_case()
    outputs = {"log_probs": log_probs, "entropy": f64([1, 2, 7], [6, 7, 7])}
    bare = {name: batch[name] for name in ("response_mask", "advantages", "old_log_probs")}
    loss, metrics = policy_objective(PolicyLoss(), outputs, batch, TOTALS)
    plain, fewer = policy_objective(PolicyLoss(), {"log_probs": log_probs}, bare, TOTALS)
    assert torch.equal(plain, loss)
    more = finished(dict.fromkeys(metrics, 0.5)).keys() - fewer.keys()
    gaps = {f"rollout_{name}" for name in ("gap", "gap_max", "difference", "k3")}
    shares = {f"rollout_{name}" for name in ("ess", "correlation", "chi2")}
    assert {"kl", "entropy", *shares, *gaps} == more
    assert {"policy_loss", "clip_fraction", "approx_kl", "ratio_max"} == fewer.keys()


@pytest.mark.parametrize(
    ("old", "ratio_max", "gap"),
    [("auto", 1.5, 0.2), ("recomputed", 1.5, 0.2), ("current", 1.0, None), ("rollout", None, None)],
)
def test_which_old_policy_the_ratio_is_taken_against(old, ratio_max, gap):
    log_probs, batch = policy_case()
    _, metrics = policy_objective(PolicyLoss(old=old), {"log_probs": log_probs}, batch, TOTALS)
    current_gap = (log_probs.detach() - batch["rollout_log_probs"])[MASK]
    expected_ratio = current_gap.exp().max().item() if ratio_max is None else ratio_max
    expected_gap = current_gap.abs().mean().item() if gap is None else gap
    assert pytest.approx(expected_ratio, rel=1e-12) == metrics["ratio_max"].item()
    assert pytest.approx(expected_gap, rel=1e-12) == metrics["rollout_gap"].item()


def test_without_old_log_probs_the_current_ones_serve():
    log_probs, batch = policy_case()
    del batch["old_log_probs"]
    loss, metrics = policy_objective(PolicyLoss(), {"log_probs": log_probs}, batch, TOTALS)
    loss.backward()
    assert 0.0 == metrics["approx_kl"].item() == metrics["clip_fraction"].item()
    torch.testing.assert_close(log_probs.grad, f64([-1, -1, 0], [1, 0, 0]) / 3)


def test_the_value_objective_by_hand():
    """Half squared errors 3.125 (clipped, flat), 3.92 | 0.5; see the token loss."""
    values = f64([2, 0.2, 9], [1, 9, 9]).requires_grad_()
    batch = {
        "response_mask": MASK,
        "returns": f64([3, 3, 9], [0, 9, 9]),
        "values": f64([0, 0, 9], [1, 9, 9]),
    }
    loss, metrics = value_objective(ValueLoss(clip=0.5), {"values": values}, batch, TOTALS)
    loss.backward()
    expected = {
        "value_loss": (3.125 + 3.92 + 0.5) / 3,
        "value_mean": 3.2 / 3,
        "value_clip_fraction": 1 / 3,
    }
    assert pytest.approx(expected, rel=1e-12) == {k: v.item() for k, v in metrics.items()}
    assert metrics["value_loss"].item() == loss.item()
    torch.testing.assert_close(values.grad, f64([0, -2.8, 0], [1, 0, 0]) / 3)


def test_a_value_loss_that_does_not_clip_reads_no_old_values():
    values = f64([2, 0.2, 9], [1, 9, 9]).requires_grad_()
    batch = {"response_mask": MASK, "returns": f64([3, 3, 9], [0, 9, 9])}
    loss, metrics = value_objective(ValueLoss(clip=None), {"values": values}, batch, TOTALS)
    assert pytest.approx((0.5 + 3.92 + 0.5) / 3, rel=1e-12) == loss.item()
    assert {"value_loss", "value_mean"} == metrics.keys()


def test_the_sft_objective_by_hand():
    log_probs = f64([-1, -2, 9], [-6, 9, 9]).requires_grad_()
    loss, metrics = sft_objective(
        SFTLoss(), {"log_probs": log_probs}, {"response_mask": MASK}, TOTALS
    )
    loss.backward()
    assert 3.0 == loss.item() == metrics["sft_loss"].item()
    torch.testing.assert_close(log_probs.grad, -MASK.double() / 3)


def test_combine_adds_and_takes_maxima():
    parts = [{"kl": f64(1)[0], "ratio_max": f64(3)[0]}, {"kl": f64(2)[0], "ratio_max": f64(2)[0]}]
    assert {"kl": 3.0, "ratio_max": 3.0} == {k: v.item() for k, v in combine(parts).items()}
    assert {"kl": 1.0, "ratio_max": 3.0} == {k: v.item() for k, v in combine(parts[:1]).items()}


def test_a_kind_that_joins_the_registry_is_computed(monkeypatch):
    """Its body gets the options it names and no others; without a clip nothing is clipped."""
    kind = LossKind(body=f"{__name__}:plain_surrogate", options=frozenset())
    monkeypatch.setitem(POLICY_LOSSES, "plain", kind)
    log_probs, batch = policy_case()
    loss, metrics = policy_objective(PolicyLoss("plain"), {"log_probs": log_probs}, batch, TOTALS)
    assert pytest.approx((-1.5 - 0.5 + 1.0) / 3, rel=1e-12) == loss.item()
    assert "clip_fraction" not in metrics


def plain_surrogate(log_probs, old_log_probs, advantages, mask):
    ratio = torch.where(mask, log_probs - old_log_probs, 0.0).exp()
    return -ratio * torch.where(mask, advantages[:, None], 0.0), ratio


def test_a_call_builds_few_tensors():
    """The clock of a shared machine is no test; the count of tensor operations is."""
    log_probs, batch = policy_case()
    del batch["ref_log_probs"]
    with Counter() as counter:
        policy_objective(PolicyLoss(), {"log_probs": log_probs}, batch, TOTALS)
    assert counter.operations <= 65


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))
