"""Loops in pictures: one trip stands for all, and what leads back to the next is told apart."""

from __future__ import annotations

import json

import networkx as nx
import pytest

from rlflow.report.charts.look import Document, edge_fields
from rlflow.report.diagrams.fold import NEXT_TRIP, folded_graph, folded_plan
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices import cluster
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.looping import PLACEMENTS as KNOWN
from tests.scheduler.looping import dapo

PLACEMENTS = sorted(KNOWN.keys() - {"apart"})


def unrolled(placement: str) -> tuple[Document, Document]:
    """The plan of three trips and the graph that it runs, as a run's directory has them."""
    where = KNOWN[placement]
    devices = cluster.cpu_cluster(where.num_devices(), threads=1, memory=4e9)
    plan = compile_plan(dapo(at_most=3, every=2), where, devices).plan
    return json.loads(json.dumps(plan.to_json())), json.loads(json.dumps(plan.graph.to_json()))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_trip_stands_for_all(placement):
    plan, graph = unrolled(placement)
    assert any("#3" in node["name"] for node in graph["nodes"])
    folded, small = folded_graph(graph), folded_plan(plan)
    assert not [node["name"] for node in folded["nodes"] if "#" in node["name"]]
    assert {edge["kind"] for edge in folded["edges"]} >= {"data", "weights"}
    for edge in folded["edges"]:
        assert edge["kind"] != "data" or edge_fields(folded)[edge["source"], edge["target"]]
    rollouts = [a for a in small["actions"] if a["id"].startswith("actor.rollout")]
    assert [3] == [action["trips"] for action in rollouts]
    assert rollouts[0]["number"] == 1 + plan["actions"].index(
        next(a for a in plan["actions"] if a["id"] == "actor.rollout")
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_is_left_of_a_plan_has_no_cycle_within_an_iteration(placement):
    small = folded_plan(unrolled(placement)[0])
    names = {action["id"] for action in small["actions"]}
    waits = [(dep, action["id"]) for action in small["actions"] for dep in action["after"]]
    assert names >= {dep["action"] for dep, _ in waits}
    again = [(dep["action"], name) for dep, name in waits if dep["kind"] == NEXT_TRIP]
    assert again
    now = [(d["action"], n) for d, n in waits if not d["distance"] and d["kind"] != NEXT_TRIP]
    assert nx.is_directed_acyclic_graph(nx.DiGraph(now))


def test_a_plan_without_loops_is_numbered_and_else_the_same(split: Plan):
    plan = split.to_json()
    for place, action in enumerate(folded_plan(plan)["actions"]):
        given = plan["actions"][place]
        assert {**given, "number": place + 1, "trips": 1} == action
