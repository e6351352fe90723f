"""Updates in the background: a step at a time, where their devices have nothing else to do."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.scheduler.plan.plan import Action, Chunk, Plan
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import compiled_with
from tests.scheduler.strategies import exact, graph_of

POOLS = {"train": 1, "gen": 1}
BESIDE = rf.Placement(pools=POOLS, assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")})
WITH_ROLLOUT = BESIDE.model_copy(
    update={"assign": {**BESIDE.assign, "drafter": rf.on("gen")}},
)


def drafted(*, steps: int = 4, drafter: bool = True) -> Graph:
    """GRPO, with a drafter that learns from its samples."""

    def declare() -> None:
        actor = rf.Model("actor", "models/wide", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
        if drafter:
            small = rf.Model("drafter", "models/mid", optimizer=rf.AdamW(lr=1e-3))
            ops.train_drafter(small, samples, steps=steps)

    return graph_of(declare)


def steps_of(plan: Plan) -> list[Action]:
    return [action for action in plan.actions if action.node == "drafter.update"]


@pytest.mark.parametrize("placement", [BESIDE, WITH_ROLLOUT])
def test_it_takes_idle_time_and_lengthens_nothing(placement):
    without = placement.model_copy(
        update={"assign": {k: v for k, v in placement.assign.items() if k != "drafter"}}
    )
    plan = compiled_with(drafted(), placement).plan
    alone = compiled_with(drafted(drafter=False), without).plan
    assert sum(step.cost.seconds for step in steps_of(plan)) > 0
    assert plan.timing.period == pytest.approx(alone.timing.period, rel=1e-6)
    assert not set(plan.timing.critical) & {step.id for step in steps_of(plan)}


def test_each_step_is_a_run_of_its_own_after_the_one_before():
    found = steps_of(compiled_with(drafted(), BESIDE).plan)
    assert [Chunk(index=i, count=4) for i in range(4)] == [step.chunk for step in found]
    for before, after in pairwise(found):
        assert before.id in {dep.action for dep in after.after}
    assert {"background"} == {step.reason.rule for step in found}
    one = steps_of(compiled_with(drafted(steps=1), BESIDE).plan)
    assert [None] == [step.chunk for step in one]


def test_streaming_leaves_its_steps_as_they_are():
    plan = compiled_with(drafted(steps=2), BESIDE.model_copy(update={"stream": 4})).plan
    assert [2, 2] == [step.chunk.count for step in steps_of(plan)]
    rollouts = {a.id for a in plan.actions if a.node == "actor.rollout" and a.chunk is not None}
    assert 4 == len(rollouts)
    assert rollouts <= {dep.action for dep in steps_of(plan)[0].after}


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_wrong_steps_are_rejected(backend):
    compiled = compiled_with(drafted(), BESIDE, backend=backend)
    plan = dict(compiled.stages)["transfer"]
    assert [] == verify(plan, "transfer")
    first, second, *_ = steps_of(plan)
    for wrong in (
        replace(first, chunk=None),
        replace(first, chunk=Chunk(index=1, count=4)),
        replace(first, chunk=Chunk(index=0, count=3)),
        replace(first, chunk=Chunk(index=0, count=4, by="finish")),
        replace(second, after=tuple(d for d in second.after if d.action != first.id)),
        replace(first, after=tuple(d for d in first.after if d.kind != "data")),
    ):
        actions = tuple(wrong if a.id == wrong.id else a for a in plan.actions)
        assert verify(replace(plan, actions=actions), "transfer"), wrong


def test_the_update_of_the_policy_is_not_cut_without_being_asked():
    graph = drafted()
    nodes = tuple(
        replace(n, params=tuple(p for p in n.params if p[0] != "background")) for n in graph.nodes
    )
    plan = compiled_with(replace(graph, nodes=nodes), BESIDE).plan
    assert [None] == [step.chunk for step in steps_of(plan)]


def test_a_drafter_holds_keys_values_and_logits_of_its_own():
    def rollout_of(drafter: bool, stream: int = 1) -> Plan:
        def declare() -> None:
            actor = rf.Model("actor", "models/wide", optimizer=rf.AdamW(lr=1e-3))
            small = rf.Model("drafter", "models/tiny") if drafter else None
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, drafter=small)
            advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
            ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

        return compiled_with(graph_of(declare), BESIDE.model_copy(update={"stream": stream})).plan

    plain, drafted = rollout_of(False), rollout_of(True)
    one, other = (dict(p.action("actor.rollout").cost.holds) for p in (plain, drafted))
    assert other["drafts"] > 0
    assert one == {name: size for name, size in other.items() if name != "drafts"}
    kept = rollout_of(True, 2).part("actor.rollout/cache").size
    assert other["drafts"] + other["KV cache"] == kept
    assert rollout_of(True, 2).action("actor.rollout[1/2]").needs == (
        "actor@gen/weights",
        "drafter@gen/weights",
        "actor.rollout/cache",
    )
    assert "drafter@gen/weights" in drafted.awake_at_start
