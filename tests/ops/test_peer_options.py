"""Options that verl and TRL have, by hand: ratios of responses, bounds, WPO, diagnostics."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.batch import make_batch
from rlflow.ops.bodies import advantage
from rlflow.ops.estimator_options import checked_options
from rlflow.ops.estimators import ESTIMATORS
from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.losses.preference import DPOLoss
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.diagnostics import finished, response_measures
from rlflow.ops.math.importance import importance_weight
from rlflow.ops.math.losses.batchwise import SHARES, SLOPES, pair_weights, preference_terms
from rlflow.ops.math.losses.objective import policy_objective
from rlflow.ops.math.losses.weighted import cispo, cispo_clipped, sapo
from tests.ops.math.distributions import combine
from tests.ops.parts import call_of

pytestmark = pytest.mark.torch

LN2 = math.log(2)


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


OLD = f64([-2.0, -1.0, 9.0], [-1.5, -1.0, -0.5])
MASK = torch.tensor([[True, True, False], [True, True, True]])
# Mean log-ratios of log 2 and of -log 2 * 2 / 3: ratios of 2 and of 2^(-2/3).
NEW = OLD + f64([2 * LN2, 0.0, 5.0], [-LN2, -LN2, 0.0])
GAIN = f64([1.0], [-2.0])[:, 0]
MEANS = f64([2.0, 2.0, 1.0], [2 ** (-2 / 3)] * 3)


def with_gradient(function):
    log_probs = NEW.clone().requires_grad_()
    loss, ratio = function(log_probs)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.detach(), gradient, ratio.detach()


def test_cispo_of_responses_weighs_every_token_by_its_responses_ratio():
    options = {"ratio_max": 1.5, "ratio_min": 0.7, "level": "sequence"}
    loss, gradient, ratio = with_gradient(lambda x: cispo(x, OLD, GAIN, MASK, **options))
    weight = f64([1.5, 1.5, 0.0], [0.7, 0.7, 0.7])
    expected = -weight * GAIN[:, None]
    torch.testing.assert_close(ratio, MEANS)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(loss, torch.where(MASK, expected * NEW, 0.0))
    cut = cispo_clipped(ratio, NEW, OLD, GAIN, MASK, **options)
    assert MASK.tolist() == cut.tolist()


def test_sapo_of_responses_is_the_gate_of_one_ratio_a_response():
    """The mean over the tokens has the value and the gradient of `-A 4/tau sigmoid(tau(s-1))`."""
    options = {"tau": (1.0, 2.0), "level": "sequence"}
    loss, gradient, _ = with_gradient(lambda x: sapo(x, OLD, GAIN, MASK, **options))
    log_probs = NEW.clone().requires_grad_()
    sizes = MASK.sum(-1)
    s = (torch.where(MASK, log_probs - OLD, 0.0).sum(-1) / sizes).exp()
    tau = f64([1.0, 2.0])[0]
    gate = -GAIN * 4 / tau * torch.sigmoid(tau * (s - 1))
    (expected,) = torch.autograd.grad(gate.sum(), log_probs)
    torch.testing.assert_close(loss.sum(-1) / sizes, gate.detach())
    torch.testing.assert_close(gradient / sizes[:, None], expected)


def test_levels_are_an_option_of_the_two_kinds_alone():
    assert "PolicyLoss(cispo, level=sequence)" == PolicyLoss("cispo", level="sequence").describe()
    with pytest.raises(ValueError, match="level would do nothing here: ppo_clip does not read it"):
        PolicyLoss(level="sequence")


def test_truncated_weights_have_a_lower_bound_too():
    weight = importance_weight(f64([0.1, 0.5, 3.0]), mode="truncate", cap=2.0, floor=0.5)
    assert [[0.5, 0.5, 2.0]] == weight.tolist()


def test_rewards_are_held_in_their_range_before_groups_are_compared():
    batch = make_batch(
        {"reward": torch.tensor([5.0, 1.0, 0.0, -9.0]), "group": torch.tensor([0, 0, 1, 1])}, 4
    )
    params = {"reward_clip_range": (-1.0, 1.0)}
    made = advantage.dr_grpo(call_of(batch, params, wanted=("advantages",)))
    assert [0.0, 0.0, 0.5, -0.5] == made.fields["advantages"].tolist()
    assert 0.5 == made.metrics["degenerate"].value


@pytest.mark.parametrize("given", [(1.0, -1.0), (0.0,), 3, (0, True), ("a", 1.0), (math.nan, 1.0)])
def test_what_is_no_range_is_refused(given):
    _, findings = checked_options(ESTIMATORS["grpo"], {"reward_clip_range": given}, None)
    assert ["E118"] == [found.code for found in findings]


def test_a_pair_counts_by_what_the_policy_would_write():
    """Two tokens of p = 1/2 and 1/4 where sum p^2 is 1/2 and 1/4: log-weights of 0 and 0."""
    mask = torch.tensor([[True, True], [True, False]])
    log_probs = f64([0.5, 0.25], [0.5, 1.0]).log()
    squares = f64([0.5, 0.125], [0.25, 7.0])
    found = pair_weights(log_probs, squares, mask)
    torch.testing.assert_close(found, f64([math.sqrt(1.0 * 2.0), 2.0])[0])
    fields = {
        "response_mask": mask,
        "pair": torch.tensor([4, 4]),
        "chosen": torch.tensor([True, False]),
        "ref_log_probs": torch.zeros_like(log_probs),
        "sum_pi_squared": squares,
    }
    plain = preference_terms(DPOLoss(), log_probs, fields)
    weighed = preference_terms(DPOLoss(policy_weights=True), log_probs, fields)
    factor = math.sqrt(2.0) * 2.0
    torch.testing.assert_close(weighed[SLOPES], factor * plain[SLOPES])
    torch.testing.assert_close(weighed[SHARES][:, 1], factor * plain[SHARES][:, 1])


def test_weights_of_pairs_are_measured_in_the_forward_before_and_not_for_ranks():
    assert ("log_probs", "sum_pi_squared") == DPOLoss(policy_weights=True).measured
    assert ("log_probs",) == DPOLoss(policy_weights=True).outputs()
    with pytest.raises(ValueError, match="aot is of ranks"):
        DPOLoss("aot", policy_weights=True)


def test_measures_of_responses_by_hand_and_over_any_cut():
    """Rows of 2 and 1 tokens, and one without; x sums up to log 2 and -log 2."""
    behaviour = f64([-1.0, -1.0], [-2.0, 5.0], [7.0, 7.0])
    trained = behaviour + f64([LN2, 0.0], [-LN2, 1.0], [3.0, 3.0])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    totals = Totals(tokens=3.0, rows=3.0)
    whole = response_measures(trained, behaviour, mask, totals)
    parts = [
        response_measures(trained[rows], behaviour[rows], mask[rows], totals)
        for rows in (slice(0, 1), slice(1, 3))
    ]
    joined = combine(parts)
    made = finished({name: value.item() for name, value in whole.items()})
    assert pytest.approx(made) == finished({name: v.item() for name, v in joined.items()})
    root = math.sqrt(2)
    expected = {
        "trained_perplexity": (math.e / root + 2 * math.e**2) / 2,
        "rollout_perplexity": (math.e + math.e**2) / 2,
        "perplexity_ratio": (1 / root + 2) / 2,
        "perplexity_gap": (LN2 / 2 + LN2) / 2,
        "perplexity_gap_max": LN2,
        "chi2_response": (4 + 0.25) / 2 - 1,
    }
    assert pytest.approx(expected) == made


def test_they_are_logged_where_asked_for():
    batch = {
        "response_mask": MASK,
        "advantages": GAIN,
        "rollout_log_probs": OLD,
        "old_log_probs": OLD,
    }
    found = {}
    for asked in (False, True):
        spec = PolicyLoss(old="recomputed", response_metrics=asked)
        totals = Totals(tokens=5.0, rows=2.0)
        metrics = policy_objective(spec, {"log_probs": NEW}, batch, totals)[1]
        found[asked] = finished({name: value.item() for name, value in metrics.items()})
    assert "chi2_response" in found[True].keys() - found[False].keys()
    assert 0.0 == found[True]["rollout_chi2"]
    assert "rollout_log_probs" in PolicyLoss(response_metrics=True).needs()
