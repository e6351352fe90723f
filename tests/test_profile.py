"""`rlflow profile`, costs written back by `rlflow run`, and plans of models that are not here."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.scheduler.devices.measured import load_measured
from tests.conftest import PIPELINES, SMALL, Result

GRPO = PIPELINES / "grpo_arithmetic.py"
FEW = (*SMALL, "--set", "eval_every=1000", "--threads", "1")

Call = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of measured costs of its own, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLFLOW_COSTS", str(tmp_path / "costs.json"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "costs.json"


@pytest.mark.slow
@pytest.mark.torch
def test_a_profile_is_kept_and_nothing_else_is_left(rlflow: Call, store: Path) -> None:
    done = rlflow("profile", GRPO, *FEW, "--iterations", "2", "--json")
    found = json.loads(done.out)

    assert 0 == done.code, done.err
    assert {"grpo", "colocate", str(store)} == {
        found["pipeline"],
        found["placement"],
        found["path"],
    }
    named = {row["action"]: row for row in found["actions"]}
    assert {"prompts", "actor.rollout", "reward", "advantage", "actor.update"} <= named.keys()
    assert 2 == named["actor.rollout"]["count"]
    assert all(row["measured"] > 0 and row["table"] > 0 for row in found["actions"])
    assert found["iteration"]["calibrated"] != found["iteration"]["table"]
    left = {entry.name for entry in store.parent.iterdir()}
    assert {"costs.json", ".costs.json.lock", "temporary"} == left
    assert [] == list((store.parent / "temporary").glob("rlflow*"))

    planned = rlflow("plan", GRPO, *FEW)
    assert "profile" in planned.out.partition("estimates from: ")[2]
    assert str(store) not in planned.out


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_is_written_back_and_the_next_plan_says_so(rlflow: Call, store: Path) -> None:
    run = ("run", GRPO, *FEW, "-q", "--iterations", "4")
    assert 0 == rlflow(*run, "--run-dir", "one").code
    assert 0 == rlflow(*run, "--run-dir", "two").code
    planned = rlflow("plan", GRPO, *FEW, "--explain", "actor.rollout")

    assert "from measured, 2 runs" in planned.out
    assert 2 == load_measured(store).serial


@pytest.mark.slow
@pytest.mark.torch
def test_short_runs_are_kept_and_runs_without_a_file_keep_nothing(
    rlflow: Call, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ("run", GRPO, *FEW, "-q", "--iterations")
    assert 0 == rlflow(*run, "2", "--run-dir", "one").code
    kept = store.read_bytes()
    monkeypatch.setenv("RLFLOW_COSTS", "off")
    assert 0 == rlflow(*run, "4", "--run-dir", "two").code
    assert kept == store.read_bytes()


@pytest.mark.torch
def test_a_disk_that_refuses_costs_a_warning_and_no_run(
    rlflow: Call, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_text("in the way")
    monkeypatch.setenv("RLFLOW_COSTS", str(store / "costs.json"))
    done = rlflow("run", GRPO, *FEW, "-q", "--iterations", "3", "--run-dir", "one")

    assert 0 == done.code
    assert "measured costs are not kept" in done.err


def test_a_damaged_file_is_one_warning(rlflow: Call, store: Path) -> None:
    store.write_text("{")
    done = rlflow("plan", GRPO, *FEW)

    assert 0 == done.code
    assert [f"warning: {store} is damaged"] == [
        line.partition(":")[0] + ":" + line.split(":")[1]
        for line in done.err.splitlines()
        if line.startswith("warning")
    ]
    assert "model shape and device table" in done.out


PLACEMENTS = ("--placement", "fsdp", "--devices", "h100:64", "--model-shape")


@pytest.mark.parametrize("command", ["check", "plan", "viz"])
def test_models_that_are_not_here_are_planned_by_shape(
    rlflow: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--level", "plan") if command == "viz" else ()
    words = (command, GRPO, *PLACEMENTS, "qwen2.5-0.5b", "--set", "model=nobody/here", *options)
    done = rlflow(*words)

    assert 0 == done.code, done.err
    if command == "plan":
        assert "actor and ref taken as qwen2.5-0.5b, 0.49 billion parameters" in done.out
        assert "in float32 as declared" in done.out
        assert "next: rlflow run" not in done.err


def test_placements_are_compared_by_shape(rlflow: Call) -> None:
    words = ("--placement", "fsdp", "--placement", "fsdp_tp", *PLACEMENTS[2:])
    done = rlflow("diff", GRPO, *words, "qwen2.5-0.5b", "--json")

    assert 0 == done.code, done.err


@pytest.mark.parametrize(
    ("text", "code", "near"),
    [("qwen2.5-8b", "E231", "qwen2.5-7b"), ("acter=qwen3-8b", "E232", "actor"), (",", "E233", "")],
)
def test_a_shape_that_is_not_known_is_refused(
    rlflow: Call, text: str, code: str, near: str
) -> None:
    done = rlflow("plan", GRPO, *PLACEMENTS, text)

    assert 2 == done.code
    assert f"error[{code}]" in done.err
    assert near in done.err


def test_a_pool_of_two_kinds_is_refused(rlflow: Call) -> None:
    done = rlflow("plan", GRPO, "--placement", "fsdp", "--devices", "h100:1,a100:1")

    assert 4 == done.code
    assert "error[E223]" in done.err
    assert "h100 [0], a100 [1]" in done.err


def test_a_run_takes_devices_of_one_kind(rlflow: Call) -> None:
    words = ("--placement", "split", "--devices", "h100:1,a100:1", "-n")
    done = rlflow("run", GRPO, *words)

    assert 2 == done.code
    assert "error[E235]" in done.err
