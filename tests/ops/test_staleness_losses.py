"""What losses say of older rows: which correct, what they read, what is refused."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.graph.graph import Graph
from rlflow.ops.corrections import ImportanceSampling
from rlflow.ops.losses import losses
from rlflow.ops.losses.losses import LossKind, PolicyLoss, SFTLoss, ValueLoss

WEIGHTS = ImportanceSampling()
RATIO_LINE = 'rf.PolicyLoss("ppo_clip", old="rollout")'
WEIGHTS_LINE = 'rf.PolicyLoss("ppo_clip", old="recomputed", correction=rf.ImportanceSampling())'


@pytest.mark.parametrize(
    ("loss", "old", "own", "corrects"),
    [
        (PolicyLoss(), "rollout", True, True),
        (PolicyLoss(), "current", True, False),
        (PolicyLoss(), "recomputed", True, False),
        (PolicyLoss(), "current", False, False),
        (PolicyLoss(correction=WEIGHTS), "current", True, True),
        (PolicyLoss(correction=WEIGHTS), "recomputed", True, True),
        (ValueLoss(), "", True, True),
        (ValueLoss(), "", False, True),
        (SFTLoss(), "", True, False),
        (SFTLoss(), "", False, True),
    ],
)
def test_which_losses_correct_for_older_rows(loss, old, own, corrects):
    assert corrects is loss.corrects(old, own=own)


@pytest.mark.parametrize(
    ("loss", "old", "expected"),
    [
        (PolicyLoss(), "current", "rollout"),
        (PolicyLoss(), "recomputed", "rollout"),
        (PolicyLoss(), "rollout", "rollout"),
        (PolicyLoss(old="current"), "current", "current"),
        (PolicyLoss(old="recomputed"), "recomputed", "recomputed"),
        (PolicyLoss(correction=WEIGHTS), "current", "current"),
        (PolicyLoss(correction=WEIGHTS), "recomputed", "recomputed"),
        (ValueLoss(), "", ""),
    ],
)
def test_only_a_choice_left_open_becomes_the_rollouts_own(loss, old, expected):
    assert expected == loss.under_lag(old)


def test_a_kind_without_a_ratio_has_none_to_correct_by(monkeypatch):
    kind = LossKind(body="rlflow.ops.math.losses.clipped:ppo_clip", options=frozenset({"clip"}))
    monkeypatch.setitem(losses.POLICY_LOSSES, "plain", kind)
    loss = PolicyLoss("plain")
    assert not loss.corrects("rollout", own=True)
    assert "current" == loss.under_lag("current")
    line = 'rf.PolicyLoss("plain", old="recomputed", correction=rf.ImportanceSampling())'
    assert (line, RATIO_LINE, WEIGHTS_LINE) == loss.corrections()


def test_the_lines_to_paste_keep_the_options_and_make_the_loss():
    loss = PolicyLoss(clip=(0.2, math.inf), kl_coef=0.02, kl="k3+", old="recomputed")
    line = loss.corrections()[0]
    expected = (
        'rf.PolicyLoss("ppo_clip", clip=(0.2, math.inf), kl_coef=0.02, kl="k3+", '
        'old="recomputed", correction=rf.ImportanceSampling())'
    )
    assert expected == line
    made = eval(line, {"rf": rf, "math": math})
    assert loss.model_copy(update={"correction": WEIGHTS}) == made
    assert (RATIO_LINE, WEIGHTS_LINE) == PolicyLoss(old="current").corrections()
    assert (RATIO_LINE, WEIGHTS_LINE) == SFTLoss().corrections()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, "rf.ImportanceSampling()"),
        ({"cap": 2.0}, "rf.ImportanceSampling()"),
        (
            {"level": "sequence", "mode": "mask", "cap": 3, "floor": 0.5},
            'rf.ImportanceSampling(level="sequence", mode="mask", cap=3.0, floor=0.5)',
        ),
    ],
)
def test_the_printed_forms_of_a_correction(options, line):
    made = ImportanceSampling(**options)
    assert line == made.line()
    assert line.removeprefix("rf.").replace('"', "") == made.describe()
    assert made == ImportanceSampling.model_validate_json(made.model_dump_json())
    spec = PolicyLoss(correction=made)
    assert f"PolicyLoss(ppo_clip, correction={made.describe()})" == spec.describe()
    assert spec == PolicyLoss.model_validate_json(spec.model_dump_json())


def test_a_correction_against_the_policy_that_sampled_would_do_nothing():
    message = "correction would do nothing here: old='rollout'.*weight is 1"
    with pytest.raises(ValidationError, match=message):
        PolicyLoss(old="rollout", correction=WEIGHTS)


@pytest.mark.parametrize(
    ("old", "needs"),
    [
        ("auto", ("rollout_log_probs",)),
        ("current", ("rollout_log_probs",)),
        ("recomputed", ("old_log_probs", "rollout_log_probs")),
    ],
)
def test_a_correction_reads_what_the_rollout_sampled_with(old, needs):
    spec = PolicyLoss(old=old, correction=WEIGHTS)
    assert ("response_mask", "advantages", *needs) == spec.needs()


def traced(loss, *, epochs=1, recomputed=False, offered=True) -> Graph:
    def declare(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        given = [ops.log_probs(actor, samples)] if recomputed else []
        seen = samples if offered else samples.only("prompt_tokens", "response_tokens")
        mask = [] if offered else [samples.only("response_mask", "group")]
        ops.update(actor, seen, *mask, adv, *given, loss=loss, epochs=epochs)

    return rf.pipeline()(declare).trace()


@pytest.mark.parametrize(
    ("epochs", "recomputed", "old"),
    [(1, False, "current"), (2, True, "recomputed"), (3, True, "recomputed")],
)
def test_a_corrected_update_reads_both_policies(epochs, recomputed, old):
    loss = PolicyLoss(correction=WEIGHTS)
    node = traced(loss, epochs=epochs, recomputed=recomputed).updates("actor")[0]
    read = {binding.name for binding in node.inputs}
    assert "rollout_log_probs" in read
    assert ("old_log_probs" in read) is recomputed
    assert old == node.param("old")
    wanted = next(i for i in node.op.inputs if i.name == "rollout_log_probs")
    assert wanted.required


def test_several_corrected_steps_need_the_proximal_policy():
    """Without it the ratio would be against the rollout, and every weight 1."""
    with pytest.raises(GraphError) as refused:
        traced(PolicyLoss(correction=WEIGHTS), epochs=2)
    text = str(refused.value)
    assert "E103" in text
    assert "old_log_probs = ops.log_probs(actor, samples)" in text


def test_weights_need_the_log_probs_of_the_rollout():
    with pytest.raises(GraphError, match="rollout_log_probs"):
        traced(PolicyLoss(correction=WEIGHTS), offered=False)


def test_a_rollout_offers_the_version_of_every_token():
    graph = traced(PolicyLoss())
    made = graph.node("actor.rollout").op.output("version")
    assert "version:int64[token|response_mask]" == str(made)
