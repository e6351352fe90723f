"""What a user's op does to the world: once an iteration, in order, again after a checkpoint."""

from __future__ import annotations

import pytest

from rlflow.runtime.record import durable
from tests.conftest import TINY
from tests.runtime.whole_runs import REPLAYED, last_checkpoint, numbers

pytestmark = pytest.mark.torch

ACTING = """
from pathlib import Path

import rlflow as rf
from rlflow import ops


@rf.op(per="row")
def shout(response: list[str], answer: list[str]) -> list[str]:
    return [f"{one}!{other}" for one, other in zip(response, answer)]


@rf.op(per="group")
def told(shout: list[str], group: rf.Row[int], *, into: str, iteration: int) -> None:
    with Path(into).open("a") as file:
        file.write(f"{iteration} {int(group[0])} {len(shout)}\\n")


def length(shout: str) -> float:
    return float(len(shout))


@rf.pipeline()
def acting(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "MODEL", optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    loud = shout(samples)
    told(loud, samples, into="told.txt")
    adv = ops.advantage("grpo", samples, ops.reward(length, loud))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.mark.slow
def test_effects_are_once_and_in_order_and_again_after_a_checkpoint(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acting.py").write_text(ACTING.replace("MODEL", str(TINY)))

    def run(*folder):
        return rlflow("run", "acting.py", "--iterations", 5, "--save-every", 2, "-q", *folder)

    def acted():
        lines = (tmp_path / "told.txt").read_text().split("\n")[:-1]
        (tmp_path / "told.txt").unlink()
        assert all(line.endswith(" 2") for line in lines)
        return [tuple(map(int, line.split()[:2])) for line in lines]

    whole = run("--run-dir", "whole")
    assert 0 == whole.code, whole.err
    everything = [(group // 2, group) for group in range(10)]
    assert everything == acted()
    monkeypatch.setenv(durable.FAULT_VARIABLE, "run:iteration=raise@4")
    durable.arm_from_environment()
    assert "InjectedFault" in run("--run-dir", "broken").err
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()
    begun = acted()
    assert begun == everything[: len(begun)]
    assert 6 <= len(begun)
    resumed = run("--resume", "broken")
    assert 0 == resumed.code, resumed.err
    again = acted()
    assert again == everything[-len(again) :]
    assert again[0][0] % 2 == 0


@pytest.mark.slow
def test_rows_that_are_kept_are_saved_and_learned_from(train):
    run = train(REPLAYED, "split")
    assert last_checkpoint(run).joinpath("replay.rows.safetensors").stat().st_size > 0
    assert numbers(run)[3]["replay/age"] > 0
