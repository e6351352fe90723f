"""`rlflow idle`: the gaps of an iteration by device, what each waited for, and bad questions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.report.runfiles import read_run_files
from rlflow.report.waiting.idle import THE_END, idle_iteration, idle_text
from rlflow.scheduler.plan.plan import Plan
from tests.viz.test_gantt import span
from tests.viz.test_timeline import planned


def files_of(spans, plan):
    return SimpleNamespace(path=Path("runs/made"), spans=spans, plan=plan)


@pytest.fixture
def two_iterations():
    """A rollout of 4 s on device 1, 1 s for nobody, an update of 3 s on device 0; twice."""
    plan = planned(
        ("roll", (1,), [("train", 1)], {}),
        ("train", (0,), [("roll", 0)], {}),
    ) | {"pools": {"train": [0], "gen": [1]}}
    spans = [
        span("roll", 10, 14, devices=(1,)),
        span("train", 15, 18),
        span("roll", 18, 22, devices=(1,), iteration=1),
        span("train", 23, 26, iteration=1),
    ]
    return files_of(spans, plan)


def test_each_device_waits_for_the_other_and_for_nobody(two_iterations):
    found = idle_iteration(two_iterations, 0)
    train, gen = found.devices

    assert (0, 8.0, False) == (found.iteration, found.seconds, found.typical)
    assert ("train[0]", 5.0, "gen[1]", 4.0) == (train.label, train.seconds, gen.label, gen.seconds)
    assert [("roll", 4.0), (None, 1.0)] == [*train.causes]
    assert [("train", 3.0), (None, 1.0)] == [*gen.causes]
    (gap,) = train.gaps
    assert (0.0, 5.0, ("train", 0)) == (gap.start, gap.seconds, gap.before)
    (gap,) = gen.gaps
    assert (4.0, 4.0, ("roll", 1)) == (gap.start, gap.seconds, gap.before)


def test_after_its_last_action_a_device_waits_for_what_ends_the_run(two_iterations):
    (gen,) = idle_iteration(two_iterations, 1, "gen").devices
    (gap,) = gen.gaps

    assert (4.0, 4.0, None) == (gap.start, gap.seconds, gap.before)
    assert [("train", 3.0), (None, 1.0)] == [*gap.causes]
    assert THE_END in idle_text(idle_iteration(two_iterations, 1, "gen"))


def test_a_gap_is_cut_at_the_ends_of_the_iteration(two_iterations):
    """Device 0 is idle from 18 to 23; iteration 1 begins at 18, iteration 0 ends there."""
    for iteration in (0, 1):
        (train,) = idle_iteration(two_iterations, iteration, "0").devices
        assert 5.0 == train.seconds
        assert 5.0 == sum(seconds for _, seconds in train.causes)


def test_causes_add_up_to_gaps_and_gaps_to_what_is_not_busy(run_dir: Path, split: Plan):
    files = read_run_files(run_dir)
    found = idle_iteration(files)

    assert found.typical
    for each in found.devices:
        busy = sum(
            s.seconds for s in files.spans
            if s.iteration == found.iteration and set(each.devices) & set(s.devices)
        )  # fmt: skip
        assert found.seconds - busy == pytest.approx(each.seconds)
        for gap in each.gaps:
            assert gap.seconds == pytest.approx(sum(seconds for _, seconds in gap.causes))


@pytest.mark.parametrize("device", ["1", "gen", "gen[1]"])
def test_a_device_is_named_by_number_pool_or_label(rlflow, run_dir: Path, device: str):
    done = rlflow("idle", run_dir, "--device", device, "--iteration", 2)

    assert 0 == done.code, done.err
    assert f"iteration 2 of {run_dir}: " in done.out
    assert "gaps of gen[1]" in done.out
    assert "train[0]" not in done.out.split("waited for", 1)[0]
    (row,) = json.loads(rlflow("idle", run_dir, "--device", device, "--json").out)["devices"]
    assert ("gen[1]", [1]) == (row["label"], row["devices"])
    assert row["idle"] == pytest.approx(sum(gap["seconds"] for gap in row["gaps"]))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--device", "gn"), 2, ("E349", "did you mean 'gen'", "0, 1, train[0], gen[1]")),
        (("--device", "4"), 2, ("E349", "0, 1")),
        (("--iteration", "77"), 2, ("E666", "iterations 0 to 5", "--iteration 5")),
        (("--iteration", "-1"), 2, ("--iteration", "-1")),
    ],
)
def test_what_is_not_there_is_one_error(rlflow, run_dir: Path, words, code, said):
    done = rlflow("idle", run_dir, *words)

    assert (code, "") == (done.code, done.out)
    assert all(part in done.err for part in said), done.err


def test_what_is_no_run_or_has_no_spans_is_said(rlflow, run_dir: Path, tmp_path: Path):
    assert "E712" in rlflow("idle", tmp_path / "nowhere").err
    (run_dir / "spans" / "main.jsonl").unlink()
    done = rlflow("idle", run_dir)

    assert 2 == done.code
    assert "no spans" in done.err
