"""What the passes do to pipelines that are drawn here, and to random ones."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.fields import Binding, Edge
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.plan.plan import Action, Dep, Instance, Part, Plan, Reason
from rlflow.scheduler.verify.happens_before import Facts
from tests.scheduler.examples import (
    APART,
    COLOCATE,
    EXAMPLES,
    OWN,
    SPLIT,
    compiled_with,
    grpo,
    ppo,
)
from tests.scheduler.strategies import PLENTY, cluster, exact, graph_of


def ordered(plan: Plan, first: str, second: str) -> bool:
    """Whether one of two actions always ends before the other of that iteration starts."""
    facts = Facts(plan=plan)
    return facts.precedes(first, second, 0) or facts.precedes(second, first, 0)


def kinds(plan: Plan, kind: str) -> list[Action]:
    return [action for action in plan.actions if action.kind == kind]


def test_colocated_models_take_turns() -> None:
    r"""Everything that uses a model on one device runs one after another.

    rollout -> ref.log_probs -> actor.update
           \-> critic.values -> critic.update        (device 0)
    """
    plan = compiled_with(ppo(), COLOCATE).plan
    on_device = [action.id for action in plan.actions if 0 in action.devices]
    assert {"actor.rollout", "ref.log_probs", "critic.values", "actor.update", "critic.update"} == (
        set(on_device)
    )
    assert all(
        ordered(plan, one, other) for one in on_device for other in on_device if one != other
    )


def test_reference_reward_and_critic_overlap_on_pools_of_their_own() -> None:
    r"""Nothing orders three forwards of the same samples.

                /-> ref.log_probs  (look)  \
        rollout --> critic.values  (judge)  --> advantage
                \-> reward         (host)  /
    """
    plan = compiled_with(ppo(), APART).plan
    names = ("ref.log_probs", "critic.values", "reward")
    for name in names:
        assert Facts(plan=plan).precedes("actor.rollout", name, 0)
        assert Facts(plan=plan).precedes(name, "advantage", 0)
    assert not any(ordered(plan, one, other) for one in names for other in names)


@pytest.mark.parametrize("placement", [COLOCATE, SPLIT, OWN])
def test_the_old_policy_is_read_before_it_is_updated(placement: rf.Placement) -> None:
    """actor.log_probs (v[i]) -> actor.update (v[i+1]) -> actor.log_probs of the next iteration."""
    plan = compiled_with(grpo(epochs=2), placement).plan
    facts = Facts(plan=plan)
    assert facts.precedes("actor.log_probs", "actor.update", 0)
    assert facts.precedes("actor.update", "actor.log_probs", 1)
    assert not facts.precedes("actor.update", "actor.log_probs", 0)


def test_a_rollout_with_its_own_weights_gets_one_reshard_after_each_update() -> None:
    """actor.update -> reshard -> (next iteration) actor.rollout -> reshard."""
    for placement in (SPLIT, OWN):
        plan = compiled_with(grpo(every=0), placement).plan
        (reshard,) = kinds(plan, "reshard")
        facts = Facts(plan=plan)
        assert facts.comes_before("actor.update", reshard.id, 0)
        assert facts.comes_before(reshard.id, "actor.rollout", 1)
        assert not facts.comes_before(reshard.id, "actor.rollout", 0)
        assert facts.comes_before("actor.rollout", reshard.id, 0)
        assert (0, 1) == (reshard.phase, reshard.every)


def test_a_shared_rollout_gets_no_reshard() -> None:
    """The rollout and the update use one instance: in one process it is the same memory."""
    plan = compiled_with(grpo(), COLOCATE).plan
    assert [] == kinds(plan, "reshard")
    assert plan.action("actor.rollout").instance == plan.action("actor.update").instance


def test_a_reshard_runs_as_seldom_as_its_reader() -> None:
    """Only an evaluation every three iterations reads the second copy."""
    assign = {**COLOCATE.assign, "eval": rf.on("all", weights="own"),
              "actor.rollout": rf.on("gen")}  # fmt: skip
    placement = rf.Placement(pools={"all": 1, "gen": 1}, assign=assign)
    plan = compiled_with(grpo(every=3), placement).plan
    assert {"actor@gen": 1, "actor@all/rollout": 3} == {
        target: a.every for a in kinds(plan, "reshard") for target in a.targets
    }


def test_a_reference_that_nobody_needs_is_dropped_with_a_note() -> None:
    """kl_coef = 0: ref.log_probs goes, ref is never loaded, its assignment is no error."""
    plan = compiled_with(grpo(kl_coef=0.0), SPLIT).plan
    assert not plan.graph.has_node("ref.log_probs")
    assert "ref" not in {instance.model for instance in plan.instances}
    texts = [note.text for note in plan.notes]
    assert any("ref.log_probs is dropped" in text and "kl_coef is 0" in text for text in texts)
    assert any("model ref is not loaded" in text for text in texts)


def test_equal_nodes_are_computed_once_with_a_note() -> None:
    """rollout -> reward and rollout -> again are the same function of the same rows."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        ops.metrics(ops.reward(exact, samples), name="one")
        ops.metrics(ops.reward(exact, samples, name="again"), name="two")

    plan = compiled_with(graph_of(declare), COLOCATE).plan
    assert ("reward",) == plan.graph.node("two").sources
    assert "again computes what reward computes: done once" in [n.text for n in plan.notes]


def test_too_small_a_memory_is_refused_with_the_action_and_the_figures() -> None:
    with pytest.raises(PlanError) as refused:
        compiled_with(grpo(path="models/wide"), COLOCATE, memory=250e6)
    (finding,) = refused.value.findings
    assert "E401" == finding.code
    assert "action 'actor.update' does not fit on all[0]" == finding.what
    assert "126.1 MB actor@all/optimizer" in finding.got
    assert "63.1 MB actor@all/weights" in finding.got
    assert "250.0 MB" in finding.expected


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(PlanError, match="needs 2 devices, there are 1"):
        compile_plan(grpo(), SPLIT, cluster("cpu", 1, PLENTY))


def test_one_model_cannot_be_trained_in_two_places() -> None:
    """actor.update on red and actor.more on green: neither would have the other's weights."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        ops.update(actor, samples, loss=rf.SFTLoss())
        ops.update(actor, samples, loss=rf.SFTLoss(), name="actor.more")

    assign = {"*": rf.on("red"), "actor.more": rf.on("green")}
    placement = rf.Placement(pools={"red": 1, "green": 1}, assign=assign)
    with pytest.raises(PlanError, match="actor"):
        compiled_with(graph_of(declare), placement)


def test_weights_that_a_reshard_overwrites_are_discarded_and_others_offloaded() -> None:
    """The rollout's copy is filled anew in each iteration; the reference has no other copy.

    Gradients are of no use once the update is over.
    """
    plan = EXAMPLES["grpo_pressure"]().plan
    modes = {(a.kind, a.part): a.mode for a in plan.actions if a.part}
    assert "discard" == modes["sleep", "actor@all/rollout/weights"]
    assert "discard" == modes["wake", "actor@all/rollout/weights"]
    assert {"discard"} == {mode for (_, part), mode in modes.items() if "gradients" in part}
    others = {part: mode for (_, part), mode in modes.items() if "gradients" not in part}
    del others["actor@all/rollout/weights"]
    assert {"offload"} == set(others.values())


def test_nothing_sleeps_that_fits() -> None:
    assert [] == kinds(compiled_with(ppo(), COLOCATE, share=1.0).plan, "sleep")
    assert [] != kinds(compiled_with(ppo(), COLOCATE, share=0.9).plan, "sleep")


def test_a_part_of_unknown_size_is_never_put_to_sleep() -> None:
    """The reference's files are not on this machine: its sleep would make no room."""

    def declare() -> None:
        actor = rf.Model("actor", "models/wide", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "nobody/has-this")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
        ops.update(actor, samples, advantage, ops.log_probs(ref, samples), loss=loss)

    plan = compiled_with(graph_of(declare), OWN, share=0.9).plan
    asleep = {action.part for action in kinds(plan, "sleep")}
    assert asleep
    assert "ref@all/weights" not in asleep


@pytest.mark.parametrize("kind", [Plan, Action, Part, Instance, Graph, Node, Edge, Binding, Dep])
def test_data_is_frozen(kind: type) -> None:
    plan = EXAMPLES["grpo_split"]().plan
    node = plan.graph.nodes[-1]
    samples = [plan, plan.actions[0], plan.parts[0], plan.instances[0], plan.graph, node,
               plan.graph.edges[0], plan.graph.node("reward").inputs[0],
               plan.actions[-1].after[0]]  # fmt: skip
    (one,) = [sample for sample in samples if isinstance(sample, kind)]
    assert kind.__dataclass_params__.frozen
    with pytest.raises(FrozenInstanceError):
        setattr(one, fields(kind)[0].name, None)


@pytest.mark.parametrize(("rule", "text"), [("", "text"), ("rule", ""), ("", "")])
def test_an_action_needs_a_reason(rule: str, text: str) -> None:
    with pytest.raises(ValueError, match="without a reason"):
        Reason(rule=rule, text=text)
