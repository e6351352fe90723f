"""Importance weights: by hand, with gradients, in expectation, cut into parts.

rows x tokens   pi_prox / pi_behave      A
row 0           1.5   0.5   (masked)     1
row 1           4.0   (masked) (masked)  -1
"""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rlflow.ops.corrections import ImportanceSampling
from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.importance import importance_ratio, importance_weight
from rlflow.ops.math.losses.objective import policy_objective
from tests.budget import examples

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, False], [True, False, False]])
TOTALS = Totals(tokens=3, rows=2)
INF, NAN = math.inf, math.nan


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


RATIOS = f64([1.5, 0.5, NAN], [4.0, NAN, NAN])


def case(ratios: Tensor = RATIOS) -> tuple[Tensor, dict[str, Tensor]]:
    """pi / pi_prox is 1.5, 0.5 | 1: token losses -1.2, -0.5 | 1, gradients 0, -0.5 | 1."""
    proximal = f64([-1.0, -2.0, NAN], [-3.0, NAN, NAN])
    log_probs = proximal + f64([1.5, 0.5, 1.0], [1.0, 1.0, 1.0]).log()
    batch = {
        "response_mask": MASK,
        "advantages": f64(1, -1),
        "old_log_probs": proximal,
        "rollout_log_probs": proximal - ratios.log(),
    }
    return log_probs.requires_grad_(), batch


def objective(spec: PolicyLoss, log_probs: Tensor, batch: dict[str, Tensor]):
    """The loss, the gradient in the log-probs, the metrics as numbers."""
    loss, metrics = policy_objective(spec, {"log_probs": log_probs}, batch, TOTALS)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss, gradient, {name: value.item() for name, value in metrics.items()}


def test_the_ratio_of_tokens_and_of_sequences():
    _, batch = case()
    proximal, behaviour = batch["old_log_probs"], batch["rollout_log_probs"]
    tokens = importance_ratio(proximal, behaviour, MASK, level="token")
    torch.testing.assert_close(tokens, f64([1.5, 0.5, 1], [4, 1, 1]))
    rows = importance_ratio(proximal, behaviour, MASK, level="sequence")
    torch.testing.assert_close(rows, f64([0.75, 0.75, 1], [4, 1, 1]))


def test_far_apart_policies_have_finite_ratios():
    proximal, behaviour = f64([50.0, -50.0]), f64([-50.0, 50.0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    tokens = importance_ratio(proximal, behaviour, mask, level="token")
    torch.testing.assert_close(tokens, f64([math.exp(20), math.exp(-20)]))
    rows = importance_ratio(proximal, behaviour, mask, level="sequence")
    torch.testing.assert_close(rows, f64([1.0, 1.0]))
    up = importance_ratio(proximal.abs(), -behaviour.abs(), mask, level="sequence")
    torch.testing.assert_close(up, f64([math.exp(20), math.exp(20)]))


@pytest.mark.parametrize(
    ("mode", "cap", "floor", "expected"),
    [
        ("truncate", 2.0, None, [0.25, 1.0, 2.0, 2.0]),
        ("truncate", INF, None, [0.25, 1.0, 2.0, 8.0]),
        ("mask", 2.0, None, [0.25, 1.0, 2.0, 0.0]),
        ("mask", 2.0, 0.5, [0.0, 1.0, 2.0, 0.0]),
        ("mask", 8.0, 0.25, [0.25, 1.0, 2.0, 8.0]),
    ],
)
def test_the_weight_of_a_ratio(mode, cap, floor, expected):
    weight = importance_weight(f64(0.25, 1.0, 2.0, 8.0), mode=mode, cap=cap, floor=floor)
    assert expected == weight.tolist()


@pytest.mark.parametrize(
    ("correction", "weights", "cut"),
    [
        (ImportanceSampling(), [1.5, 0.5, 2.0], 1 / 3),
        (ImportanceSampling(cap=INF), [1.5, 0.5, 4.0], 0.0),
        (ImportanceSampling(cap=1.2), [1.2, 0.5, 1.2], 2 / 3),
        (ImportanceSampling(mode="mask"), [1.5, 0.5, 0.0], 1 / 3),
        (ImportanceSampling(mode="mask", cap=5, floor=0.6), [1.5, 0.0, 4.0], 1 / 3),
        (ImportanceSampling(level="sequence"), [0.75, 0.75, 2.0], 1 / 3),
        (ImportanceSampling(level="sequence", mode="mask", floor=0.8), [0.0, 0.0, 0.0], 1.0),
    ],
    ids=lambda value: value.describe() if isinstance(value, ImportanceSampling) else None,
)
def test_decoupled_ppo_by_hand(correction, weights, cut):
    log_probs, batch = case()
    spec = PolicyLoss(old="recomputed", correction=correction)
    loss, gradient, metrics = objective(spec, log_probs, batch)
    one, two, three = weights
    assert pytest.approx((-1.2 * one - 0.5 * two + three) / 3, rel=1e-12) == loss.item()
    expected = f64([0, -0.5 * two, 0], [three, 0, 0]) / 3
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
    assert pytest.approx(sum(weights) / 3, rel=1e-12) == metrics["importance_mean"]
    assert pytest.approx(cut, rel=1e-12) == metrics["importance_cut"]
    largest = 4.0
    assert pytest.approx(largest, rel=1e-12) == metrics["importance_max"]


def test_the_ratio_against_the_rollout_by_hand():
    """pi / pi_behave is 2.25, 0.25 | 4 and clips at 1.2 for A > 0: -1.2, -0.25 | 4."""
    log_probs, batch = case()
    loss, gradient, metrics = objective(PolicyLoss(old="rollout"), log_probs, batch)
    assert pytest.approx((-1.2 - 0.25 + 4.0) / 3, rel=1e-12) == loss.item()
    torch.testing.assert_close(gradient, f64([0, -0.25, 0], [4.0, 0, 0]) / 3)
    assert "importance_mean" not in metrics


def test_with_one_step_the_current_policy_is_the_proximal_one():
    """Weights 1.5 * 1.5, 0.5 * 0.5 | 4 of the current policy, and gradients -A times them."""
    log_probs, batch = case()
    spec = PolicyLoss(old="current", correction=ImportanceSampling(cap=INF))
    loss, gradient, _ = objective(spec, log_probs, batch)
    assert pytest.approx((-2.25 - 0.25 + 4.0) / 3, rel=1e-12) == loss.item()
    torch.testing.assert_close(gradient, f64([-2.25, -0.25, 0], [4.0, 0, 0]) / 3)


def test_neither_kl_nor_entropy_is_weighed():
    log_probs, batch = case()
    outputs = {"log_probs": log_probs, "entropy": f64([1, 2, NAN], [6, NAN, NAN])}
    batch["ref_log_probs"] = log_probs.detach() - f64([1.0, -1.0, 5.0], [2.0, 5.0, 5.0])
    options = {"old": "recomputed", "kl": "k2", "entropy_coef": 0.01}
    plain = PolicyLoss(kl_coef=0.1, **options)
    corrected = plain.model_copy(update={"correction": ImportanceSampling()})
    without, with_terms = (
        policy_objective(spec, outputs, batch, TOTALS)[0] for spec in (plain, corrected)
    )
    terms = 0.1 * 1.0 - 0.01 * 3.0
    assert pytest.approx(-0.7 / 3 + terms, rel=1e-12) == without.item()
    assert pytest.approx((-1.8 - 0.25 + 2.0) / 3 + terms, rel=1e-12) == with_terms.item()


CORRECTIONS = [
    ImportanceSampling(),
    ImportanceSampling(level="sequence", cap=1.0),
    ImportanceSampling(mode="mask", cap=1.0, floor=1.0),
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda value: value.describe())
def test_samples_of_the_same_policy_are_as_without_correction_to_the_bit(correction):
    log_probs, batch = case(torch.ones_like(RATIOS))
    plain, expected, _ = objective(PolicyLoss(old="recomputed"), log_probs, batch)
    spec = PolicyLoss(old="recomputed", correction=correction)
    loss, gradient, metrics = objective(spec, log_probs, batch)
    assert torch.equal(plain, loss)
    assert torch.equal(expected, gradient)
    assert (1.0, 0.0, 1.0) == tuple(
        metrics[f"importance_{name}"] for name in ("mean", "cut", "max")
    )


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["weights", "ratio"]))
def test_over_all_samples_of_an_old_policy_the_gradient_is_that_on_policy(seed, how):
    """sum_a pi_behave(a) d/d theta of the loss of a == d/d theta of -sum_a pi(a) A(a)."""
    generator = torch.Generator().manual_seed(seed)
    theta, older, gains = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    theta.requires_grad_()
    behaviour = older.log_softmax(0)
    log_probs = theta.log_softmax(0)
    fields = {
        "response_mask": torch.ones(5, 1, dtype=torch.bool),
        "advantages": gains,
        "rollout_log_probs": behaviour[:, None],
    }
    exact = ImportanceSampling(cap=INF)
    spec = (
        PolicyLoss(old="current", correction=exact)
        if how == "weights"
        else PolicyLoss(old="rollout", clip=INF)
    )
    total = torch.zeros_like(theta)
    for action in range(5):
        batch = {name: value[action : action + 1] for name, value in fields.items()}
        outputs = {"log_probs": log_probs[action, None, None]}
        loss, _ = policy_objective(spec, outputs, batch, Totals(tokens=1, rows=1))
        (gradient,) = torch.autograd.grad(loss, theta, retain_graph=True)
        total += behaviour[action].exp() * gradient
    (expected,) = torch.autograd.grad(-(log_probs.exp() * gains).sum(), theta)
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
