"""Whose log-probs a ratio is taken against: what ops choose, a pass leaves out, plans prove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.old_policy import why_not_current
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from rlflow.scheduler.search.tune import SearchLimits, search_placements
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.left_out import shared_work_is_exact
from tests.scheduler.examples import COLOCATE
from tests.scheduler.rewriting import ADAM, before, names, rewritten, rollout
from tests.scheduler.strategies import exact, graph_of

WEIGHTS = rf.ImportanceSampling()
DISTILL = rf.DistillLoss("forward_kl")


def learning(
    *losses: rf.PolicyLoss, offered: bool = False, likely: bool = False, **steps: Any
) -> Graph:
    """Samples, perhaps log-probs or the likeliest tokens of the actor, an update for each loss."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        samples = rollout(actor)
        given = [ops.log_probs(actor, samples)] if offered else []
        given += [ops.log_probs(actor, samples, top_k=4)] if likely else []
        if any("advantages" in loss.needs() for loss in losses):
            given += [ops.advantage("grpo", samples, ops.reward(exact, samples))]
        for number, loss in enumerate(losses):
            ops.update(actor, samples, *given, loss=loss, name=f"u{number}", **steps)

    return graph_of(declare)


def olds(graph: Graph) -> list[str]:
    return [node.param("old") for node in graph.updates("actor")]


def test_a_second_update_compares_with_the_policy_that_sampled():
    graph = learning(rf.PolicyLoss(), rf.PolicyLoss())

    assert ["current", "rollout"] == olds(graph)
    assert "rollout_log_probs" in [bound.name for bound in graph.node("u1").inputs]


def test_a_second_update_with_weights_has_a_proximal_policy_from_before_the_first():
    loss = rf.PolicyLoss(correction=WEIGHTS)
    assert ["recomputed", "recomputed"] == olds(learning(loss, loss, offered=True))
    plan = rewritten(learning(loss, loss, offered=True))
    assert ["current", "recomputed"] == olds(plan.graph)
    assert "actor.log_probs" in names(plan)


def test_an_update_after_one_of_another_model_is_the_first_of_its_own():
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        student = rf.Model("student", "models/tiny", optimizer=ADAM)
        samples = rollout(actor)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(student, samples, loss=rf.SFTLoss())
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss())

    assert ["current"] == olds(graph_of(declare))


CASES: dict[str, tuple[Callable[[], Graph], str]] = {
    "weights": (lambda: learning(rf.PolicyLoss(correction=WEIGHTS), offered=True), ""),
    "distilled in steps": (lambda: learning(DISTILL, likely=True, mini_batches=2), ""),
    "distilled twice": (lambda: learning(DISTILL, DISTILL, likely=True), ""),
    "no ratio": (lambda: learning(rf.PolicyLoss("reinforce"), offered=True, epochs=2), "E402"),
}


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_what_the_pass_leaves_out_the_verifier_finds_right(case: str, staleness: int):
    declare, refused = CASES[case]
    placement = COLOCATE.model_copy(update={"staleness": staleness})
    place = replace(declare(), staleness=staleness), placement, cpu_cluster(1, threads=1)
    if staleness and refused:
        with pytest.raises(PlanError, match=refused):
            compile_plan(*place)
    else:
        compile_plan(*place)


def test_rows_that_are_stamped_as_older_are_no_rows_of_these_weights():
    """Those of a loop that keeps surplus, or of a replay buffer, come from no rollout directly."""
    graph = learning(rf.PolicyLoss())
    node = graph.node("u0")
    assert "" == why_not_current(graph, node)
    stamped = replace(node, params=(*node.params, ("staleness", 1)))
    assert "1 update older" in why_not_current(graph, stamped)


def test_tune_searches_what_distils_from_itself():
    graph = learning(DISTILL, likely=True, mini_batches=2)
    rows = search_placements(
        graph, {}, cpu_cluster(2, threads=1), limits=SearchLimits(staleness=1)
    ).rows
    assert rows


@pytest.mark.parametrize(
    ("declare", "staleness", "says"),
    [
        (
            lambda: learning(rf.PolicyLoss(), mini_batches=2, epochs=3),
            0,
            "with 3 epochs of 2",
        ),
        (lambda: learning(rf.PolicyLoss(), rf.PolicyLoss()), 0, "u0 changes actor in between"),
        (lambda: learning(rf.PolicyLoss(), offered=True), 2, "weights that are 2 updates older"),
    ],
)
def test_a_ratio_that_is_1_by_mistake_is_no_plan(
    declare: Callable[[], Graph], staleness: int, says: str
):
    graph = declare()
    plan, _ = before(graph, staleness=staleness)
    last = graph.updates("actor")[-1]
    wrong = replace(
        last,
        params=tuple((key, "current" if key == "old" else value) for key, value in last.params),
        inputs=tuple(b for b in last.inputs if b.name != "old_log_probs"),
    )
    nodes = tuple(wrong if node is last else node for node in plan.graph.nodes)
    plan = replace(plan, graph=replace(plan.graph, nodes=nodes))

    (text,) = shared_work_is_exact(Facts(plan=plan))

    assert says in text
