"""DOT of graphs and plans: a golden, and what must be told apart."""

from __future__ import annotations

import colorsys
import re
from dataclasses import asdict
from pathlib import Path

import pygraphviz
import pytest

from rlflow.graph.cut.names import ReadEdge
from rlflow.graph.cut.part import cut_graph
from rlflow.report.charts.look import (
    ACTION_STYLES,
    MODEL_TINT,
    NODE_STYLES,
    PALETTE,
    SOFT_INK,
    graph_colours,
    kind_of,
    mode_text,
    model_colours,
    tint,
)
from rlflow.report.diagrams.graph_dot import graph_digraph
from rlflow.report.diagrams.mermaid import graph_mermaid, plan_mermaid
from rlflow.report.diagrams.plan_dot import DEVICE_LINE, dependencies, plan_digraph
from rlflow.report.tables import document_action_what
from rlflow.scheduler.plan.plan import Action, Plan, Reason
from rlflow.scheduler.plan.text import action_kind
from tests.viz.examples import ppo, ppo_plan, small_graph

GOLDEN = Path(__file__).parent / "golden" / "small.dot"


def parsed(source: str) -> pygraphviz.AGraph:
    return pygraphviz.AGraph(string=source)


def test_dot_of_the_small_graph_is_golden():
    assert GOLDEN.read_text() == graph_digraph(small_graph().to_json(), "TB").source


def test_the_ends_of_a_cut_are_drawn_as_data_and_no_op_as_the_users():
    read = [ReadEdge(record="runs/a", edge="actor.rollout")]
    drawn = cut_graph(ppo.trace(), ["advantage"], read).graph.to_json()
    kinds = {node["name"]: kind_of(node) for node in drawn["nodes"]}

    assert {"data"} == {kinds["actor.rollout"], kinds["advantage.sink"]}
    assert "user" not in kinds.values()


def test_every_node_is_drawn_once():
    graph = ppo.trace()
    drawn = parsed(graph_digraph(graph.to_json(), "LR").source)
    assert sorted(node.name for node in graph.nodes) == sorted(drawn.nodes())


def test_models_have_colours_of_their_own_by_declaration():
    colours = graph_colours(ppo.trace().to_json())
    assert dict(zip(("actor", "ref", "critic"), PALETTE, strict=False)) == colours


def test_colours_start_again_after_the_last():
    names = [f"m{index}" for index in range(len(PALETTE) + 1)]
    assert PALETTE[0] == model_colours(names)[names[-1]]


def lines_between(source: str, tail: str, head: str) -> list[str]:
    """The lines of DOT that draw edges from `tail` to `head`, in the order of the layout."""
    start = re.compile(rf'\s*"?{re.escape(tail)}"? -> "?{re.escape(head)}"? \[')
    return [line for line in source.splitlines() if start.match(line)]


def test_data_edges_are_solid_and_say_their_fields():
    source = graph_digraph(small_graph().to_json(), "TB").source
    (line,) = lines_between(source, "prompts", "actor.rollout")
    assert "style=" not in line
    assert ">prompt<" in line


def test_weights_are_dashed_in_the_colour_of_their_model_with_their_distance():
    source = graph_digraph(small_graph().to_json(), "TB").source
    (line,) = [x for x in lines_between(source, "eval", "actor.update") if "dashed" in x]
    assert f'color="{PALETTE[0]}"' in line
    assert ">@1<" in line
    assert "dir=back" in line, "laid out from the reader to the writer, drawn the other way"


def test_order_is_dotted_and_left_out_beside_a_data_edge():
    source = graph_digraph(small_graph().to_json(), "TB").source
    assert 1 == sum("dotted" in x for x in lines_between(source, "eval", "actor.update"))
    assert 0 == sum("dotted" in x for x in lines_between(source, "actor.rollout", "actor.update"))


def test_a_pool_is_a_cluster_and_holds_its_actions(split: Plan):
    drawn = parsed(plan_digraph(split.to_json(), split.graph.to_json(), "TB").source)
    body = drawn.get_subgraph("cluster_plan")
    pools = {c.name: set(c.nodes()) for c in body.subgraphs()}
    assert {"actor.rollout", "ref.log_probs"} == pools["cluster_pool_gen"]
    assert {"critic.values", "actor.update", "critic.update"} == pools["cluster_pool_train"]
    assert {"prompts", "reward", "advantage"} == pools["cluster_pool_host"]
    assert "reshard_actor@train->actor@gen" in set(drawn.nodes()) - set().union(*pools.values())


def test_inserted_actions_look_like_their_kind_and_say_why(squeezed: Plan):
    drawn = parsed(plan_digraph(squeezed.to_json(), squeezed.graph.to_json(), "TB").source)
    moves = [a for a in squeezed.actions if a.kind in ("sleep", "wake")]
    assert moves
    for action in moves:
        node = drawn.get_node(action.id.replace(":", "_"))
        assert ACTION_STYLES[action.kind].fill == node.attr["fillcolor"]
        assert action.reason.text.split()[0] in node.attr["label"]


def test_gpu_plan_draws_transfers(home: Path):
    plan = ppo_plan("gpus", home, "h100:4")
    drawn = parsed(plan_digraph(plan.to_json(), plan.graph.to_json(), "TB").source)
    fills = [drawn.get_node(node).attr["fillcolor"] for node in drawn.nodes()]
    assert sum(a.kind == "transfer" for a in plan.actions) == fills.count(
        ACTION_STYLES["transfer"].fill
    )


def test_a_reshard_names_everything_that_it_fills(split: Plan):
    document, graph = split.to_json(), split.graph.to_json()
    (reshard,) = [action for action in document["actions"] if action["kind"] == "reshard"]
    reshard["targets"] = ["actor@gen", "actor@look"]
    drawn = parsed(plan_digraph(document, graph, "TB").source)
    label = str(drawn.get_node(reshard["id"].replace(":", "_")).attr["label"])
    for text in (label, plan_mermaid(document, graph, "TB"), document_action_what(reshard)):
        assert "actor@gen" in text
        assert "actor@look" in text


def test_edges_left_out_are_implied_by_those_that_are_drawn(squeezed: Plan):
    document = squeezed.to_json()
    drawn = list(dependencies(document))
    reach: dict[str, set[str]] = {}
    for action in squeezed.actions:
        direct = {before for before, after, _, d in drawn if after == action.id and d == 0}
        reach[action.id] = direct.union(*(reach[name] for name in direct))
    for action in squeezed.actions:
        for dep in action.after:
            if dep.distance == 0:
                assert dep.action in reach[action.id]
            elif dep.kind in ("data", "weights", "device"):
                assert (dep.action, action.id, dep.kind, dep.distance) in drawn


def test_device_turns_are_light_and_later_iterations_dashed(split: Plan):
    source = plan_digraph(split.to_json(), split.graph.to_json(), "TB").source
    (turn,) = lines_between(source, "reshard_actor@train->actor@gen", "critic.update")
    assert DEVICE_LINE in turn
    (weights,) = lines_between(source, "actor.rollout", "reshard_actor@train->actor@gen")
    assert "dashed" in weights
    assert ">@1<" in weights


def test_notes_and_peaks_are_in_the_picture(split: Plan):
    source = plan_digraph(split.to_json(), split.graph.to_json(), "TB").source
    assert split.notes[0].rule in source
    assert "pool gen: device 1, peak memory" in source
    assert "placement split" in source


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", PALETTE)
def test_a_model_stands_out_on_white_and_its_text_on_its_tint(colour):
    fill = tint(colour, MODEL_TINT)
    assert contrast(colour, "#FFFFFF") >= 4.5
    assert contrast(colour, fill) >= 3
    assert contrast(SOFT_INK, fill) >= 4.5


def hue(colour: str) -> float:
    return 360 * colorsys.rgb_to_hls(*(int(colour[p : p + 2], 16) / 255 for p in (1, 3, 5)))[0]


def test_no_fill_of_a_kind_has_a_hue_that_a_model_could_have():
    for style in NODE_STYLES.values():
        channels = [int(style.fill[p : p + 2], 16) for p in (1, 3, 5)]
        assert max(channels) - min(channels) <= 8, style
    inserted = hue(ACTION_STYLES["reshard"].fill)
    assert all(min(abs(hue(c) - inserted), 360 - abs(hue(c) - inserted)) > 12 for c in PALETTE)


def test_a_node_that_will_be_dropped_says_so():
    why = {"reward": "nobody reads what it makes"}
    source = graph_digraph(small_graph().to_json(), "TB", why).source
    (line,) = [x for x in source.splitlines() if x.strip().startswith("reward [")]
    assert "will be dropped" in line
    assert "dashed" in line
    assert "will be dropped" not in graph_digraph(small_graph().to_json(), "TB").source
    drawn = graph_mermaid(small_graph().to_json(), "TB", why)
    assert 1 == drawn.count("will be dropped: nobody reads")


@pytest.mark.parametrize(
    ("kind", "mode", "text"),
    [("wake", "discard", " (empty)"), ("sleep", "discard", " (discard)"), ("wake", None, "")],
)
def test_all_forms_call_a_mode_the_same(kind, mode, text):
    why = Reason(rule="x", text="x")
    action = Action(id="x", kind=kind, mode=mode, reason=why, devices=(0,), pool="all")
    assert kind + text == action_kind(action) == kind + mode_text(asdict(action))
