"""A run as a Chrome trace: what the format asks for, arrows by dependency, memory, kernels."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from rlflow.errors import RunDirError, UsageError
from rlflow.report.trace.events import rows_of
from rlflow.report.trace.trace import trace_run
from rlflow.runtime.record.devices.profiled import MARK, ProfiledActions, iteration_range
from tests.documents import plan_document

ORIGIN = 1000.0
NEEDS = {
    "X": {"ts", "dur", "name"},
    "s": {"ts", "id"},
    "f": {"ts", "id", "bp"},
    "C": {"ts", "args"},
}
NEEDS |= {"M": {"name", "args"}, "i": {"ts"}, "t": {"ts", "id"}}


def dep(action, distance, kind):
    return {"action": action, "distance": distance, "kind": kind}


def action(name, kind, after=(), ahead=0):
    return {
        "id": name,
        "kind": kind,
        "after": list(after),
        "ahead": ahead,
        "reason": {"rule": "bind", "text": f"why {name}"},
        "targets": ["actor@all"],
    }


PLAN = plan_document(
    action("rollout", "run", [dep("sync", 1, "weights")], ahead=1),
    action("update", "run", [dep("rollout", 1, "data"), dep("update", 1, "order")]),
    action("sync", "reshard", [dep("update", 0, "weights")]),
    action("sleep", "sleep", [dep("update", 0, "device")]),
    peaks={"0": 3 << 20, "-1": 0},
)


def span(name, kind, iteration, device, start, end):
    return {
        "action": name,
        "node": name,
        "kind": kind,
        "iteration": iteration,
        "chunk": 0,
        "pool": "all",
        "devices": [device],
        "start": start,
        "end": end,
        "predicted": 0.5,
        "bytes": None,
        "process": "main",
        "ok": True,
    }


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    """
    device 0:  update 0 -> sync 0 | update 1 -> sync 1
    device 1:  rollout 0 | rollout 1 | rollout 2
    A rollout is one turn ahead: rollout i + 2 waits for sync i, update i for rollout i.
    """
    facts = {"name": "grpo", "pipeline": "p.py", "command": [], "started": "now"}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    rows = [
        {"origin": ORIGIN, "process": "main"},
        span("rollout", "run", 0, 1, 0.0, 1.0),
        span("rollout", "run", 1, 1, 1.0, 2.0),
        span("update", "run", 0, 0, 1.0, 1.5),
        span("sleep", "sleep", 0, 0, 1.4, 1.6),
        span("sync", "reshard", 0, 0, 1.5, 1.6),
        span("rollout", "run", 2, 1, 2.0, 3.0),
        span("update", "run", 1, 0, 2.0, 2.5),
        span("sync", "reshard", 1, 0, 2.5, 2.6),
    ]
    write_lines(tmp_path / "spans" / "main.jsonl", rows)
    figures = {"allocated_before": 1 << 20, "allocated": 2 << 20, "peak": 3 << 20}
    line = {"action": "update", "iteration": 1, "device": 0, "seconds": 0.5, **figures}
    write_lines(tmp_path / "devices.jsonl", [line])
    return tmp_path


def kernels(run, *, began, iteration=1, mark=500.0):
    """A file as torch writes it: a mark, an operator in it, a kernel, an arrow between the two."""
    profiled = ProfiledActions(
        actions=frozenset(["update"]), first=0, last=9, directory=run / "profiles", cuda=True
    )
    path = profiled.path("update", iteration, 0)
    path.parent.mkdir(exist_ok=True)
    thread, stream = {"pid": 4242, "tid": 17}, {"pid": 0, "tid": 7}
    said = {"action": "update", "iteration": iteration, "device": 0, "began": began}
    events = [
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        {
            "ph": "X",
            "name": "PyTorch Profiler (0)",
            "pid": "Spans",
            "tid": "x",
            "ts": 0,
            "dur": 9e9,
        },
        {"ph": "X", "name": MARK, "cat": "user_annotation", **thread, "ts": mark, "dur": 90},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", **thread, "ts": mark + 10, "dur": 5},
        {"ph": "X", "name": "gemm", "cat": "kernel", **stream, "ts": mark + 20, "dur": 30},
        {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 1, **thread, "ts": mark + 11},
        {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 1, **stream, "ts": mark + 20, "bp": "e"},
        {"ph": "M", "name": "thread_name", **stream, "args": {"name": "stream 7"}},
    ]
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events, "rlflow": json.dumps(said)}, file)
    return path


def traced(run, wanted=None):
    where, count = trace_run(run, None, wanted)
    with gzip.open(where, "rt") as file:
        document = json.load(file)
    assert count == len(document["traceEvents"])
    assert_format(document["traceEvents"])
    return document["traceEvents"]


def assert_format(events):
    """What a reader of the Chrome trace format relies on."""
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices, arrows = defaultdict(list), defaultdict(list)
    for event in events:
        assert NEEDS[event["ph"]] <= event.keys(), event
        assert isinstance(event["pid"], int), event
        assert isinstance(event["tid"], int), event
        assert event.get("ts", 0) >= 0, event
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            arrows[str(event["id"])].append(event)
    for track, found in slices.items():
        assert track in named or track[0] >= 1000, track
        found.sort(key=lambda pair: (pair[0], -pair[1]))
        for (start, end), (other, until) in pairwise(found):
            assert other >= end or until <= end, (track, start, end, other, until)
    for both in arrows.values():
        assert ["s", "f"] == [
            each["ph"] for each in sorted(both, key=lambda e: (e["ts"], e["ph"] == "f"))
        ]
        for each in both:
            found = slices[each["pid"], each["tid"]]
            assert any(start <= each["ts"] <= end for start, end in found), each


def ends_of_arrows(events):
    """(category, action and iteration that was waited for, and that waited) of every arrow."""
    slices = [e for e in events if e["ph"] == "X" and "action" in e["args"]]

    def at(arrow):
        return next(
            f"{e['name']} {e['args']['iteration']}"
            for e in slices
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])
            and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
        )

    left = {e["id"]: e for e in events if e["ph"] == "s" and e["cat"] != "ac2g"}
    right = {e["id"]: e for e in events if e["ph"] == "f" and e["cat"] != "ac2g"}
    return {(left[n]["cat"], at(left[n]), at(right[n])) for n in left}


def test_arrows_are_the_dependencies_of_the_plan(run):
    assert {
        ("data", "rollout 0", "update 0"),
        ("data", "rollout 1", "update 1"),
        ("order", "update 0", "update 1"),
        ("device", "update 0", "sleep 0"),
        ("weights", "update 0", "sync 0"),
        ("weights", "update 1", "sync 1"),
        ("weights", "sync 0", "rollout 2"),
    } == ends_of_arrows(traced(run))


def test_iterations_overlap_in_rows_and_copies_have_a_track(run):
    events = traced(run)

    turns = [e for e in events if e["ph"] == "X" and e["cat"] == "iteration"]
    assert {"iteration 0": 1, "iteration 1": 2, "iteration 2": 1} == {
        e["name"]: e["tid"] for e in turns
    }
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert {"iterations", "ahead", "device 0 (all)", "device 1 (all)", "copies"} <= names


def test_memory_stands_at_the_times_of_its_action_beside_the_proof(run):
    counters = [e for e in traced(run) if e["ph"] == "C"]

    assert {
        ("memory allocated (MiB)", 2.0e6, 1.0),
        ("memory allocated (MiB)", 2.5e6, 2.0),
        ("memory at its peak in the action (MiB)", 2.0e6, 3.0),
        ("memory that the plan proves (MiB)", 0.0, 3.0),
        ("memory that the plan proves (MiB)", 3.0e6, 3.0),
    } == {(e["name"], e["ts"], e["args"][e["name"]]) for e in counters}


def test_kernels_are_on_the_clock_of_the_run(run):
    kernels(run, began=ORIGIN + 2.0001)
    events = traced(run)

    body = next(e for e in events if e["name"] == "update (body)")
    gemm = next(e for e in events if e["name"] == "gemm")
    assert 2000100.0 == body["ts"]
    assert 2000120.0 == gemm["ts"]
    assert body["pid"] != gemm["pid"]
    assert "device 0: streams of torch.profiler" in {
        e["args"].get("name") for e in events if e["ph"] == "M" and e["pid"] == gemm["pid"]
    }
    assert "PyTorch Profiler (0)" not in {e["name"] for e in events}


def test_some_iterations_alone(run):
    kernels(run, began=ORIGIN + 2.0, iteration=1)
    events = traced(run, range(0, 1))

    assert {0} == {e["args"]["iteration"] for e in events if e["ph"] == "X"}
    with pytest.raises(UsageError, match="E344") as raised:
        trace_run(run, None, range(7, 9))
    assert "the iterations 0 to 2" in str(raised.value)


def test_equal_runs_are_equal_files(run):
    first = trace_run(run, run / "a.json.gz", None)[0].read_bytes()
    assert first == trace_run(run, run / "b.json.gz", None)[0].read_bytes()
    plain = trace_run(run, run / "c.json", None)[0].read_text()
    assert gzip.decompress(first).decode() == plain


def test_a_damaged_file_of_kernels_is_named(run):
    path = kernels(run, began=ORIGIN)
    path.write_bytes(path.read_bytes()[:40])

    with pytest.raises(RunDirError, match="E714") as raised:
        trace_run(run, None, None)
    assert path.name in str(raised.value)
    assert not (run / "trace.json.gz").exists()


def test_a_name_that_is_none_of_a_trace(run):
    with pytest.raises(UsageError, match="E345") as raised:
        trace_run(run, run / "trace.pb", None)
    assert "-o trace.json.gz" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "expected"), [("3:5", (3, 5)), ("3", (3, 4)), ("5:3", None), ("3:", None), ("x", None)]
)
def test_ranges_of_iterations(text, expected):
    if expected is not None:
        assert expected == iteration_range(text, "--iterations")
        return
    with pytest.raises(UsageError, match="E343"):
        iteration_range(text, "--iterations")


def test_rows_hold_what_does_not_overlap():
    assert [0, 1, 0, 2, 1] == rows_of([(0, 2), (1, 4), (2, 5), (3, 4), (4, 6)])
