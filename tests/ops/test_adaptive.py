"""Adaptive coefficients in the bodies: which number acts when, what the state holds."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import rlflow as rf
from rlflow.batch import flat, make_batch, ragged_rows
from rlflow.ops.bodies import advantage, update
from rlflow.ops.bodies.steps import adaptive
from rlflow.ops.estimators import ESTIMATORS, granularity, needed_inputs
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.losses.objective import policy_objective
from tests.ops.calls import call_of

pytestmark = pytest.mark.torch


class Stepper:
    """A model that measures what it is told to, and notes the losses it was asked for."""

    learning_rate = 0.1

    def __init__(self, *measured):
        self.measured = list(measured)
        self.seen = []

    def step(self, mini, loss, **options):
        self.seen.append((loss, options["outputs"], mini))
        metrics = self.measured.pop(0)
        return SimpleNamespace(metrics=metrics, grad_norm=1.0, applied=metrics.get("ok", 1.0) > 0)


def rows(*sizes, value=0.0):
    return ragged_rows([[value] * size for size in sizes], torch.float32)


def updated(loss, model, state, **params):
    sizes = (2, 1, 3, 2)
    inputs = make_batch(
        {
            "response_mask": ragged_rows([[True] * size for size in sizes], torch.bool),
            "response_tokens": ragged_rows([[1] * size for size in sizes], torch.int64),
        },
        4,
    )
    options = {"loss": loss, "epochs": 1, "mini_batches": 1, "max_grad_norm": None, "old": loss.old}
    return update.update(call_of(inputs, {**options, **params}, state=state, model=model)).metrics


def test_the_coefficient_of_kl_follows_each_optimizer_step():
    """Target 0.1, horizon 40, 4 rows a step: a factor of 1 +- 0.2 * 4 / 40."""
    loss, state = rf.PolicyLoss(kl_coef=rf.AdaptiveKL(0.1, horizon=40, init=0.5)), {}
    model = Stepper({"kl": 9.0}, {"kl": 0.0})
    metrics = updated(loss, model, state, epochs=2)
    assert 0.5 == metrics["kl_coef"]
    assert {"kl_coef": pytest.approx(0.5 * 1.02 * 0.98, rel=1e-12)} == state
    assert pytest.approx(0.4998) == updated(loss, Stepper({"kl": 0.1}), state)["kl_coef"]
    assert pytest.approx(0.4998) == state["kl_coef"]


def test_the_divergence_of_whole_responses():
    """8 tokens in 4 rows: 0.05 a token is 0.1 a response."""
    option, state = rf.AdaptiveKL(0.1, horizon=40, init=0.5, per="sequence"), {}
    updated(rf.PolicyLoss(kl_coef=option), Stepper({"kl": 0.05}), state)
    assert pytest.approx(0.5) == state["kl_coef"]


def test_a_step_that_was_not_applied_and_a_nan_move_nothing():
    loss = rf.PolicyLoss(
        kl_coef=rf.AdaptiveKL(0.1, horizon=4, init=0.5), entropy_coef=rf.AdaptiveEntropy(0.2)
    )
    state = {}
    skipped = {"kl": 9.0, "entropy": 0.1, "ok": 0.0}
    lost = {"kl": math.nan, "entropy": math.nan}
    updated(loss, Stepper(skipped, lost), state, epochs=2)
    assert {"kl_coef": 0.5} == state


def test_the_entropy_acts_up_to_its_target_with_the_steps_before():
    """Low entropy raises the coefficient; above the target it falls and does not act."""
    loss, state = rf.PolicyLoss(entropy_coef=rf.AdaptiveEntropy(0.2, step=0.01, init=0.05)), {}
    model = Stepper(*({"entropy": entropy} for entropy in (0.1, 0.3, 0.1, 0.1)))
    seen = [updated(loss, model, state)["entropy_coef"] for _ in range(4)]
    assert pytest.approx([0.05, 0.06, 0.0, 0.06]) == seen
    assert pytest.approx({"entropy_coef": 0.07, "entropy": 0.1}) == state
    assert all(outputs == ("log_probs", "entropy") for _, outputs, _ in model.seen)


def test_the_loss_of_a_step_has_the_numbers_of_that_step():
    """Two steps on the same data differ by what the coefficient has become."""
    loss, state = rf.PolicyLoss(kl_coef=rf.AdaptiveKL(0.1, horizon=4, init=0.5), old="current"), {}
    model = Stepper({"kl": 9.0}, {"kl": 9.0})
    updated(loss, model, state, epochs=2)
    size = torch.tensor([2.0, 1.0, 3.0, 2.0]).long()
    found = []
    for function, _, mini in model.seen:
        fields = {name: mini[name] for name in mini.keys()}  # noqa: SIM118  a TensorDict
        fields |= {"ref_log_probs": rows(2, 1, 3, 2, value=-1.0), "advantages": torch.zeros(4)}
        micro = make_batch(fields, 4)
        found.append(function({"log_probs": torch.zeros(int(size.sum()))}, micro)[0].item())
    k3 = math.exp(-1) + 1 - 1
    assert pytest.approx([0.5 * k3, 0.5 * 1.2 * k3]) == found


def test_a_fixed_coefficient_keeps_no_state():
    state = {}
    metrics = updated(rf.PolicyLoss(kl_coef=0.1), Stepper({"kl": 9.0, "entropy": 1.0}), state)
    assert {} == state
    assert "kl_coef" not in metrics


def test_an_empty_step_moves_nothing():
    loss, state = rf.PolicyLoss(kl_coef=rf.AdaptiveKL(0.1)), {}
    adaptive.follow(loss, state, {"kl": 0.0, "entropy": 0.0}, Totals(tokens=0, rows=0))
    assert {} == state


def rewarded(option, state, shift):
    sizes = (2, 1)
    inputs = make_batch(
        {
            "reward": torch.tensor([1.0, 2.0]),
            "group": torch.tensor([0, 0]),
            "response_mask": ragged_rows([[True] * size for size in sizes], torch.bool),
            "rollout_log_probs": rows(*sizes, value=shift),
            "ref_log_probs": rows(*sizes),
        },
        2,
    )
    made = advantage.rloo(call_of(inputs, {"kind": "rloo", "kl_coef": option}, state=state))
    return made.fields["advantages"].tolist(), made.metrics


def test_in_the_reward_the_coefficient_is_of_the_batches_before():
    """k1 of 0.3 a token: rewards 1 - 0.6 c and 2 - 0.3 c, so advantages -+ (1 + 0.3 c)."""
    option, state = rf.AdaptiveKL(0.1, horizon=4, init=0.5), {}
    first, metrics = rewarded(option, state, 0.3)
    assert pytest.approx([-1.15, 1.15]) == first
    assert 0.5 == metrics["kl_coef"].value
    assert pytest.approx(0.3) == metrics["kl"].value
    assert pytest.approx({"kl_coef": 0.5 * 1.1}) == state
    second, metrics = rewarded(option, state, 0.3)
    assert pytest.approx([-1.165, 1.165]) == second
    assert pytest.approx(0.55) == metrics["kl_coef"].value
    assert "kl_coef" not in rewarded(0.5, {}, 0.3)[1]


def test_a_divergence_that_is_given_enters_the_reward_as_it_is():
    """Penalties 1, 2 | 4 with 0.5: rewards 1 - 1.5 and 2 - 2; the NaN is of a masked token."""
    inputs = make_batch(
        {
            "reward": torch.tensor([1.0, 2.0]),
            "group": torch.tensor([0, 0]),
            "response_mask": ragged_rows([[True, True], [True, False]], torch.bool),
            "kl": ragged_rows([[1.0, 2.0], [4.0, math.nan]], torch.float32),
        },
        2,
    )
    params = {"kind": "rloo", "kl_coef": 0.5, "kl": "given"}
    made = advantage.rloo(call_of(inputs, params, state={}))
    assert pytest.approx([-0.5, 0.5]) == made.fields["advantages"].tolist()
    assert pytest.approx(7 / 3) == made.metrics["kl"].value
    wanted = needed_inputs(ESTIMATORS["rloo"], {"kl_coef": 0.5, "kl": "given"})
    assert {"reward", "group", "kl", "response_mask"} == {each.name for each in wanted}


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_coefficient_that_follows_the_whole_batch_is_not_cut(name):
    estimator = ESTIMATORS[name]
    assert "batch" == granularity(estimator, {"kl_coef": rf.AdaptiveKL(0.1)})
    assert estimator.per == granularity(estimator, {"kl_coef": 0.1})
    assert {"ref_log_probs", "rollout_log_probs"} < {
        each.name for each in needed_inputs(estimator, {"kl_coef": rf.AdaptiveKL(0.1)})
    }


def test_the_age_of_a_token_is_what_the_weights_are_ahead():
    versions = ragged_rows([[3, 4], [5]], torch.int64)
    mask = ragged_rows([[True, True], [True]], torch.bool)
    call = SimpleNamespace(updates_since=lambda version: 5 - version)
    aged = update.with_age(call, make_batch({"version": versions, "response_mask": mask}, 2))
    assert [2, 1, 0] == flat(aged["age"]).tolist()


def test_the_objective_reads_the_age():
    """Age 1 lies half way: -1.5 between the rollout's -2 and the current -1."""
    fields = {
        "log_probs": torch.tensor([[-1.0, -1.0]]),
        "rollout_log_probs": torch.tensor([[-2.0, -2.0]]),
        "age": torch.tensor([[1, 0]]),
        "advantages": torch.tensor([1.0]),
        "response_mask": torch.tensor([[True, True]]),
    }
    spec = rf.PolicyLoss(old="loglinear", clip=math.inf)
    loss, metrics = policy_objective(spec, fields, fields, Totals(tokens=2, rows=1))
    assert pytest.approx(-(math.exp(0.5) + math.exp(1.0)) / 2) == loss.item()
    assert pytest.approx(math.exp(1.0)) == metrics["ratio_max"].item()
    assert pytest.approx(0.25) == metrics["rollout_difference"].item()
