"""Charts of spans: lanes, ticks, colours; and which iterations are measured."""

from __future__ import annotations

import pytest

from rlflow.report.charts.gantt import lanes_of, paint_of, tick_label, tick_spacing
from rlflow.report.charts.look import ACTION_STYLES, graph_colours
from rlflow.report.runfiles import iteration_seconds, median_iteration
from rlflow.runtime.record.spans import Span
from rlflow.scheduler.plan.plan import Plan


def span(action: str, start: float, end: float, **more) -> Span:
    fields = {
        "node": action, "kind": "run", "iteration": 0, "chunk": 0, "pool": "all", "devices": (0,),
        "predicted": None, "bytes": None, "process": "main", "ok": True,
    }  # fmt: skip
    return Span(action=action, start=start, end=end, **{**fields, **more})


def test_overlapping_spans_get_lanes_of_their_own():
    a, b, c = span("a", 0, 2), span("b", 1, 3), span("c", 2, 4)
    assert [[a, c], [b]] == lanes_of([c, b, a])


@pytest.mark.parametrize(
    ("seconds", "spacing"), [(8.0, 1.0), (8.1, 2.0), (0.0035, 0.0005), (1200.0, 200.0)]
)
def test_ticks_are_round_and_few(seconds: float, spacing: float):
    assert spacing == pytest.approx(tick_spacing(seconds))


def test_ticks_have_units():
    assert ["0", "5 us", "20 ms", "1.5 s"] == [tick_label(s) for s in (0, 5e-6, 0.02, 1.5)]


def test_bars_have_the_colour_of_their_model_or_kind(split: Plan):
    graph = split.graph.to_json()
    assert graph_colours(graph)["critic"] == paint_of(span("critic.update", 0, 1), graph).line
    moved = span("reshard:a->b", 0, 1, kind="reshard")
    assert ACTION_STYLES["reshard"].fill == paint_of(moved, graph).fill


def test_the_median_iteration_is_that_of_median_length():
    spans = [span("a", i * 10, i * 10 + length, iteration=i) for i, length in enumerate((5, 1, 3))]
    assert 2 == median_iteration(spans)


def test_an_iteration_in_which_something_failed_is_not_measured():
    spans = [span("a", 0, 1), span("a", 1, 9, iteration=1, ok=False)]
    assert 0 == median_iteration(spans)
    assert 1 == iteration_seconds(spans)


def test_what_the_host_does_ahead_of_time_stretches_no_iteration():
    ahead = span("prompts", 0, 1, iteration=9, devices=(-1,))
    near = span("reward", 9.5, 10, iteration=9, devices=(-1,))
    spans = [ahead, near, span("update", 10, 12, iteration=9)]
    assert 2 == iteration_seconds(spans)


def test_seconds_an_iteration_are_those_between_their_ends():
    spans = [span("a", i, i + 5, iteration=i) for i in range(9)]
    assert 1 == iteration_seconds(spans)
