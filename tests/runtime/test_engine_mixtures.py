"""GRPO whose rollouts are the real SGLang's: of mixtures with the experts it tells, of a hybrid."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.conftest import TINY
from tests.engines.sglang.families import FAMILIES, ROUTED, STATES, save_family

PYTHON = os.environ.get("RLFLOW_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="RLFLOW_SGLANG_PYTHON names no interpreter"),
]

PIPELINE = """\
import rlflow as rf
from rlflow import ops

ENGINE = rf.SGLang(max_total_tokens=8192, args=STATES)


class Config(rf.Config):
    iterations: int = 5
    routed: bool = True


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


@rf.pipeline(
    placements={
        "split": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={
                "actor": rf.on("train"),
                "actor.rollout": rf.on("gen", engine=ENGINE),
            },
        ),
    }
)
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", "model", optimizer=rf.AdamW(lr=1e-2))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    told, chosen = ({"routing": each} if cfg.routed else {} for each in ("record", "replay"))
    samples = ops.rollout(actor, prompts, n=8, max_new_tokens=6, **told)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss("ppo_clip"), **chosen)
"""
SIZES = {"vocab_size": 51, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02}


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_with_experts_and_weights_that_are_checked(family, rlflow, tmp_path, monkeypatch):
    """After each update every weight of the engine is hashed, its experts too.

    Log-probs of tokens are those of training, which chooses their experts again.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PIPELINE.replace("STATES", repr(STATES)))
    save_family(family, tmp_path / "model", hidden_size=64, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "model")

    words = ("--devices", "cpu:2", "--check-sync", "--run-dir", "run")
    made = rlflow("run", "p.py", *words, "--set", f"routed={family in ROUTED}")

    assert 0 == made.code, made.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["metrics"] for line in lines]
    assert 1e-5 > max(line["actor.update/rollout_gap_max"] for line in found)
    rewards = [line["reward/mean"] for line in found]
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2])
