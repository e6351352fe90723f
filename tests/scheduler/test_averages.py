"""An average of weights in the plan: where it is, what it reads, and when.

rollout -> ref.log_probs -> actor.update -> ref.average -> the next iteration
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.check import check_graph
from rlflow.graph.trace import tracing
from rlflow.report.charts.look import kind_of
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.plan.diff import compare, diff_text
from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.plan.saved import plan_from_json
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import COLOCATE, HYBRID, OWN, SPLIT, compiled_with
from tests.scheduler.mutants import with_action
from tests.scheduler.player import play
from tests.scheduler.proving import unnoticed
from tests.scheduler.strategies import exact, graph_of

STALE = SPLIT.model_copy(update={"staleness": 2, "pause_at": 4})
MESH = rf.Placement(
    pools={"all": 4, "look": 2},
    assign={
        "*": rf.on("all", fsdp=2, tp=2, recompute=True),
        "actor.rollout": rf.on("all", tp=2),
        "ref": rf.on("look", tp=2),
    },
)


def ema(
    *, every: int = 1, updates: int = 1, kl_coef: float = 0.1, path: str = "models/mid"
) -> Graph:
    """GRPO towards an average, or with nobody who reads it; `path` is that of the average."""
    return graph_of(lambda: declare(every, updates, kl_coef, path))


def declare(every: int, updates: int, kl_coef: float, path: str) -> None:
    actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", path, optimizer=rf.Average(decay=0.9))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
    reference = ops.log_probs(ref, samples)
    advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
    loss = rf.PolicyLoss("ppo_clip", kl_coef=kl_coef)
    for _ in range(updates):
        ops.update(actor, samples, advantage, reference, loss=loss)
    ops.average(ref, actor, every=every)


def average_of(plan: Plan) -> Action:
    return plan.action("ref.average")


PLANS: dict[str, Callable[[], Plan]] = {
    "colocate": lambda: compiled_with(ema(), COLOCATE).plan,
    "own": lambda: compiled_with(ema(every=3), OWN).plan,
    "split": lambda: compiled_with(ema(updates=2), SPLIT).plan,
    "stale": lambda: compiled_with(ema(), STALE).plan,
    "hybrid": lambda: compiled_with(ema(), HYBRID, kind="h100").plan,
    "mesh": lambda: compiled_with(ema(), MESH, kind="h100").plan,
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return PLANS[request.param]()


def test_the_graph_has_the_average_after_the_last_update_and_before_the_next() -> None:
    graph = ema(updates=2)
    edges = {(e.source, e.target, e.kind, e.distance, e.model) for e in graph.edges}
    assert ("actor.update_2", "ref.average", "weights", 0, "actor") in edges
    assert ("ref.average", "actor.update", "order", 1, "actor") in edges
    assert ("ref.log_probs", "ref.average", "order", 0, "ref") in edges
    assert ("ref.average", "ref.log_probs", "weights", 1, "ref") in edges


def test_it_lies_as_the_trained_weights_do_whatever_its_model_is_assigned_to(plan: Plan) -> None:
    average, actor = plan.trained_instance("ref"), plan.trained_instance("actor")
    assert average is not None
    assert actor is not None
    assert (actor.pool, actor.devices, actor.fsdp, actor.tp) == (
        average.pool,
        average.devices,
        average.fsdp,
        average.tp,
    )
    assert not average.recompute
    action = average_of(plan)
    assert action.devices == actor.devices
    assert ((average.name, 0), (actor.name, -1)) == action.reads
    assert ((average.name, -1),) == action.writes
    assert (average.weights, actor.weights) == action.needs


def test_it_has_no_gradients_and_no_optimizer_state(plan: Plan) -> None:
    kinds = {part.kind for part in plan.parts if plan.instance(part.instance).model == "ref"}
    assert {"weights"} == kinds


def test_it_recomputes_nothing_where_the_trained_model_does() -> None:
    recomputing = COLOCATE.model_copy(update={"assign": {"*": rf.on("all", recompute=True)}})
    plan = compiled_with(ema(), recomputing).plan
    assert {"actor": True, "ref": False} == {i.model: i.recompute for i in plan.instances}


def test_other_uses_get_it_by_a_reshard_and_in_place_by_nothing() -> None:
    filled = {name: [a.id for a in PLANS[name]().actions if a.kind == "reshard"] for name in PLANS}
    assert [] == filled["colocate"]
    assert "reshard:ref@train->ref@gen" in filled["split"]
    assert "reshard:ref@all->ref@look" in filled["mesh"]


def test_plans_hold_and_play_without_a_violation(plan: Plan) -> None:
    assert [] == verify(plan, "notes")
    for seed in range(4):
        assert [] == play(plan, seed)


@pytest.mark.parametrize("name", ["colocate", "split"])
def test_every_mutant_is_rejected(name: str) -> None:
    assert [] == unnoticed(PLANS[name]())


def test_an_average_before_the_update_is_rejected(plan: Plan) -> None:
    last = plan.graph.updates("actor")[-1].name
    action = average_of(plan)
    early = tuple(dep for dep in action.after if dep.kind == "data")
    found = verify(with_action(plan, action.id, after=early), "weights")
    assert any("ref.average may read" in text and last in text for text in found)


def test_an_update_that_does_not_wait_for_the_average_is_rejected() -> None:
    (stage,) = (
        p for name, p in compiled_with(ema(kl_coef=0.0), COLOCATE).stages if name == "weights"
    )
    update = stage.action("actor.update")
    after = tuple(dep for dep in update.after if dep.action != "ref.average")
    found = verify(with_action(stage, update.id, after=after), "weights")
    assert ["actor.update may overwrite version i+1 of actor@all before ref.average"] == found


@pytest.mark.parametrize("lag", [0, -2, 1])
def test_a_version_off_by_some_is_rejected(plan: Plan, lag: int) -> None:
    action = average_of(plan)
    reads = (action.reads[0], (action.reads[1][0], lag))
    assert verify(with_action(plan, action.id, reads=reads), "weights")


def test_an_average_in_another_layout_is_rejected() -> None:
    plan = PLANS["hybrid"]()
    instances = tuple(
        replace(i, fsdp=1) if i.model == "ref" and i.trained else i for i in plan.instances
    )
    found = verify(replace(plan, instances=instances), "bind")
    assert "ref@train averages actor@train and lies otherwise" in found


def test_weights_may_sleep_in_between_and_are_awake_for_it() -> None:
    tight = compiled_with(ema(), OWN, share=0.75).plan
    assert any(a.kind == "sleep" for a in tight.actions)
    assert [] == verify(tight, "notes")
    assert [] == play(tight, 1)


def test_the_plan_and_what_is_read_back_of_it_print_it() -> None:
    plan = PLANS["split"]()
    text = plan_text(plan)
    assert "ops.average(ref) of actor v[i+1], where that is trained" in text
    assert "ref@train    averaged   whole  train" in text
    again = plan_from_json(json.loads(dump_plan(plan)))
    assert plan.hash == again.hash
    assert text == plan_text(again)
    assert "only in split" in diff_text(compare(PLANS["colocate"](), plan, ("colocate", "split")))
    (node,) = (n for n in plan.graph.to_json()["nodes"] if n["op"] == "average")
    assert "update" == kind_of(node)


def test_a_placement_of_the_average_apart_is_refused() -> None:
    assign = {**SPLIT.assign, "ref.average": rf.on("gen")}
    with pytest.raises(PlanError) as refused:
        compiled_with(ema(), SPLIT.model_copy(update={"assign": assign}))
    (finding,) = refused.value.findings
    assert ("E273", '"ref.forward": rf.on("gen")') == (finding.code, finding.fix)
    same = {**SPLIT.assign, "ref.train": rf.on("train", fsdp=1)}
    compiled_with(ema(), SPLIT.model_copy(update={"assign": same}))


def test_another_architecture_is_refused_with_what_differs() -> None:
    with pytest.raises(PlanError) as refused:
        compiled_with(ema(path="models/wide"), COLOCATE)
    (finding,) = refused.value.findings
    assert "E272" == finding.code
    expected = ["layers 4 and 2", "hidden 512 and 256", "head_dim 128 and 64", "ffn 2048 and 1024"]
    assert expected == str(finding.got).splitlines()


def test_another_tokenizer_is_refused(models: Path) -> None:
    for name, ids in (("mid", {"a": 0, "b": 1}), ("other", {"a": 1, "b": 0})):
        folder = models / "tokens" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text((models / "models/mid/config.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))

    def pair() -> None:
        actor = rf.Model("actor", "tokens/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "tokens/other", optimizer=rf.Average())
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
        ops.average(ref, actor)

    with pytest.raises(PlanError) as refused:
        compiled_with(graph_of(pair), COLOCATE)
    (finding,) = refused.value.findings
    assert "E272" == finding.code
    assert "token 0 is 'a', and 'b' to the other" in str(finding.got)


def findings(function: Callable[[], None]) -> list[str]:
    with tracing() as trace:
        function()
    graph = Graph(name="g", nodes=tuple(trace.nodes.values()), models=tuple(trace.models.values()))
    return [finding.code for finding in (*trace.findings, *check_graph(graph))]


def model(name: str, optimizer: rf.AdamW | rf.Average | None = None, **options: object) -> rf.Model:
    return rf.Model(name, "models/mid", optimizer=optimizer, **options)


def learn(*models: rf.Model) -> None:
    samples = ops.tokenize(models[0], ops.prompts(rf.data.arithmetic(digits=2), batch=4))
    for trained in models:
        ops.update(trained, samples, loss=rf.SFTLoss())


ADAM, MEAN, LORA = rf.AdamW(lr=1e-3), rf.Average(), rf.LoRA(rank=4)


def one_way(optimizer: rf.AdamW | rf.Average | None, actor: rf.Model, **options: object) -> None:
    learn(actor)
    ops.average(model("ref", optimizer, **options), actor)


CASES: dict[str, tuple[list[str], Callable[[], None]]] = {
    "right": ([], lambda: one_way(MEAN, model("actor", ADAM))),
    "no optimizer": (["E114"], lambda: one_way(None, model("actor", ADAM))),
    "another optimizer": (["E114"], lambda: one_way(ADAM, model("actor", ADAM))),
    "trained as well": (
        ["E114"],
        lambda: (
            learn(actor := model("actor", ADAM), ref := model("ref", MEAN)),
            ops.average(ref, actor),
        ),
    ),
    "nothing averages": (
        ["E113", "E114"],
        lambda: learn(model("actor", ADAM), model("ref", MEAN)),
    ),
    "of what does not learn": (
        ["E128"],
        lambda: ops.average(model("ref", MEAN), model("teacher")),
    ),
    "of itself": (["E128"], lambda: ops.average(ref := model("ref", MEAN), ref)),
    "of an average": (
        ["E128"],
        lambda: (
            learn(actor := model("actor", ADAM)),
            ops.average(first := model("first", MEAN), actor),
            ops.average(model("second", MEAN), first),
        ),
    ),
    "twice": (
        ["E128"],
        lambda: (
            learn(actor := model("actor", ADAM)),
            ops.average(ref := model("ref", MEAN), actor),
            ops.average(ref, actor),
        ),
    ),
    "every 0": (
        ["E118"],
        lambda: (
            learn(actor := model("actor", ADAM)),
            ops.average(model("ref", MEAN), actor, every=0),
        ),
    ),
    "adapters alike": ([], lambda: one_way(MEAN, model("actor", ADAM, lora=LORA), lora=LORA)),
    "adapters of one": (["E128"], lambda: one_way(MEAN, model("actor", ADAM, lora=LORA))),
    "wider than it": ([], lambda: one_way(MEAN, model("actor", ADAM, dtype="bfloat16"))),
    "narrower than it": (["E128"], lambda: one_way(MEAN, model("actor", ADAM, dtype="float64"))),
    "another head": (["E128"], lambda: one_way(MEAN, model("actor", ADAM), head="value")),
    "other random weights": (
        ["E128"],
        lambda: one_way(MEAN, model("actor", ADAM, init="random", dtype="bfloat16"), init="random"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_declared_of_an_average(case: str) -> None:
    expected, function = CASES[case]
    assert expected == findings(function)


def test_an_average_in_bfloat16_is_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        model("ref", MEAN, dtype="bfloat16")


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="decay"):
        rf.Average(decay=decay)
