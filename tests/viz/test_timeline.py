"""The timeline of a run: what let each span start, gaps with what they waited for, rows, memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlflow.report.interactive import timeline as module
from rlflow.report.interactive.timeline import OUTSIDE, timeline
from rlflow.report.runfiles import read_run_files
from rlflow.report.waiting.causes import released_by
from rlflow.report.waiting.gaps import device_groups_of
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.simulate.blame import waited_for
from rlflow.scheduler.simulate.simulate import play_plan
from tests.viz.test_gantt import span


def planned(*actions: tuple) -> dict:
    """A plan document of (id, devices, [(waits for, distance)]) and what more there is to say."""
    found = [
        {
            "id": name, "kind": "run", "ahead": 0, "devices": devices,
            "after": [{"action": n, "distance": d, "kind": "data"} for n, d in after], **more,
        }
        for name, devices, after, more in actions
    ]  # fmt: skip
    return {"actions": found, "pools": {}, "budgets": {}, "peaks": {}}


def test_a_span_is_released_by_the_last_of_what_it_waits_for():
    plan = planned(
        ("roll", (1,), [("train", 1)], {}),
        ("score", (-1,), [("roll", 0)], {}),
        ("train", (0,), [("roll", 0), ("score", 0)], {}),
    )
    spans = [
        span("roll", 0, 4, devices=(1,)),
        span("score", 4, 5, devices=(-1,)),
        span("train", 5, 9),
        span("roll", 9, 13, devices=(1,), iteration=1),
        span("score", 13, 14, devices=(-1,), iteration=1),
    ]
    assert [None, 0, 1, 2, 3] == released_by(spans, plan)


def test_without_a_plan_a_device_is_all_that_is_waited_for():
    spans = [span("a", 0, 1), span("b", 1, 2, devices=(1,)), span("c", 2, 3)]
    assert [None, None, 0] == released_by(spans, None)


def test_what_was_not_due_hands_on_what_it_would_have_waited_for():
    plan = planned(
        ("train", (0,), [], {}),
        ("eval", (0,), [("train", 0)], {}),
        ("roll", (1,), [("eval", 0)], {}),
    )
    spans = [span("train", 0, 2), span("roll", 2, 3, devices=(1,))]
    assert [None, 0] == released_by(spans, plan)


def test_a_distance_is_of_iterations_where_actions_run_ahead():
    plan = planned(
        ("train", (0,), [("roll", 1)], {}),
        ("roll", (1,), [], {"ahead": 1}),
    )
    spans = [span("roll", 0, 2, devices=(1,)), span("train", 3, 4)]
    assert [None, 0] == released_by(spans, plan)


def test_what_waits_is_followed_back_to_the_start_of_the_gap():
    spans = [span("a", 0, 2), span("b", 3, 6), span("c", 6, 7), span("d", 8, 9)]
    told = [*waited_for(spans, [None, 0, 1, 2], 3, 1)]
    assert [(None, 7, 8), (2, 6, 7), (1, 3, 6), (None, 2, 3), (0, 1, 2)] == told
    assert 7 == sum(end - start for _, start, end in told)
    assert [] == [*waited_for(spans, [None, 0, 1, 2], 3, 8)]


def test_gaps_of_a_run_as_played_have_the_causes_that_the_simulation_tells(split: Plan):
    """A run that takes exactly what was simulated is told the same causes."""
    played = play_plan(split)
    spans = [
        span(p.action.id, p.start, p.end, iteration=p.iteration, devices=p.action.devices)
        for p in played.spans
    ]
    order = sorted(range(len(spans)), key=lambda n: (spans[n].start, spans[n].end))
    ordered = [spans[n] for n in order]
    plan = json.loads(json.dumps(split.to_json()))
    found = released_by(ordered, plan)
    real = {at: order.index(p.released) for at, n in enumerate(order)
            if (p := played.spans[n]).released is not None}  # fmt: skip
    ends = [(ordered[found[at]].end, ordered[by].end) for at, by in real.items()
            if found[at] is not None]  # fmt: skip
    assert len(ends) > 0.9 * len(real)
    assert all(a == pytest.approx(b) for a, b in ends)


def test_a_gap_says_how_long_it_waited_for_whom(run_dir: Path, split: Plan):
    """Actions take 10 ms each, one after the other; then nothing until the next second."""
    found = timeline(read_run_files(run_dir))
    rows = [row["label"] for row in found["rows"]]
    assert {"train[0]", "gen[1]", "host"} == set(rows)
    count = len(split.actions)
    for row, gaps in zip(found["rows"], found["gaps"], strict=True):
        if row["host"]:
            assert [] == gaps
            continue
        longest = max(gaps, key=lambda gap: gap[1] - gap[0])
        assert sum(micro for _, micro in longest[3]) == pytest.approx(
            longest[1] - longest[0], abs=9
        )
        causes = {cause: sum(m for c, m in longest[3] if c == cause) for cause, _ in longest[3]}
        assert 1_000_000 - 10_000 * count == pytest.approx(causes[OUTSIDE], abs=20_000)


def test_devices_that_ran_the_same_are_one_row():
    spans = [span("a", 0, 1, devices=(0, 1, 2)), span("b", 1, 2, devices=(3,))]
    groups = device_groups_of(spans, {"pools": {"train": [0, 1, 2], "gen": [3]}})
    assert ["train[0:3]", "gen[3]"] == [group.label for group in groups]


def test_memory_of_a_span_is_the_most_of_its_devices(run_dir: Path, split: Plan):
    name = next(a.id for a in split.actions if a.kind == "run" and a.devices == (0,))
    line = {"action": name, "iteration": 2, "device": 0, "seconds": 0.01}
    lines = [line | {"peak": 7e6}, line | {"device": 1, "peak": 9e6}]
    (run_dir / "devices.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    found = timeline(read_run_files(run_dir))
    held = {
        (found["names"][a], i): h
        for a, i, h in zip(
            *(found["spans"][k] for k in ("action", "iteration", "held")), strict=True
        )
    }
    assert 9_000_000 == held.pop((name, 2))
    assert {None} == set(held.values())
    row = next(row for row in found["rows"] if row["label"] == "train[0]")
    assert (split.peaks[0], split.budgets[0]) == (row["peak"], row["budget"])


def test_a_very_long_run_shows_every_so_many_iterations_and_says_so(run_dir: Path, monkeypatch):
    files = read_run_files(run_dir)
    monkeypatch.setattr(module, "MOST_SPANS", -(-len(files.spans) // 3))
    found = timeline(files)
    assert 4 == found["left_out"]
    assert {0, 3} == set(found["spans"]["iteration"])
    assert not any(gap[1] - gap[0] > 500_000 for gaps in found["gaps"] for gap in gaps)


def test_a_failed_span_is_told(split: Plan):
    spans: list[Span] = [span("a", 0, 1), span("a", 1, 2, iteration=1, ok=False)]
    groups = device_groups_of(spans, None)
    assert [1] == module._columns(spans, groups, ["a"], [None, 0])["failed"]
