"""References that adapters were added to, and the verifier's rule about work left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.left_out import shared_work_is_exact
from tests.scheduler.examples import grpo
from tests.scheduler.rewriting import (
    ADAM,
    LORA,
    adapted,
    learns,
    notes,
    rewritten,
    rollout,
    scores,
)
from tests.scheduler.strategies import exact, graph_of


def test_a_reference_with_the_base_weights_is_not_loaded() -> None:
    plan = rewritten(adapted())

    node = plan.graph.node("ref.log_probs")
    assert ("actor", "off") == (node.model, node.param("adapters"))
    assert node.reads_base
    assert ["actor"] == [model.name for model in plan.graph.models]
    assert [
        "ref.log_probs runs on actor without its adapters, the weights of ref: ref is not loaded, "
        "7.9 MB less on each device of all"
    ] == notes(plan, "base weights")
    assert [] == notes(plan, "unused model")


def test_the_base_has_no_version() -> None:
    """Nothing orders a forward of the base and the update of the adapters."""
    graph = rewritten(adapted()).graph

    assert ["actor.rollout"] == [node.name for node in graph.readers("actor")]
    related = [e for e in graph.edges if "ref.log_probs" in (e.source, e.target)]
    assert {"data"} == {edge.kind for edge in related}


@pytest.mark.parametrize(
    "ref",
    [{"path": "models/tiny"}, {"dtype": "bfloat16"}, {"init": "random"}],
    ids=["path", "dtype", "init"],
)
def test_other_weights_are_no_base(ref: dict[str, str]) -> None:
    plan = rewritten(adapted(**ref))

    assert "ref" == plan.graph.node("ref.log_probs").model
    assert [] == notes(plan, "base weights")


def test_random_weights_are_no_base() -> None:
    assert "ref" == rewritten(adapted(init="random")).graph.node("ref.log_probs").model


def test_a_value_head_is_trained_beside_the_adapters() -> None:
    def declare() -> None:
        critic = rf.Model("critic", "models/tiny", head="value", optimizer=ADAM, lora=LORA)
        judge = rf.Model("judge", "models/tiny", head="value")
        samples = rollout(rf.Model("actor", "models/tiny"))
        ops.metrics(ops.values(judge, samples), name="seen")
        values = ops.values(critic, samples)
        advantage = ops.advantage("gae", samples, ops.reward(exact, samples), values)
        ops.update(critic, samples, advantage, values, loss=rf.ValueLoss())

    plan = rewritten(graph_of(declare))

    assert "judge" == plan.graph.node("judge.values").model
    assert [] == notes(plan, "base weights")


def placed(**assign: rf.On) -> rf.Placement:
    named = {key.replace("__", "."): where for key, where in assign.items()}
    pools = {"train": [0, 1], "gen": [2, 3]}
    return rf.Placement(pools=pools, assign={"*": rf.on("train"), **named})


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        (placed(ref=rf.on("gen")), "ref.log_probs is placed on gen, actor is trained on train"),
        (
            placed(ref__log_probs=rf.on("gen")),
            "ref.log_probs is placed on gen, actor is trained on train",
        ),
        (
            placed(actor__forward=rf.on("gen")),
            "actor.forward is placed on gen, actor is trained on train",
        ),
        (
            placed(ref=rf.on("train", tp=2)),
            "ref.log_probs is placed in another layout than actor is trained in",
        ),
        (
            placed(ref=rf.on("train", offload="layers")),
            "ref.log_probs is placed in another layout than actor is trained in",
        ),
    ],
)
def test_a_reference_that_is_placed_apart_is_loaded(placement: rf.Placement, why: str) -> None:
    plan = rewritten(adapted(), placement)

    assert "ref" == plan.graph.node("ref.log_probs").model
    assert [f"ref is loaded, though actor holds its weights: {why}"] == notes(plan, "base weights")


def test_on_one_device_a_reference_kept_on_the_host_is_loaded() -> None:
    assign = {"*": rf.on("all"), "ref": rf.on("all", offload="layers")}
    plan = rewritten(adapted(), rf.Placement(pools={"all": 1}, assign=assign))

    assert "ref" == plan.graph.node("ref.log_probs").model


@pytest.mark.parametrize(
    "placement",
    [
        placed(),
        placed(ref=rf.on("train")),
        placed(ref=rf.on("train", fsdp=2)),
        placed(actor=rf.on("gen", tp=2), actor__rollout=rf.on("train")),
    ],
)
def test_one_that_is_placed_alike_or_by_default_is_not(placement: rf.Placement) -> None:
    assert "actor" == rewritten(adapted(), placement).graph.node("ref.log_probs").model


def test_a_model_that_generates_is_loaded() -> None:
    (text,) = notes(rewritten(adapted(probe=True)), "base weights")

    assert text == "ref is loaded, though actor holds its weights: ref.rollout generates with it"


def test_two_references_of_one_base_share_a_forward() -> None:
    """Both become forwards of actor without adapters, which are equal."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM, lora=LORA)
        samples = rollout(actor)
        ops.update(actor, samples, loss=rf.SFTLoss())
        for name in ("one", "two"):
            frozen = rf.Model(name, "models/tiny")
            ops.metrics(ops.log_probs(frozen, samples), name=f"seen_{name}")

    plan = rewritten(graph_of(declare))

    assert 2 == len(notes(plan, "base weights"))
    assert ["two.log_probs computes what one.log_probs computes: done once"] == notes(
        plan, "equal nodes"
    )


def broken(plan: Plan) -> list[str]:
    return list(shared_work_is_exact(Facts(plan=plan)))


def changed(plan: Plan, name: str, **params: object) -> Plan:
    """The plan with other options of a node."""
    node = plan.graph.node(name)
    other = replace(node, params=tuple((dict(node.params) | params).items()))
    nodes = tuple(other if n.name == name else n for n in plan.graph.nodes)
    return replace(plan, graph=replace(plan.graph, nodes=nodes))


@pytest.mark.parametrize("graph", [adapted(), learns(), learns(epochs=2), scores(1.0, 0.5)])
def test_what_rewrites_make_is_exact(graph: Graph) -> None:
    assert [] == broken(rewritten(graph))


@pytest.mark.parametrize(
    ("graph", "name", "params", "text"),
    [
        (grpo(), "ref.log_probs", {"adapters": "off"}, "computes without adapters, ref has none"),
        (scores(1.0, 0.5), "score0", {"temperature": 1.0}, "at 1 temperatures"),
        (scores(1.0, 0.5), "score0", {"temperature": (1.0,)}, "at 1 temperatures"),
        (learns(), "actor.update", {"epochs": 2}, "with 2 epochs the ratio needs"),
        (learns(), "actor.update", {"old": "recomputed"}, "compares with old_log_probs"),
    ],
)
def test_what_is_not_exact_is_refused(
    graph: Graph, name: str, params: dict[str, object], text: str
) -> None:
    (found,) = broken(changed(rewritten(graph), name, **params))
    assert text in found


def test_old_samples_and_earlier_updates_are_refused() -> None:
    plan = rewritten(learns())
    stale = replace(plan, graph=replace(plan.graph, staleness=1))
    assert ["1 update older" in text for text in broken(stale)] == [True]

    sft = replace(plan.graph.node("actor.update"), name="actor.sft", declined=())
    earlier = replace(plan.graph, nodes=(sft, *plan.graph.nodes))
    assert ["actor.sft changes actor" in t for t in broken(replace(plan, graph=earlier))] == [True]
