"""Processes that die or freeze in the middle of an action: one error in time, nothing left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlflow.runtime.record.checkpoint import list_checkpoints
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL, ended, process

pytestmark = [pytest.mark.ray, pytest.mark.torch]

GRPO = PIPELINES / "grpo_arithmetic.py"
WORDS = (*SMALL, *QUICK, "--set", "group_size=4", "--save-every", 2, "--backend", "ray", "-q")
SPLIT = ("--placement", "split", "--devices", "cpu:2")
TIGHT = ("--placement", "colocate", "--devices", "cpu:1@42MB", "--set", "kl_coef=0.05")
MARK = "RLFLOW_TEST_MARK"


def marked(mark: str) -> dict[int, str]:
    """Processes that inherited a mark in their environment, by pid, with their command."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found[int(entry.name)] = command
        except OSError:
            continue
    return found


def all_gone(mark: str, seconds: float = 20) -> dict[int, str]:
    """What is left of a run's processes after at most so many seconds."""
    until = time.monotonic() + seconds
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def start(run: Path, *words: object, iterations: int = 6, **environment: str):
    where = () if "--resume" in words else ("--run-dir", run)
    return process(
        *("run", GRPO, *WORDS, *words, "--iterations", iterations, *where),
        cwd=run.parent,
        **{MARK: run.parent.name},
        **environment,
    )


def rarely(*case: object, marks: Sequence[pytest.MarkDecorator] = ()):
    """A case that only the long tests try, because each starts a cluster."""
    return pytest.param(*case, marks=[pytest.mark.slow, *marks])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "rank", "words", "names"),
    [
        ("rank:run=kill9@6", 0, SPLIT, "actor.update in iteration 5"),
        rarely("rank:reshard=kill9@4", 1, SPLIT, "reshard:actor@train->actor@gen in iteration 3"),
        rarely("rank:run=kill9@4", 1, SPLIT, "actor.rollout", marks=[pytest.mark.extra]),
        rarely("rank:run=kill9@10", -1, SPLIT, "in iteration", marks=[pytest.mark.extra]),
        rarely("rank:send=kill9@9", 1, SPLIT, "transfer:actor.rollout", marks=[pytest.mark.extra]),
        rarely("rank:receive=kill9@6", 0, SPLIT, "transfer:", marks=[pytest.mark.extra]),
        # Moves run beside the device's other actions: any of those under way may be named. What is
        # killed while the first save is written has none to continue from.
        rarely("rank:sleep=kill9@9", 0, TIGHT, "in iteration", marks=[pytest.mark.extra]),
        rarely("rank:wake=kill9@9", 0, TIGHT, "in iteration"),
    ],
)
def test_a_killed_rank_ends_the_run_with_one_error_and_no_process_left(
    tmp_path, point, rank, words, names
):
    run = tmp_path / "run"
    began = start(run, *words, RLFLOW_FAULT=point, RLFLOW_FAULT_RANK=str(rank))

    code, _, err = ended(began, timeout=240)

    assert 1 == code, err
    assert 1 == err.count("error["), err
    assert "E759" in err
    assert names in err
    who = "the host worker" if rank < 0 else f"rank of device {rank}"
    assert f"{who} on node 127.0.0.1" in err
    assert "SIGKILL" in err or "killed" in err, err
    assert {} == all_gone(tmp_path.name)
    assert list_checkpoints(run / "checkpoints"), "nothing to continue from"


@pytest.mark.slow
def test_what_a_killed_run_left_continues_on_another_number_of_ranks(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    broken = start(
        run, *SPLIT, RLFLOW_FAULT="rank:run=kill9@5", RLFLOW_FAULT_RANK="0", iterations=6
    )
    assert 1 == ended(broken, timeout=240).code
    (last,) = list_checkpoints(run / "checkpoints")[-1:]
    assert "iteration-000004" == last.name

    many = ("--placement", "fsdp", "--devices", "cpu:2", "--resume", run)
    code, _, err = ended(start(run, *many), timeout=240)
    assert 0 == code, err
    assert 0 == ended(start(whole, *SPLIT), timeout=240).code

    left = [line.metrics for line in read_metrics(run / "metrics.jsonl")]
    right = [line.metrics for line in read_metrics(whole / "metrics.jsonl")]
    assert left[:4] == right[:4]
    assert left[4].keys() == right[4].keys()
    assert left[4]["reward/mean"] == right[4]["reward/mean"]
    assert right[4]["actor.update/loss"] == pytest.approx(left[4]["actor.update/loss"], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank"),
    [("ckpt:component:fsync=kill9@3", None), ("rank:saved=kill9@2", 1)],
    ids=["between its shards", "before its report"],
)
def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path, fault, rank):
    """Saving or acting, whichever is noticed first: it is told once, and nothing half is left."""
    run = tmp_path / "run"
    words = SPLIT if rank is None else ("--placement", "fsdp", "--devices", "cpu:2")
    chosen = {} if rank is None else {"RLFLOW_FAULT_RANK": str(rank)}
    began = start(run, *words, RLFLOW_FAULT=fault, **chosen)

    code, _, err = ended(began, timeout=240)

    assert 1 == code, err
    assert 1 == err.count("error["), err
    assert "E776" in err or "E759" in err, err
    assert f"rank of device {rank or 0}" in err
    left = [path.name for path in (run / "checkpoints").iterdir()]
    assert ["LATEST", "iteration-000002"] == sorted(left)
    assert {} == all_gone(tmp_path.name)


@pytest.mark.slow
def test_a_rank_killed_in_the_first_save_leaves_a_run_that_begins_again(tmp_path):
    run = tmp_path / "run"
    fault = {"RLFLOW_FAULT": "rank:saved=kill9@1", "RLFLOW_FAULT_RANK": "0"}
    began = start(run, *SPLIT, iterations=3, **fault)
    code, _, err = ended(began, timeout=240)
    assert (1, 1) == (code, err.count("error[")), err
    assert not list_checkpoints(run / "checkpoints")

    code, _, err = ended(start(run, *SPLIT, "--resume", run, iterations=3), timeout=240)

    assert 0 == code, err
    assert "nothing was saved yet: the run begins again" in err
    assert [0, 1, 2] == [line.iteration for line in read_metrics(run / "metrics.jsonl")][:3]
    assert list_checkpoints(run / "checkpoints")


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_well(tmp_path):
    run = tmp_path / "run"
    began = start(run, *SPLIT, iterations=2000)
    until = time.monotonic() + 120
    while not list_checkpoints(run / "checkpoints"):
        assert time.monotonic() < until
        time.sleep(0.2)
    ranks = [pid for pid, command in marked(tmp_path.name).items() if "ray::Rank" in command]

    for pid in (began.pid, *ranks):  # a terminal tells everybody
        os.kill(pid, signal.SIGINT)
    code, _, err = ended(began, timeout=120)

    assert 130 == code, err
    assert "continue with: rlflow run" in err
    done = len(read_metrics(run / "metrics.jsonl"))
    assert f"iteration-{done:06d}" == list_checkpoints(run / "checkpoints")[-1].name
    assert {} == all_gone(tmp_path.name)


FSDP = ("--placement", "fsdp", "--devices", "cpu:2")


@pytest.mark.slow
@pytest.mark.parametrize("words", [SPLIT, FSDP], ids=["split", "fsdp"])
def test_a_frozen_rank_is_an_error_within_the_deadline(tmp_path, words):
    """The frozen one alone is blamed, not who waits for it in a collective or for its rows."""
    run = tmp_path / "run"
    began = start(run, *words, "--deadline", 15, iterations=2000)
    until = time.monotonic() + 120
    while not (run / "spans").exists() or len(list_checkpoints(run / "checkpoints")) < 1:
        assert time.monotonic() < until
        assert began.poll() is None
        time.sleep(0.2)
    ranks = [pid for pid, command in marked(tmp_path.name).items() if "ray::Rank" in command]
    stopped = min(ranks)
    os.kill(stopped, signal.SIGSTOP)
    frozen = time.monotonic()

    code, _, err = ended(began, timeout=120)

    assert 1 == code, err
    assert "E763" in err or "E775" in err, err  # it is frozen in an action, or in a save
    named = re.findall(r"\(process (\d+)\)", err)
    assert [str(stopped)] == named, err
    assert time.monotonic() - frozen < 60
    assert {} == all_gone(tmp_path.name)


@pytest.mark.slow
def test_a_killed_controller_leaves_no_process(tmp_path):
    run = tmp_path / "run"
    began = start(run, *SPLIT, iterations=2000)
    until = time.monotonic() + 120
    while not list_checkpoints(run / "checkpoints"):
        assert time.monotonic() < until
        assert began.poll() is None, began.communicate()
        time.sleep(0.2)
    assert any("raylet" in command for command in marked(tmp_path.name).values())

    began.kill()
    began.communicate()

    assert {} == all_gone(tmp_path.name)
