"""Spans: written, read back on one axis, added up, and shown as a Chrome trace."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import FrozenInstanceError, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.errors import RunDirError, RunError
from rlflow.runtime.record.spans import (
    Span,
    SpanLog,
    began_at,
    covered,
    dropped_spans,
    read_spans,
    summarise,
)

BASE = Span(
    action="run rollout",
    node="rollout",
    kind="run",
    iteration=0,
    chunk=0,
    pool="all",
    devices=(0,),
    start=0.0,
    end=1.0,
    predicted=None,
    bytes=None,
    process="driver",
    ok=True,
)


def span(start: float, end: float, **changes) -> Span:
    return replace(BASE, start=start, end=end, **changes)


def clock_from(first: float):
    """A clock that shows `first`, `first` + 1, ..."""
    ticks = count()
    return lambda: first + next(ticks)


def write(path, spans, *, origin=1000.0, process="driver"):
    with SpanLog(path, process=process, wall=lambda: origin) as log:
        for item in spans:
            log.record(item)


def test_span_is_frozen():
    with pytest.raises(FrozenInstanceError):
        BASE.ok = False


def test_what_was_recorded_is_read(tmp_path):
    spans = [
        span(0.1, 0.30000000000000004, predicted=0.25, bytes=123, ok=False),
        span(1 / 3, 2 / 3, devices=(0, 1), chunk=2, iteration=7),
    ]
    write(tmp_path / "driver.jsonl", spans)
    assert spans == read_spans(tmp_path)


def test_first_line_says_when_the_clock_started(tmp_path):
    write(tmp_path / "driver.jsonl", [BASE], origin=1234.5)
    lines = (tmp_path / "driver.jsonl").read_text().splitlines()
    assert {"origin": 1234.5, "process": "driver"} == json.loads(lines[0])


def test_now_counts_from_the_start(tmp_path):
    with SpanLog(tmp_path / "a.jsonl", process="a", clock=clock_from(50.0)) as log:
        assert (1.0, 2.0) == (log.now(), log.now())


def test_processes_share_one_axis(tmp_path):
    write(tmp_path / "a.jsonl", [span(1.0, 2.0, process="a")], origin=100.0, process="a")
    write(tmp_path / "b.jsonl", [span(0.0, 1.0, process="b")], origin=100.5, process="b")
    assert [("b", 0.5, 1.5), ("a", 1.0, 2.0)] == [
        (item.process, item.start, item.end) for item in read_spans(tmp_path)
    ]


def test_resumed_iteration_supersedes_the_one_that_died(tmp_path):
    path = tmp_path / "driver.jsonl"
    write(path, [span(0, 1, iteration=1), span(1, 9, iteration=2)], origin=100.0)
    write(path, [span(0, 1, iteration=2), span(1, 2, iteration=3)], origin=200.0)
    assert [(1, 0, 1), (2, 100, 101), (3, 101, 102)] == [
        (item.iteration, item.start, item.end) for item in read_spans(tmp_path)
    ]


def test_what_one_run_did_twice_for_an_iteration_is_all_there(tmp_path):
    spans = [span(0, 1, kind="wake"), span(2, 3, kind="wake")]
    write(tmp_path / "driver.jsonl", spans, origin=100.0)
    assert spans == read_spans(tmp_path)
    assert 2.0 == summarise(read_spans(tmp_path)).actions[0].total


@pytest.mark.parametrize("torn", ['{"action": "ru', "{", '{"action": 1}'])
def test_line_torn_by_a_kill_is_left_out_also_after_resuming(tmp_path, torn):
    path = tmp_path / "driver.jsonl"
    write(path, [span(0, 1)], origin=100.0)
    with path.open("a") as file:
        file.write(torn)
    assert [span(0, 1)] == read_spans(tmp_path)
    write(path, [span(0, 1, iteration=1)], origin=102.0)
    assert [span(0, 1), span(2, 3, iteration=1)] == read_spans(tmp_path)


def test_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "driver.jsonl"
    write(path, [span(0, 1), span(1, 2, iteration=1)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "garbage", lines[2]]) + "\n")
    with pytest.raises(RunDirError, match=r"E731.*line 2 of .*driver.jsonl"):
        read_spans(tmp_path)
    path.write_text("\n".join(lines[1:]) + "\n")
    with pytest.raises(RunDirError, match="line 1"):
        read_spans(tmp_path)


def test_no_spans(tmp_path):
    assert [] == read_spans(tmp_path)
    empty = summarise([])
    assert (0.0, 0, (), {}) == (empty.wall, empty.iterations, empty.actions, empty.idle)


def test_threads_do_not_tear_lines(tmp_path):
    log = SpanLog(tmp_path / "driver.jsonl", process="driver")

    def work(chunk: int) -> None:
        for iteration in range(100):
            log.record(span(0, 1, iteration=iteration, chunk=chunk))

    threads = [threading.Thread(target=work, args=(chunk,)) for chunk in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert 400 == len(read_spans(tmp_path))


def test_a_span_is_there_when_record_returns(tmp_path):
    pid = os.fork()
    if pid == 0:
        SpanLog(tmp_path / "driver.jsonl", process="driver").record(BASE)
        os._exit(0)
    os.waitpid(pid, 0)
    assert [BASE] == read_spans(tmp_path)


def test_recording_costs_microseconds(tmp_path):
    with SpanLog(tmp_path / "driver.jsonl", process="driver") as log:
        costs = []
        for iteration in range(300):
            started = time.perf_counter()
            log.record(replace(BASE, iteration=iteration))
            costs.append(time.perf_counter() - started)
    assert sorted(costs)[150] < 200e-6


def test_full_disk_is_said(tmp_path):
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match="E701"):
        SpanLog(tmp_path / "full.jsonl", process="driver")


def test_totals_medians_shares_and_idle():
    """
    device 0   rollout 0..4   update 6..10  |  rollout 10..14   update 16..20
    device 1       ref 4..6                 |      ref 14..16
    """
    spans = []
    for iteration in (0, 1):
        at = 10.0 * iteration
        spans += [
            span(at, at + 4, iteration=iteration, action="rollout", predicted=5.0),
            span(at + 4, at + 6, iteration=iteration, action="ref", devices=(1,), pool="b"),
            span(at + 6, at + 10, iteration=iteration, action="update", ok=iteration == 0),
        ]
    summary = summarise(spans)
    assert (20.0, 2) == (summary.wall, summary.iterations)
    assert [
        ("rollout", 2, 8.0, 4.0, 0.4),
        ("update", 2, 8.0, 4.0, 0.4),
        ("ref", 2, 4.0, 2.0, 0.2),
    ] == [(row.name, row.count, row.total, row.median, row.share) for row in summary.actions]
    assert [5.0, None, None] == [row.predicted for row in summary.actions]
    assert [0, 1, 0] == [row.failed for row in summary.actions]
    assert [("run", 6, 20.0)] == [(row.name, row.count, row.total) for row in summary.kinds]
    assert pytest.approx({0: 0.2, 1: 0.8}) == summary.idle


def test_time_between_dying_and_resuming_is_nobodys():
    summary = summarise([span(0, 1), span(500, 501, iteration=1)])
    assert 2.0 == summary.wall
    assert {0: 0.0} == summary.idle


def test_overlap_on_a_device_is_counted_once():
    summary = summarise([span(0, 4), span(1, 2, action="sleep"), span(3, 6, action="wake")])
    assert {0: 0.0} == summary.idle


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_covered_counts_each_moment_once(pairs):
    moments = {at for start, length in pairs for at in range(start, start + length)}
    assert len(moments) == covered((start, start + length) for start, length in pairs)


def test_of_a_long_run_the_last_spans_are_kept_and_those_before_are_counted(tmp_path):
    path, every = tmp_path / "main.jsonl", [span(i, i + 1, iteration=i) for i in range(100)]
    for part in (every[:60], every[60:]):
        with SpanLog(path, process="main", wall=lambda: 1000.0, room=4000) as log:
            for each in part:
                log.record(each)

    kept = read_spans(tmp_path)

    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4000
    assert [each.iteration for each in every[-len(kept) :]] == [each.iteration for each in kept]
    assert 5 < len(kept) < 30
    assert len(every) - len(kept) == dropped_spans(tmp_path)


@pytest.mark.parametrize("origin", [10.0, 1000.5])
@pytest.mark.parametrize("torn", ["", '{"action": "ru'])
def test_a_clock_that_was_set_back_leaves_a_later_session_later(tmp_path, origin, torn):
    path = tmp_path / "main.jsonl"
    write(path, [span(0, 1), span(1, 2, iteration=1)], origin=1000.0)
    with path.open("a") as file:
        file.write(torn)
    write(path, [span(0, 5, iteration=1)], origin=origin)

    first, again = read_spans(tmp_path)
    assert (1.0, 5.0) == (first.seconds, pytest.approx(again.seconds))
    assert again.start > 2.0
    assert began_at(tmp_path) == 1000.0
