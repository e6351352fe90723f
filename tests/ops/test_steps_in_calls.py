"""One optimizer step of rows that come in several calls: the gradient and numbers of one call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TypedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.batch import flat, select_rows
from rlflow.contract.values import StepResult
from rlflow.errors import NumericsError
from rlflow.ops.bodies import update
from rlflow.ops.bodies.steps.selection import with_fields
from rlflow.ops.losses.kinds import POLICY_LOSSES
from tests.budget import examples
from tests.ops.parts import call_of, samples

pytestmark = pytest.mark.torch

AGGREGATES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


class Sloped:
    """A model of one number a token, which learns as an engine does: it notes each gradient."""

    learning_rate = 0.5

    def __init__(self):
        self.theta = torch.linspace(-1.0, 1.5, 16, dtype=torch.float64, requires_grad=True)
        self.made = []

    def outputs(self, rows, names):
        chosen = self.theta[flat(rows["response_tokens"])]
        found = {"log_probs": -chosen.exp(), "entropy": chosen.sin(), "values": chosen * 3}
        return {name: found[name] for name in names}

    def accumulate(self, rows, loss, *, outputs, temperature, goes_on):
        if not goes_on:
            self.theta.grad = torch.zeros_like(self.theta)
        value, found = loss(self.outputs(rows, outputs), rows)
        if value.requires_grad:
            value.backward()
        return {"loss": float(value.detach()), **{n: float(v) for n, v in found.items()}}

    def finish(self, metrics, max_grad_norm, scale):
        self.made.append(self.theta.grad * scale)
        norm = float(self.made[-1].norm())
        return StepResult(metrics=metrics, grad_norm=norm, applied=math.isfinite(norm))

    def step(self, rows, loss, *, outputs, temperature, max_grad_norm):
        made = self.accumulate(rows, loss, outputs=outputs, temperature=temperature, goes_on=False)
        return self.finish(made, max_grad_norm, 1.0)


@rf.loss
def by_token(log_probs: rf.Token[float], advantages: rf.Token[float]) -> rf.Token[float]:
    return -log_probs * advantages


class Terms(TypedDict):
    loss: rf.Row[float]
    size: rf.Row[float]
    drift: rf.Token[float]
    drift_max: rf.Token[float]


@rf.loss
def by_row(
    log_probs: rf.Token[float], old_log_probs: rf.Token[float], reward: rf.Row[float]
) -> Terms:
    drift = (log_probs - old_log_probs).detach()
    loss = -log_probs.sum(-1) * reward
    return {"loss": loss, "size": reward * 2, "drift": drift, "drift_max": drift}


def lost(kind):
    """A policy loss of a kind, with terms and diagnostics beside it."""
    more = {"beta": 0.5} if "beta" in POLICY_LOSSES[kind].required else {}
    more |= {"old": "recomputed"} if POLICY_LOSSES[kind].ratio else {}
    return rf.PolicyLoss(kind, kl_coef=0.1, entropy_coef=0.01, response_metrics=True, **more)


LOSSES = [
    *(lost(kind) for kind, made_of in POLICY_LOSSES.items() if not made_of.selection),
    *(rf.PolicyLoss("reinforce", aggregate=each, kl_coef=0.1) for each in AGGREGATES),
    rf.PolicyLoss("reinforce", aggregate="seq-mean-token-sum-norm", constant=7.0),
    rf.PolicyLoss("ppo_clip", old="recomputed", correction=rf.ImportanceSampling()),
    rf.PolicyLoss("ppo_clip", old="rollout", entropy_coef=rf.AdaptiveEntropy(target=0.5)),
    rf.ValueLoss(),
    rf.ValueLoss(clip=None, aggregate="seq-mean-token-mean"),
    rf.SFTLoss(),
    rf.DistillLoss("policy_gradient", old="rollout", aggregate="token-sum"),
    rf.DistillLoss("supervised", aggregate="seq-mean-token-mean"),
    by_token,
    by_row,
]
NOT_ADDED = [
    rf.PolicyLoss("clip_cov", old="recomputed"),
    rf.PolicyLoss("ppo_clip", old="recomputed", top_entropy=0.5),
    rf.PolicyLoss("ppo_clip", old="recomputed", correction=rf.ImportanceSampling(normalize=True)),
    rf.PolicyLoss(
        "ppo_clip", old="recomputed", rejection=rf.Rejection("k1", high=2.0, count="kept")
    ),
    rf.DPOLoss(),
]


def params_of(spec):
    old = getattr(spec, "old", "current")
    return {"loss": spec, "epochs": 1, "mini_batches": 1, "max_grad_norm": 1.0, "old": old}


def in_calls(batch, calls, spec, model, state=None):
    """What the last one of calls logs that each have some of the rows."""
    carried, state, made = {}, {} if state is None else state, None
    for index, rows in enumerate(calls):
        chosen = torch.tensor(rows, dtype=torch.int64)
        call = call_of(select_rows(batch, chosen), params_of(spec), model, state=state)
        piece, total = (index, len(calls)), len(batch)
        call = replace(call, rows=chosen, total=total, piece=piece, carried=carried)
        made = update.update(call)
    return made.metrics


@st.composite
def called(draw):
    """Rows, and those of each of some calls: whole groups in any order, perhaps some left out."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    batch = samples(groups, draw(st.integers(0, 99)))
    names = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs", "values")
    exact = {name: batch[name].double() for name in (*names, "returns", "reward")}
    batch = with_fields(batch, {**exact, "teacher_log_probs": exact["ref_log_probs"]})
    count = draw(st.integers(2, 4))
    home = [draw(st.integers(0, count - 1)) for _ in sizes]
    dropped = draw(st.sets(st.integers(0, len(groups) - 1), max_size=2))
    left = [row for row in range(len(groups)) if row not in dropped]
    return batch, [[row for row in left if home[groups[row]] == n] for n in range(count)]


@settings(max_examples=examples(60), deadline=None)
@given(called(), st.sampled_from(LOSSES))
def test_calls_with_a_part_of_the_rows_make_the_step_of_one_call(case, spec):
    """In any order, with rows left out, and calls without a row: to 1e-10 in float64."""
    batch, calls = case
    whole, added, before, after = Sloped(), Sloped(), {}, {}
    rows = torch.tensor(sorted(row for rows in calls for row in rows), dtype=torch.int64)
    call = call_of(select_rows(batch, rows), params_of(spec), whole, state=before)
    expected = update.update(replace(call, rows=rows, total=len(batch))).metrics

    found = in_calls(batch, calls, spec, added, after)

    assert spec.adds_up
    torch.testing.assert_close(added.made[0], whole.made[0], rtol=1e-10, atol=1e-12)
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert after == pytest.approx(before, rel=1e-10)


@pytest.mark.parametrize("spec", NOT_ADDED, ids=lambda spec: spec.describe())
def test_what_is_summed_or_chosen_over_all_rows_does_not_add_up(spec):
    assert not spec.adds_up


def test_a_step_that_is_not_finite_leaves_nothing_to_the_next():
    batch, model, calls = samples([0, 0, 1, 1], 3), Sloped(), [[0, 1], [2, 3]]
    begin = model.theta.detach().clone()
    in_calls(batch, calls, rf.SFTLoss(), model)
    model.theta.data[:] = torch.inf
    with pytest.raises(NumericsError, match="no optimizer step of iteration 3 was finite"):
        in_calls(batch, calls, rf.SFTLoss(), model)
    model.theta.data[:] = begin
    in_calls(batch, calls, rf.SFTLoss(), model)
    assert torch.equal(model.made[0], model.made[-1])
