"""Whole runs of loops within loops: what they compute by hand.

turns:  rollout -> [ restarted -> [ tried -> good ] -> spoken -> over ] -> update
drawn:  [ prompts -> rollout -> observe -> [ act -> observe ] -> ended -> informative ] -> update
twice:  [ [ prompts -> rollout -> reward -> informative ] -> best ] -> update
"""

from __future__ import annotations

import json
import shutil
from collections import Counter

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.report.diagrams.fold import folded_graph, folded_plan
from rlflow.runtime.record.spans import read_spans
from tests.runtime.test_loop_runs import leaves_nothing
from tests.runtime.whole_runs import DRAWN, TURNS, TWICE, numbers

pytestmark = pytest.mark.torch

ITERATIONS = 4


def runs_of(run, node):
    """The copies of a node that ran in every iteration, by the spans."""
    found = {}
    for span in read_spans(run / "spans"):
        if span.kind == "run" and span.node.partition("#")[0] == node:
            found.setdefault(span.iteration, set()).add(span.node)
    return [found.get(iteration, set()) for iteration in range(ITERATIONS)]


def by_hand(turns, tries):
    """What 16 rows have said and how often they have turned, and how many tries each turn took."""
    rows = [{"turn": 0.0, "said": float(s % 4), "wanted": 1.0 + s % 4} for s in range(16)]
    taken = []
    for _ in range(turns):
        drafts, tried = [0.0] * len(rows), 0
        aims = [(row["turn"] * row["wanted"]) % 4 for row in rows]
        for _ in range(tries):
            tried += 1
            drafts = [d + (d < aim) for d, aim in zip(drafts, aims, strict=True)]
            if all(d >= aim for d, aim in zip(drafts, aims, strict=True)):
                break
        taken.append(tried)
        for row, draft in zip(rows, drafts, strict=True):
            row["said"] = 3 * row["said"] + draft * (row["turn"] + 1)
            row["turn"] += row["turn"] < row["wanted"]
        if all(row["turn"] >= row["wanted"] for row in rows):
            break
    return rows, taken


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["together", "apart"])
@pytest.mark.parametrize(("turns", "tries"), [(5, 4), (5, 1), (2, 4)])
def test_a_loop_in_a_loop_computes_what_it_does_in_python(train, placement, turns, tries):
    run = train(TURNS, placement, "--set", f"turns={turns}", "--set", f"tries={tries}")
    rows, taken = by_hand(turns, tries)
    said = [row["said"] for row in rows]
    for line in numbers(run):
        assert len(taken) == line["turns/trips"]
        assert sum(taken) / len(taken) == line["tries/trips"]
        assert (max(said), min(said)) == (line["seen/said_max"], line["seen/said_min"])
        assert sum(said) / 16 == line["seen/said_mean"]
        assert sum(row["turn"] for row in rows) / 16 == line["seen/turn_mean"]
    expected = {
        "tried" if (i, j) == (1, 1) else f"tried#{i}.{j}"
        for i, tried in enumerate(taken, 1)
        for j in range(1, tried + 1)
    }
    assert [expected] * ITERATIONS == runs_of(run, "tried")


def test_the_numbers_by_hand_need_both_loops():
    assert [1, 3, 2, 1] == by_hand(5, 4)[1]
    assert [1, 1, 1, 1] == by_hand(5, 1)[1]
    assert len({tuple(r["said"] for r in by_hand(*at)[0]) for at in ((5, 4), (5, 1), (2, 4))}) == 3


@pytest.mark.slow
def test_episodes_are_drawn_until_enough_groups_differ(train):
    """Trips of both loops differ from iteration to iteration, and are those that ran."""
    run = train(DRAWN, "together")
    lines, drawn, acted = numbers(run), runs_of(run, "prompts"), runs_of(run, "episodes.act")
    assert [len(copies) for copies in drawn] == [line["enough/trips"] for line in lines]
    for line, outer, inner in zip(lines, drawn, acted, strict=True):
        per = Counter((name.partition("#")[2] or "1.1").partition(".")[0] for name in inner)
        assert sum(per.values()) / len(outer) == line["episodes.turns/trips"]
        assert {(name.partition("#")[2] or "1") for name in outer} == set(per)
    assert 2 <= len({len(copies) for copies in acted})
    assert 2 <= max(len(copies) for copies in drawn)


@pytest.mark.slow
@pytest.mark.rows(1)
@pytest.mark.parametrize("what", [TURNS, DRAWN, TWICE], ids=["turns", "drawn", "twice"])
def test_what_did_not_run_leaves_nothing_behind(what):
    leaves_nothing(what, "apart", "turns/trips" if what is TURNS else "enough/trips")


@pytest.mark.slow
@pytest.mark.parametrize("what", [TURNS, DRAWN, TWICE], ids=["turns", "drawn", "twice"])
def test_a_report_and_pictures_show_one_trip_of_each_loop(rlflow, train, what, tmp_path):
    run = shutil.copytree(train(what, "apart"), tmp_path / "run")
    report = rlflow("report", run)
    assert 0 == report.code, report.err
    page = (run / "report.html").read_text()
    assert page.count("<svg") == len(("plan", "graph"))
    assert "in each trip of" in page
    for level, form in (("graph", "dot"), ("plan", "dot"), ("plan", "mermaid")):
        words = ("--placement", "apart", "--level", level, "--format", form, "-o", "-")
        drawn = rlflow("viz", what.file, *words)
        assert 0 == drawn.code, drawn.err
        assert "#1.2" not in drawn.out
        assert "#2.1" not in drawn.out


def test_folded_loops_go_back_within_their_own_trip():
    target = Target(pipeline=TURNS.file, placement="apart", devices="cpu:2", threads=1)
    plan = compile_target(target).compiled.plan
    graph = folded_graph(json.loads(json.dumps(plan.graph.to_json())))
    small = folded_plan(json.loads(json.dumps(plan.to_json())))
    assert not [node["name"] for node in graph["nodes"] if "#" in node["name"]]
    back = {(e["source"], e["target"]) for e in graph["edges"] if e["kind"] == "trip"}
    assert {("next_turn", "restarted"), ("next_turn", "tried")} <= back
    assert not {("tries", "spoken"), ("restarted", "tried"), ("tried", "good")} & back
    trips = {a["id"]: a["trips"] for a in small["actions"]}
    assert (20, 5, 1) == (trips["tried"], trips["spoken"], trips["begun"])
