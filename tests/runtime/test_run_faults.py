"""Faults of runs in this process: each has fired, and says what is wrong and what is left."""

from __future__ import annotations

import json
import shutil

import pytest

from rlflow.runtime.record.checkpoint import list_checkpoints
from rlflow.runtime.record.manifest import verify_checkpoint
from tests.conftest import TINY

pytestmark = pytest.mark.torch

MINE = """
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    lr: float = 1e-4
    iterations: int = 2

def judge(response: str) -> float:
    return float(len(response) % 7)

@rf.pipeline()
def mine(cfg: Config) -> None:
    actor = rf.Model("actor", "MODEL", optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=1, test_size=9), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    adv = ops.advantage("grpo", samples, ops.reward(judge, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""
WORDS = ("--threads", 1, "--save-every", 1)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A pipeline file in an empty directory, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLFLOW_COSTS", "")
    (tmp_path / "mine.py").write_text(MINE.replace("MODEL", str(TINY)))
    return tmp_path / "run"


def test_what_a_resume_must_not_overlook(rlflow, mine):
    """Emptied checkpoints, damaged run.json and spans are told before; a stranger stays."""
    assert 0 == rlflow("run", "mine.py", *WORDS, "--run-dir", mine).code
    again = ("run", "mine.py", *WORDS, "--iterations", 3, "--resume", mine)
    metrics = (mine / "metrics.jsonl").read_bytes()

    kept = (mine / "run.json").read_text()
    (mine / "run.json").write_text(kept[:40])
    damaged = rlflow(*again)
    assert (2, True) == (damaged.code, "error[E714]" in damaged.err), damaged.err
    (mine / "run.json").write_text(kept)

    spans = next((mine / "spans").iterdir())
    lines = spans.read_bytes()
    spans.write_bytes(lines.replace(b"{", b"[", 3))
    broken = rlflow(*again)
    assert (2, True) == (broken.code, "error[E731]" in broken.err), broken.err
    spans.write_bytes(lines)

    shutil.move(mine / "checkpoints", mine / "x.tmp-0123456789ab")
    (mine / "checkpoints").mkdir()
    emptied = rlflow(*again)
    assert (1, True) == (emptied.code, "error[E727]" in emptied.err), emptied.err
    assert metrics == (mine / "metrics.jsonl").read_bytes()

    shutil.copytree(mine / "x.tmp-0123456789ab", mine / "checkpoints", dirs_exist_ok=True)
    assert 0 == rlflow(*again).code
    assert (mine / "x.tmp-0123456789ab" / "LATEST").exists()
    assert (mine / "metrics.jsonl").read_bytes().startswith(metrics)


def test_a_diverged_run_goes_on_from_the_last_healthy_checkpoint(rlflow, mine):
    assert 0 == rlflow("run", "mine.py", *WORDS, "--run-dir", mine).code
    again = ("run", "mine.py", *WORDS, "--iterations", 5, "--resume", mine)
    broken = rlflow(*again, "--set", "lr=1e18", "--allow-changes", "lr")

    assert 1 == broken.code
    assert "error[E652]: the logits of" in broken.err
    assert "was set aside as" in broken.err
    assert f"--iterations 5 --resume {mine}" in broken.err
    last = list_checkpoints(mine / "checkpoints")[-1]
    assert 2 == verify_checkpoint(last).iteration
    assert f"{last.name}\n" == (mine / "checkpoints" / "LATEST").read_text()
    assert (mine / "checkpoints" / "diverged-000003").is_dir()
    assert 0 == rlflow(*again).code
    lines = [json.loads(line) for line in (mine / "metrics.jsonl").read_text().splitlines()]
    assert [0, 1, 2, 3, 4] == [line["iteration"] for line in lines]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--set", "iterations=-5"), 2, "greater than or equal to 1"),
        (("--set", "lr=inf"), 3, "Input should be a finite number"),
        (("--staleness", 10**9), 2, "is not in the range"),
        (("-n", "--resume", "nowhere"), 2, "error[E712]"),
    ],
)
def test_what_no_run_can_be_is_refused(rlflow, mine, words, code, said):
    result = rlflow("run", "mine.py", *words)
    assert code == result.code, result.err
    assert said in result.err
    assert not mine.parent.joinpath("runs").exists()


@pytest.mark.parametrize("old", ["def mine", '"actor"', "judge, samples)"])
def test_a_name_that_no_file_can_have_is_refused(rlflow, mine, old):
    new = {"def mine": f"def {'m' * 300}", '"actor"': f'"{"m" * 300}"'}
    new["judge, samples)"] = f'judge, samples, name="{"m" * 300}")'
    file = mine.parent / "mine.py"
    file.write_text(file.read_text().replace(old, new[old], 1))
    result = rlflow("run", "mine.py")
    assert 3 == result.code, result.err
    assert "at most 100" in result.err
