"""What adaptive coefficients, rejection and the interpolated old policy ask of a graph."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow import ops
from tests.scheduler.rewriting import ADAM, before, names, rewritten, rollout
from tests.scheduler.strategies import graph_of


def graph(loss: rf.PolicyLoss, reward_kl: object = 0.0, *, old: bool = False, **options: object):
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        ref = rf.Model("ref", "models/tiny")
        samples = rollout(actor)
        reward = ops.reward(lambda response: 0.0, samples, name="reward")
        ref_lp = ops.log_probs(ref, samples)
        adv = ops.advantage("rloo", samples, reward, ref_lp, kl_coef=reward_kl)
        given = [ops.log_probs(actor, samples)] if old else []
        ops.update(actor, samples, adv, ref_lp, *given, loss=loss, **options)

    return graph_of(declare)


def read(plan, node: str) -> set[str]:
    return {bound.name for bound in plan.graph.node(node).inputs}


def test_a_fixed_0_drops_the_reference_and_an_adaptive_coefficient_keeps_it():
    assert "ref.log_probs" not in names(rewritten(graph(rf.PolicyLoss())))
    for made in (
        graph(rf.PolicyLoss(kl_coef=rf.AdaptiveKL(0.1))),
        graph(rf.PolicyLoss(), rf.AdaptiveKL(0.1)),
    ):
        plan = rewritten(made)
        assert "ref.log_probs" in names(plan)
        assert "ref" in [model.name for model in plan.graph.models]
    assert "ref_log_probs" in read(plan, "advantage")


def test_an_estimator_with_an_adaptive_coefficient_is_not_cut():
    fixed, adaptive = (
        rewritten(graph(rf.PolicyLoss(), coef)).graph.node("advantage").op.per
        for coef in (0.1, rf.AdaptiveKL(0.1))
    )
    assert ("group", "batch") == (fixed, adaptive)


def test_the_interpolated_old_policy_reads_versions_and_no_forward():
    loss = rf.PolicyLoss(old="loglinear", correction=rf.ImportanceSampling())
    plan = rewritten(graph(loss, old=True, epochs=2))
    assert {"rollout_log_probs", "version"} < read(plan, "actor.update")
    assert "actor.log_probs" not in names(plan)
    (note,) = [note.text for note in plan.notes if "actor.log_probs" in note.text]
    assert "interpolates the old policy" in note


def test_what_is_counted_over_kept_tokens_keeps_its_old_log_probs():
    """With one step `auto` would drop them; a divisor of the whole step asks for them."""
    rule = rf.Rejection("k1", high=2.0, count="kept")
    plan = rewritten(graph(rf.PolicyLoss(old="recomputed", rejection=rule), old=True))
    assert {"old_log_probs", "rollout_log_probs"} < read(plan, "actor.update")
    assert "actor.log_probs" in names(rewritten(graph(rf.PolicyLoss(old="recomputed"), old=True)))
    assert "actor.log_probs" not in names(rewritten(graph(rf.PolicyLoss(), old=True)))


def test_coefficients_are_in_the_hash_of_a_graph():
    losses = [rf.PolicyLoss(kl_coef=rf.AdaptiveKL(0.1, horizon=h)) for h in (10, 20)]
    one, two = (before(graph(loss))[0].graph.hash for loss in losses)
    assert one != two
    one, two = (graph(rf.PolicyLoss(), rf.AdaptiveKL(0.1, horizon=h)).hash for h in (10, 20))
    assert one != two


@pytest.mark.parametrize("coef", [-0.1, "much", rf.AdaptiveEntropy(0.1)])
def test_what_is_no_coefficient_of_the_reward(coef):
    with pytest.raises(AssertionError, match="E118"):
        graph(rf.PolicyLoss(), coef)
