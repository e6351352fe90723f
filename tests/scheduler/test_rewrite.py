"""What rewrites do to nodes that are equal, unused, or forwards of the same rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.scheduler.passes.rewrite import rewrite
from tests.scheduler.examples import SPLIT, grpo
from tests.scheduler.rewriting import ADAM, before, learns, names, notes, rewritten, rollout, scores
from tests.scheduler.strategies import exact, graph_of, judged


def test_one_step_on_fresh_samples_needs_no_forward_of_the_old_policy() -> None:
    plan = rewritten(learns())

    assert "actor.log_probs" not in names(plan)
    assert "current" == plan.graph.node("actor.update").param("old")
    assert "old_log_probs" not in {b.name for b in plan.graph.node("actor.update").inputs}
    assert [
        "actor.update does not read actor.log_probs.old_log_probs: its one optimizer step begins "
        "with the weights that the samples of actor.rollout come from, so the ratio is 1"
    ] == notes(plan, "old policy")
    assert [
        "actor.log_probs is dropped: actor.update does not read old_log_probs: the old policy is "
        "the current one"
    ] == notes(plan, "unused node")


@pytest.mark.parametrize(
    ("graph", "staleness", "why"),
    [
        ({"epochs": 2}, 0, "with 2 epochs the ratio needs log-probs from before the first step"),
        ({"mini_batches": 4}, 0, "with 4 mini-batches the ratio needs"),
        ({"epochs": 3, "mini_batches": 2}, 0, "with 3 epochs of 2 mini-batches the ratio needs"),
        ({}, 1, "the samples of actor.rollout may come from weights that are 1 update older"),
        ({}, 3, "the samples of actor.rollout may come from weights that are 3 updates older"),
        ({"sft_first": True}, 0, "actor.sft changes actor in between"),
    ],
)
def test_other_old_log_probs_are_kept_with_a_reason(
    graph: dict[str, object], staleness: int, why: str
) -> None:
    plan = rewritten(learns(**graph), staleness=staleness)

    assert "actor.log_probs" in names(plan)
    assert "recomputed" == plan.graph.node("actor.update").param("old")
    (text,) = notes(plan, "old policy")
    assert text.startswith(f"actor.log_probs is kept for actor.update: {why}")


def test_log_probs_of_another_model_are_no_old_policy() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        teacher = rf.Model("teacher", "models/tiny")
        samples = rollout(actor)
        given = ops.log_probs(teacher, samples, field="old_log_probs")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, given, loss=rf.PolicyLoss())

    (text,) = notes(rewritten(graph_of(declare)), "old policy")

    assert (
        "teacher.log_probs is kept for actor.update: its log-probs are not those of actor" == text
    )


def test_log_probs_of_other_tokens_are_kept() -> None:
    """Responses that another node has made of the same rows."""
    graph = learns()
    old = graph.node("actor.log_probs")
    bound = tuple(
        replace(b, field=replace(b.field, name="edited")) if b.name == "response_tokens" else b
        for b in old.inputs
    )
    nodes = tuple(replace(n, inputs=bound) if n is old else n for n in graph.nodes)

    (text,) = notes(rewritten(replace(graph, nodes=nodes), only="old policy"), "old policy")

    assert "actor.log_probs is kept for actor.update: its log-probs are of other tokens" == text


def test_a_loss_that_names_its_old_policy_keeps_it() -> None:
    plan = rewritten(learns(old="recomputed"))

    assert "actor.log_probs" in names(plan)
    assert [] == notes(plan, "old policy")


def test_a_forward_that_others_read_stays_for_them() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        samples = rollout(actor)
        given = ops.log_probs(actor, samples)
        ops.metrics(given, name="seen")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, given, loss=rf.PolicyLoss())

    plan = rewritten(graph_of(declare))

    assert "actor.log_probs" in names(plan)
    assert "actor.log_probs" not in plan.graph.node("actor.update").sources


def test_chains_of_equal_nodes_fall_together() -> None:
    r"""rollout --> reward -> advantage -> update
    \-> reward_2 -> advantage_2 -> update_2
    """

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        samples = rollout(actor)
        for number in ("", "_2"):
            reward = ops.reward(exact, samples, name=f"reward{number}")
            advantage = ops.advantage("grpo", samples, reward)
            ops.update(actor, samples, advantage, loss=rf.PolicyLoss())

    plan = rewritten(graph_of(declare))

    assert [
        "reward_2 computes what reward computes: done once",
        "advantage_2 computes what advantage computes: done once",
    ] == notes(plan, "equal nodes")
    updates = plan.graph.updates("actor")
    assert 2 == len(updates)
    assert all("advantage" in update.sources for update in updates)


def test_functions_that_differ_are_not_equal() -> None:
    """Two ops of one name and contract, around two functions."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny")
        reward = ops.reward(exact, rollout(actor))
        for number in range(2):
            op = judged("judge", "row", "", "pad")
            ops.metrics(op(reward, name=f"judge{number}"), name=f"seen{number}")

    assert [] == notes(rewritten(graph_of(declare)), "equal nodes")


def test_what_only_unused_nodes_read_goes_too() -> None:
    graph = grpo(kl_coef=0.0)
    plan = rewritten(graph)

    assert set(names(plan)) == {node.name for node in graph.nodes} - {"ref.log_probs"}
    assert ["actor"] == [model.name for model in plan.graph.models]
    assert ["model ref is not loaded: no node uses it"] == notes(plan, "unused model")


def test_a_graph_with_nothing_to_save_stays_as_it_is() -> None:
    plan, context = before(grpo())

    assert plan == rewrite(plan, context)


def test_two_temperatures_are_named() -> None:
    (note,) = notes(rewritten(scores(1.0, 0.5)), "one forward")
    assert note.endswith("one forward of ref over the same rows, at temperatures 1 and 0.5")


def test_forwards_at_several_temperatures_are_one() -> None:
    plan = rewritten(scores(1.0, 0.5, 2.0))

    assert [
        "score0 makes what score1 and score2 would make as well: one forward of ref over the same "
        "rows, at temperatures 1 and 0.5 and 2"
    ] == notes(plan, "one forward")
    node = plan.graph.node("score0")
    assert (1.0, 0.5, 2.0) == node.param("temperature")
    assert ["ref_log_probs", "ref_log_probs_2", "ref_log_probs_3"] == [
        made.name for made in node.op.outputs
    ]
    read = [plan.graph.node(f"seen{number}").inputs[0] for number in range(3)]
    assert [
        ("ref_log_probs", "score0", "ref_log_probs"),
        ("ref_log_probs", "score0", "ref_log_probs_2"),
        ("ref_log_probs", "score0", "ref_log_probs_3"),
    ] == [(bound.name, bound.source, bound.field.name) for bound in read]


def test_a_field_under_two_names_is_one_forward() -> None:
    plan = rewritten(scores(1.0, 1.0, fields=(None, "teacher_log_probs")))

    (text,) = notes(plan, "one forward")
    assert text.endswith("one forward of ref over the same rows")
    assert ["ref_log_probs", "teacher_log_probs"] == [
        made.name for made in plan.graph.node("score0").op.outputs
    ]


def test_forwards_that_are_placed_apart_stay_apart() -> None:
    assign = {**SPLIT.assign, "ref": rf.on("train"), "score1": rf.on("gen")}
    placement = rf.Placement(pools=SPLIT.pools, assign=assign)

    assert [] == notes(rewritten(scores(1.0, 0.5), placement), "one forward")
    assign["score0"] = rf.on("gen")
    together = rf.Placement(pools=SPLIT.pools, assign=assign)
    assert 1 == len(notes(rewritten(scores(1.0, 0.5), together), "one forward"))


def test_other_rows_and_other_models_are_other_forwards() -> None:
    def declare() -> None:
        actor, ref = rf.Model("actor", "models/tiny"), rf.Model("ref", "models/tiny")
        samples, others = rollout(actor), rollout(actor, n=4)
        for model, rows, name in ((ref, samples, "a"), (ref, others, "b"), (actor, samples, "c")):
            made = ops.log_probs(model, rows, field="x", temperature=0.5, name=name)
            ops.metrics(made, name=f"see_{name}")

    assert [] == notes(rewritten(graph_of(declare)), "one forward")
