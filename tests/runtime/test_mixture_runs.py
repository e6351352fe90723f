"""GRPO of a mixture of experts: it learns, and over ranks as on one."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.conftest import TINY
from tests.engines.mixtures import save_mixture

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

PIPELINE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    iterations: int = 6
    model: str = ""


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


@rf.pipeline(
    placements={
        "whole": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "fsdp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")}),
        "ep": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", ep=2)}),
        "tp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", tp=2)}),
    }
)
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-2))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=8, max_new_tokens=6)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.fixture
def model(tmp_path):
    """A tiny Qwen3-MoE with the tokenizer of the tiny model."""
    sizes = {"vocab_size": 51, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02}
    save_mixture("qwen3_moe", tmp_path / "model", hidden_size=64, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path / "model")
    return tmp_path / "model"


def test_it_learns_over_ranks_what_it_learns_on_one(rlflow, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PIPELINE)
    found = {}
    for place, devices in (("whole", 1), ("fsdp", 2), ("ep", 2), ("tp", 2)):
        words = ("--placement", place, "--devices", f"cpu:{devices}", "--threads", 1)
        made = rlflow("run", "p.py", *words, "--set", f"model={model}", "--run-dir", place)
        assert 0 == made.code, made.err
        lines = (tmp_path / place / "metrics.jsonl").read_text().splitlines()
        found[place] = [json.loads(line)["metrics"] for line in lines]

    rewards = [line["reward/mean"] for line in found["whole"]]
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2])
    for place in ("fsdp", "ep", "tp"):
        for one, other in zip(found["whole"], found[place], strict=True):
            for name in ("actor.update/loss", "reward/mean"):
                assert one[name] == pytest.approx(other[name], abs=1e-5), (place, name)

    for place in ("fsdp", "ep"):
        assert 0 == rlflow("export", place, "-o", place + "-out").code
        written = (model, tmp_path / (place + "-out"))
        before, after = (load_file(at / "model.safetensors") for at in written)
        assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
