"""Mermaid: every node once, labels that cannot end early."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rlflow.report.diagrams.mermaid import graph_mermaid, plan_mermaid, quoted
from rlflow.report.diagrams.plan_dot import plan_digraph
from rlflow.scheduler.plan.plan import Plan
from tests.viz.examples import ppo, small_graph

NODE = re.compile(r'^ +(n\d+|a\d+)(\[\(|\(|\[)"([^"]*)"(\)\]|\)|\])$')
EDGE = re.compile(
    r'^  [na]\d+ (-->|-\.->)(\|"[^"|\[\](){}<>]*(<br/>[^"|\[\](){}<>]*)*"\|)? [na]\d+$'
)
OTHER = re.compile(
    r'^(flowchart (TB|LR)|  subgraph p\d+\["[^"]*"\]|  end|  style [na]\d+ [^\[\]"]+)$'
)


@pytest.mark.parametrize("direction", ["TB", "LR"])
def test_every_line_is_a_node_an_edge_or_a_style(direction):
    lines = graph_mermaid(small_graph().to_json(), direction).splitlines()
    assert f"flowchart {direction}" == lines[0]
    assert [] == [x for x in lines if not (NODE.match(x) or EDGE.match(x) or OTHER.match(x))]


def test_every_node_of_a_graph_is_there_once():
    graph = ppo.trace()
    found = [
        m for line in graph_mermaid(graph.to_json(), "TB").splitlines() if (m := NODE.match(line))
    ]
    names = [m.group(3).split("<br/>")[0] for m in found]
    assert [node.name for node in graph.nodes] == names
    assert len(names) == len({m.group(1) for m in found})


def test_brackets_quotes_and_tags_are_written_as_codes():
    text = graph_mermaid(small_graph().to_json(), "TB")
    assert "tidy#60;b#62;#91;x#93;" in text
    assert "tidy<b>" not in text


@pytest.mark.parametrize("character", list('"[]{}<>|#;&`\\'))
def test_characters_that_mermaid_reads_never_stay(character):
    assert f"#{ord(character)};" == quoted(character)


def test_every_action_of_a_plan_is_there_once_and_inserted_ones_say_why(squeezed: Plan):
    text = plan_mermaid(squeezed.to_json(), squeezed.graph.to_json(), "TB")
    lines = text.splitlines()
    assert [] == [x for x in lines if not (NODE.match(x) or EDGE.match(x) or OTHER.match(x))]
    found = [m for line in lines if (m := NODE.match(line))]
    assert sorted(f"a{n}" for n in range(1, len(squeezed.actions) + 1)) == sorted(
        m.group(1) for m in found
    )
    sleeps = [m.group(3) for m in found if " sleep " in m.group(3)]
    assert sum(a.kind == "sleep" for a in squeezed.actions) == len(sleeps)
    assert all("makes room for" in label for label in sleeps)


@pytest.mark.parametrize("draw", [plan_mermaid, plan_digraph])
def test_what_runs_ahead_says_so_in_a_picture(squeezed: Plan, draw):
    name = squeezed.actions[0].id
    actions = (replace(squeezed.actions[0], ahead=2), *squeezed.actions[1:])
    plans = (squeezed, replace(squeezed, actions=actions))
    before, after = (str(draw(p.to_json(), squeezed.graph.to_json(), "TB")) for p in plans)
    assert name in after
    assert ("2 ahead" in before, "2 ahead" in after) == (False, True)
