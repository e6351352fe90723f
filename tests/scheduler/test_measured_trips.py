"""Trips through a loop: what runs took is what the next plan counts with, unless the user said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.graph.graph import Graph
from rlflow.scheduler import observed
from rlflow.scheduler.compile import Compiled, compile_plan
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import Cluster, cpu_cluster
from rlflow.scheduler.devices.measured import (
    NOTHING,
    MeasuredCosts,
    Record,
    Sample,
    Setting,
    add_to_file,
    load_measured,
)
from rlflow.scheduler.models.shapes import model_shape
from tests.scheduler.examples import COLOCATE, SPLIT
from tests.scheduler.looping import counting, dapo, fitting
from tests.scheduler.test_measured_runs import played

CLUSTER = cpu_cluster(2, threads=1, memory=4e9)


def planned(graph: Graph, cluster: Cluster = CLUSTER) -> Compiled:
    return compile_plan(graph, fitting(graph, SPLIT), cluster)


def sample(trips: float, count: int = 5, origin: str = "run") -> Sample:
    return Sample(origin, count, 0.0, 0.0, trips=trips)  # type: ignore[arg-type]


def knowing(graph: Graph, *samples: Sample) -> Cluster:
    """A cluster that knows trips through the first loop of a graph, and nothing else."""
    end = next(node for node in graph.nodes if node.ends_loop)
    found = NOTHING
    for each in samples:
        found = found.adding([(keys.trips(graph, end), Setting(graph.name, 2, 0), each)])
    return replace(CLUSTER, measured=found)


def note(compiled: Compiled) -> str:
    (text,) = (n.text for n in compiled.plan.notes if n.rule == "loop")
    return text


def chances(compiled: Compiled, node: str) -> list[float]:
    runs = [a for a in compiled.plan.actions if a.kind == "run" and a.trip is not None]
    return [a.chance for a in runs if str(a.node).partition("#")[0] == node]


def learned(graph: Graph, trips: list[float]) -> MeasuredCosts:
    """What a run whose iterations took so many trips leaves in the file."""
    plan = planned(graph).plan
    shapes = {model.name: model_shape(model) for model in graph.models}
    costs = Costs(graph=plan.graph, cluster=CLUSTER, shapes=shapes)
    end = next(node.name for node in graph.nodes if node.ends_loop)
    figures = [(n, {f"{end}/trips": value, "else/trips": 9.0}) for n, value in enumerate(trips)]
    spans = played(plan, len(trips))
    found = observed.samples(plan, costs, spans, figures, begun=0, origin="run")
    return NOTHING.adding(entry for entry in found if entry[0].startswith("trips"))


def test_a_run_leaves_the_mean_of_its_trips_without_the_first_iteration() -> None:
    (record,) = learned(dapo(at_most=4), [4, 2, 3, 3, 2]).records

    assert (4, 2.5) == (record.samples[0].count, record.trips)


@pytest.mark.parametrize("build", [dapo, counting])
def test_the_next_plan_counts_with_what_the_run_took(build) -> None:
    graph = build(at_most=4)
    known = replace(CLUSTER, measured=learned(graph, [1, 2, 3, 2, 3, 1.25]))
    node = "actor.rollout" if build is dapo else "grown"
    first, second = planned(graph), planned(graph, known)

    assert [1.0, 0.5, 0.0, 0.0] == chances(first, node)
    assert pytest.approx([1.0, 1.0, 0.25, 0.0]) == chances(second, node)
    assert "at most 4 trips, 1.5 assumed;" in note(first)
    assert "at most 4 trips, 2.25 measured in 1 run;" in note(second)


def test_the_graph_keeps_its_hash() -> None:
    graph = dapo(at_most=4)
    first, second = planned(graph), planned(graph, knowing(graph, sample(3.5)))
    again = planned(graph, knowing(graph, sample(3.5)))

    assert first.plan.graph.hash == second.plan.graph.hash
    assert first.plan.hash != second.plan.hash == again.plan.hash


def test_iterations_of_all_runs_count_alike() -> None:
    graph = dapo(at_most=4)
    known = knowing(graph, sample(1.0, 30), sample(4.0, 10), sample(3.0, 20))

    assert pytest.approx(1.0 * 30 / 60 + 4.0 * 10 / 60 + 3.0 * 20 / 60) == (
        known.measured.records[0].trips
    )
    assert "2.17 measured in 3 runs" in note(planned(graph, known))


def test_a_profile_counts_where_there_is_no_run() -> None:
    graph = dapo(at_most=4)
    profile = sample(3.0, origin="profile")

    assert "3 measured in profile" in note(planned(graph, knowing(graph, profile)))
    assert "2 measured in 1 run" in note(planned(graph, knowing(graph, profile, sample(2.0))))


def test_what_the_user_expects_goes_first() -> None:
    graph = dapo(at_most=4, expected=2)
    compiled = planned(graph, knowing(graph, sample(4.0)))

    assert "2 expected" in note(compiled)
    assert [1.0, 1.0, 0.0, 0.0] == chances(compiled, "actor.rollout")


@pytest.mark.parametrize(("measured", "counted"), [(0.5, 1), (9.0, 3), (2.0, 2)])
def test_what_was_measured_is_held_between_one_and_the_most(measured: float, counted: int) -> None:
    graph = dapo(at_most=3)
    compiled = planned(graph, knowing(graph, sample(measured)))

    assert f"{counted} measured" in note(compiled)
    assert [1.0] * counted + [0.0] * (3 - counted) == chances(compiled, "actor.rollout")


@pytest.mark.parametrize(
    "other",
    [
        dapo(at_most=3),
        dapo(at_most=4, again=True),
        dapo(at_most=4, prompts_of="models/tiny"),
        counting(at_most=4),
    ],
    ids=["at most", "until", "model", "loop"],
)
def test_another_loop_is_not_what_was_measured(other: Graph) -> None:
    assert "assumed" in note(planned(dapo(at_most=4), knowing(other, sample(4.0))))


def test_a_loop_is_the_same_under_any_placement_and_staleness() -> None:
    graph = dapo(at_most=4)
    known = knowing(graph, sample(2.5))
    placement = fitting(graph, COLOCATE).model_copy(update={"staleness": 1, "pause_at": 4})
    compiled = compile_plan(graph, placement, replace(known, count=1))

    assert "2.5 measured in 1 run" in note(compiled)


def test_the_key_is_the_same_of_the_declared_and_the_compiled_loop() -> None:
    graph = dapo(at_most=4, unread=True)
    compiled = planned(graph).plan.graph

    assert keys.trips(graph, graph.node("enough")) == (
        keys.trips(compiled, compiled.node("enough"))
    )


def test_trips_are_kept_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    add_to_file(path, [("a", Setting("dapo", 2, 0), sample(2.75))])

    assert 2.75 == load_measured(path).records[0].trips


def test_samples_without_trips_are_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(
        '{"version": 1, "serial": 1, "records": [{"key": "a", "setting": ["g", 1, 0], '
        '"serial": 1, "samples": [["run", 3, 1.0, 0.5, 2.0, 4.0]]}]}'
    )
    found = load_measured(path)

    record = Record("a", Setting("g", 1, 0), 1, (Sample("run", 3, 1.0, 0.5, 2.0, 4.0),))
    assert (record,) == found.records


@pytest.mark.parametrize("trips", ["-1", "NaN", "Infinity", "1, 2, 3"])
def test_trips_that_are_none_damage_the_file(tmp_path: Path, trips: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(
        '{"version": 1, "serial": 1, "records": [{"key": "a", "setting": ["g", 1, 0], '
        f'"serial": 1, "samples": [["run", 3, 1.0, 0.5, 2.0, 4.0, {trips}]]}}]}}'
    )
    found = load_measured(path)

    assert () == found.records
    assert "damaged" in found.problem


def changed(graph: Graph, node: str, **params: object) -> Graph:
    """The graph with some options of a node changed."""
    nodes = tuple(
        replace(n, params=tuple((dict(n.params) | params).items())) if n.name == node else n
        for n in graph.nodes
    )
    return replace(graph, nodes=nodes)


@pytest.mark.parametrize(
    ("node", "params"),
    [("enough", {"batch": 4}), ("enough", {"n": 4}), ("prompts", {"batch": 4})],
)
def test_other_goals_and_other_draws_have_other_trips(node: str, params: dict[str, int]) -> None:
    graph = dapo(at_most=4)
    other = changed(graph, node, **params)
    known = knowing(other, sample(4.0))
    mine, theirs = (keys.trips(g, g.node("enough")) for g in (graph, other))

    assert mine != theirs
    assert known.measured.find(theirs, Setting("dapo", 2, 0)) is not None
    assert known.measured.find(mine, Setting("dapo", 2, 0)) is None
