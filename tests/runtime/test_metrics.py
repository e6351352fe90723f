"""The metrics file: exact figures, and the same bytes after a kill and a resume."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
from pathlib import Path

import pytest

from rlflow.errors import RunDirError, RunError
from rlflow.runtime.record import durable
from rlflow.runtime.record.metrics import MetricsLog, final_metrics, read_metrics, truncate_after


def figures(iteration: int) -> dict[str, float]:
    return {"reward": iteration / 3, "loss": -0.0, "tokens": 10**iteration}


def write(path, iterations):
    with MetricsLog(path) as log:
        for iteration in iterations:
            log.write(iteration, figures(iteration))


def test_one_plain_json_line_per_iteration(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(3, {"reward": 0.1, "accuracy": 1, "kl": math.inf})
    assert (
        '{"iteration": 3, "metrics": {"accuracy": 1, "kl": "inf", "reward": 0.1}}\n'
    ) == path.read_text()


def test_the_closing_line_says_so_and_joins_the_last_iteration(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"eval/reward": 0.25, "loss": 1.0})
        assert {"eval/reward": 0.25, "loss": 1.0} == final_metrics(path)
        log.write(1, {"eval/reward": 0.5}, closing=True)
    assert path.read_text().endswith(
        '{"iteration": 1, "closing": true, "metrics": {"eval/reward": 0.5}}\n'
    )
    assert [False, True] == [line.closing for line in read_metrics(path)]
    assert {"eval/reward": 0.5, "loss": 1.0} == final_metrics(path)
    path.write_text("")
    assert {} == final_metrics(path)


@pytest.mark.parametrize("there", ["nothing", "another"])
def test_what_would_be_kept_nowhere_is_an_error(tmp_path, there):
    """A run whose directory was removed or moved away does not train on for nothing."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    with MetricsLog(path) as log:
        log.write(0, {"x": 1.0})
        path.parent.rename(tmp_path / "moved")
        if there == "another":
            path.parent.mkdir()
            path.touch()
        with pytest.raises(RunError, match=f"E705.*cannot write {path}"):
            log.write(1, {"x": 1.0})
    assert 1 == len(read_metrics(tmp_path / "moved" / "metrics.jsonl"))


@pytest.mark.parametrize(
    "value", [0.1, -0.0, 5e-324, 1 / 3, 1e308, math.inf, -math.inf, math.nan, 2**60]
)
def test_a_figure_comes_back_with_its_bits(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"x": value})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    (line,) = read_metrics(path)
    assert type(value) is type(line.metrics["x"])
    assert struct.pack("d", value) == struct.pack("d", line.metrics["x"])


def test_order_of_the_figures_does_not_matter(tmp_path):
    for name, metrics in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        with MetricsLog(tmp_path / name) as log:
            log.write(0, metrics)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("died_at", [4, 5, 7])
@pytest.mark.parametrize("torn", [b"", b'{"itera', b"{", b'{"iteration": 8, "metrics": {}'])
def test_resumed_file_is_the_uninterrupted_file(tmp_path, died_at, torn):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    write(whole, range(10))
    write(resumed, range(died_at + 1))
    with resumed.open("ab") as file:
        file.write(torn)
    assert died_at - 4 + bool(torn) == truncate_after(resumed, 4)
    with MetricsLog(resumed) as log:
        for iteration in range(5, 10):
            log.write(iteration, figures(iteration))
    assert whole.read_bytes() == resumed.read_bytes()


def test_whole_last_line_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    assert 0 == truncate_after(path, 2)
    assert whole == path.read_bytes()


def test_resume_without_any_checkpoint_empties_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    assert 3 == truncate_after(path, -1)
    assert b"" == path.read_bytes()


def test_a_run_that_goes_on_elsewhere_begins_an_empty_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert 0 == truncate_after(path, 4)
    assert [] == read_metrics(path)


def test_torn_last_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(2))
    with path.open("ab") as file:
        file.write(b'{"iteration": 2, "met')
    assert [0, 1] == [line.iteration for line in read_metrics(path)]


@pytest.mark.parametrize(
    "bad",
    [
        *("{", "[]", '{"iteration": 1}', '{"iteration": 1, "metrics": 3}'),
        *('{"iteration": 1, "metrics": {"a": null}}', '{"iteration": 1e400, "metrics": {}}'),
        '{"iteration": 1, "metrics": {"a": 1' + 400 * "0" + "}}",
    ],
)
def test_damaged_line_in_the_middle_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], bad, lines[2]]) + "\n")
    with pytest.raises(RunDirError, match=r"E730.*line 2 of .*metrics.jsonl is damaged"):
        read_metrics(path)
    with pytest.raises(RunDirError, match="line 2"):
        truncate_after(path, 2)
    assert 3 == len(path.read_text().splitlines())


def test_damage_after_the_kept_lines_is_cut_away(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    before = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"iteration": 3, "metrics": {}}\n\x00\x00\n\x00\n')
    assert 3 == truncate_after(path, 2)
    assert before == path.read_bytes()


@pytest.mark.parametrize("stage", ["write", "fsync", "rename", "dirsync"])
def test_kill_while_truncating_leaves_the_old_file_or_the_new(tmp_path, stage):
    path = tmp_path / "metrics.jsonl"
    write(path, range(6))
    old = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        os.environ[durable.FAULT_VARIABLE] = f"metrics:truncate:{stage}=kill9"
        durable.arm_from_environment()
        truncate_after(path, 2)
        os._exit(0)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(pid, 0)[1])
    new = b"".join(old.splitlines(keepends=True)[:3])
    assert (old if stage in {"write", "fsync"} else new) == path.read_bytes()


def test_a_line_is_there_when_write_returns(tmp_path):
    path = tmp_path / "metrics.jsonl"
    pid = os.fork()
    if pid == 0:
        os.environ[durable.FAULT_VARIABLE] = "metrics:write=kill9@3"
        durable.arm_from_environment()
        write(path, range(9))
        os._exit(0)
    assert signal.SIGKILL == os.WTERMSIG(os.waitpid(pid, 0)[1])
    assert [0, 1, 2] == [line.iteration for line in read_metrics(path)]


def test_unwritable_place_is_said(tmp_path):
    with pytest.raises(RunDirError, match=r"cannot open .*absent/metrics.jsonl"):
        MetricsLog(tmp_path / "absent" / "metrics.jsonl")
    with pytest.raises(RunDirError, match="cannot read"):
        read_metrics(tmp_path / "none.jsonl")


def test_full_disk_is_said():
    with MetricsLog(Path("/dev/full")) as log, pytest.raises(RunError, match="E701"):
        log.write(0, {"x": 1})
