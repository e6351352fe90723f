"""Parts of graphs: what is needed stays, the rest goes; a plan of a part is an ordinary plan."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

import rlflow as rf
from rlflow import ops
from rlflow.cli.stages.parts import part_placement, taken_part
from rlflow.errors import PlanError, UsageError
from rlflow.graph.cut.names import ReadEdge
from rlflow.graph.cut.part import cut_graph
from rlflow.graph.graph import Graph
from rlflow.graph.roles import Recorded
from rlflow.scheduler.compile import compile_plan
from tests.budget import examples
from tests.scheduler.strategies import PLENTY, cases, cluster, exact, graph_of

RUN = "runs/demo"


def declared() -> Graph:
    r"""A policy, a critic and a reference; an evaluation beside.

    prompts -> actor.rollout -> reward -----\
                             -> ref.log_probs -> advantage -> actor.update
                             -> critic.values -/     \------> critic.update
    """

    def declare() -> None:
        adam = rf.AdamW(lr=1e-3)
        actor = rf.Model("actor", "models/tiny", optimizer=adam)
        critic = rf.Model("critic", "models/tiny", head="value", optimizer=adam)
        ref = rf.Model("ref", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        given = ops.log_probs(ref, samples)
        values = ops.values(critic, samples)
        adv = ops.advantage("gae", samples, reward, values, given, kl_coef=0.1)
        ops.update(critic, samples, values, adv, loss=rf.ValueLoss())
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
        held_out = rf.data.arithmetic(digits=2, split="test")
        ops.evaluate(actor, held_out, exact, every=2, max_new_tokens=8, limit=8)

    return graph_of(declare)


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_a_rollout_by_itself_has_no_trainer_and_ends_in_a_sink():
    part = cut_graph(declared(), ["actor.rollout"])

    assert ["prompts", "actor.rollout", "actor.rollout.sink"] == names(part.graph)
    assert ["actor"] == [model.name for model in part.graph.models]
    assert part.graph.model("actor").optimizer is None
    made = part.graph.node("actor.rollout").op.outputs
    assert len(made) == len(part.graph.node("actor.rollout.sink").inputs)
    assert ("unused model", "model ref is not loaded: no node of this part uses it") in part.notes
    stays = "actor stays as it is loaded: actor.update is left out"
    assert ("part", stays) in part.notes


def test_training_by_itself_reads_rows_from_a_record_and_has_no_rollout():
    read = [ReadEdge(record=RUN, edge="actor.rollout"), ReadEdge(record=RUN, edge="reward")]
    graph = cut_graph(declared(), ["actor.update"], read).graph

    kept = ["actor.rollout", "reward", "ref.log_probs", "critic.values", "advantage"]
    assert [*kept, "actor.update"] == names(graph)
    source = graph.node("actor.rollout")
    assert source.role(Recorded) == Recorded(
        record=RUN, edge="actor.rollout", sampled_by="actor", ahead=True
    )
    assert (8, 4) == (source.counts.rows, source.counts.groups)
    assert None is source.model
    # Rows of one set have one maker; what else is recorded of them joins those that are there.
    assert () == source.inputs
    assert [("actor.rollout", "group")] == [
        (b.source, b.field.name) for b in graph.node("reward").inputs
    ]


def test_the_first_of_several_sources_makes_the_rows_where_their_maker_is_gone():
    read = [ReadEdge(record=RUN, edge=name) for name in ("reward", "ref.log_probs")]

    @rf.op(per="row")
    def least(reward: rf.Row[float], ref_log_probs: rf.Token[float]) -> rf.Row[float]:
        return reward

    def declare() -> None:
        model = rf.Model("ref", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(model, prompts, n=2, max_new_tokens=8)
        given = ops.log_probs(model, samples)
        ops.metrics(least(ops.reward(exact, samples), given))

    graph = cut_graph(graph_of(declare), [], read).graph
    assert ["ref.log_probs", "reward", "least", "metrics"] == names(graph)
    assert {"ref.log_probs"} == {node.rows_of for node in graph.nodes}
    assert ("ref.log_probs",) == graph.node("reward").sources


def test_all_is_left_of_a_graph_of_which_nothing_is_asked():
    graph = declared()
    assert graph is taken_part(graph, (), ()).graph


@pytest.mark.parametrize(
    ("only", "sources", "code", "said"),
    [
        (["actor.rolout"], [], "E330", "actor.rollout"),
        ([], [f"{RUN}:rewards"], "E330", "reward"),
        ([], [f"{RUN}:actor.update"], "E332", "makes no rows"),
        ([], [f"{RUN}:reward", "b:reward"], "E332", "already"),
        (["actor.rollout"], [f"{RUN}:reward"], "E332", "nothing that stays reads reward"),
        ([], ["actor.rollout"], "E333", "RUN:NODE"),
    ],
)
def test_what_is_no_part_is_said(only, sources, code, said):
    with pytest.raises(UsageError) as refused:
        taken_part(declared(), only, sources)
    assert code == refused.value.findings[0].code
    assert said in refused.value.render()


@settings(max_examples=examples(6), phases=[Phase.generate])
@given(case=cases(), data=st.data())
def test_a_part_of_a_graph_has_a_plan_wherever_the_whole_has_one(case, data):
    graph = case.graph
    devices = cluster("cpu", case.placement.num_devices(), PLENTY)
    try:
        compile_plan(graph, case.placement, devices, backend="ray")
    except PlanError:
        return
    making = [node.name for node in graph.nodes if node.op.outputs]
    only = data.draw(st.lists(st.sampled_from(names(graph)), max_size=2, unique=True))
    read = data.draw(st.lists(st.sampled_from(making), max_size=2, unique=True))
    try:
        part = cut_graph(graph, only, [ReadEdge(record=RUN, edge=name) for name in read]).graph
    except UsageError:
        assert needless(graph, only, read)
        return
    assert not needless(graph, only, read)
    holds_what_was_asked(graph, part, only, read)
    placement = part_placement(graph, part, case.placement)
    assert set(placement.pools) <= set(case.placement.pools)
    plan = compile_plan(part, placement, devices, backend="ray").plan
    assert {instance.model for instance in plan.instances} <= {m.name for m in part.models}


def needless(graph, only, read):
    """The edges of `read` that no path leads from to what stays, but through another of them.

    An average of weights stays with the updates that make them.
    """
    roots = set(only) or {node.name for node in graph.nodes if node.op.effect != "pure"}
    reached, waiting = set(), list(roots)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            node = graph.node(name)
            waiting += [] if name in read else node.sources
            waiting += [update.name for update in graph.updates(node.averages or "")]
    return set(read) - reached


def holds_what_was_asked(graph, part, only, read):
    """Named nodes are there, all that they read is there, and nothing else is.

    What an average is taken of is there too: the updates that make those weights.
    """
    assert set(only) <= set(names(part))
    for node in part.nodes:
        assert set(node.sources) <= set(names(part))
    roots = set(only) or {node.name for node in graph.nodes if node.op.effect != "pure"}
    sinks = {node.name for node in part.nodes if node.op.name == "sink"}
    used = {source for node in part.nodes for source in node.sources}
    averaged = {update.name for node in part.nodes for update in graph.updates(node.averages or "")}
    assert set(names(part)) - used <= roots | sinks | averaged
    assert {name for name in read if part.has_node(name)} == set(read)
    for model in part.models:
        assert (model.optimizer is not None) == bool(part.updates(model.name))
