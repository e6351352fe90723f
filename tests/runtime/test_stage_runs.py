"""GRPO of a model in stages: what one process learns; its checkpoint goes on in another layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import TINY

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

PIPELINE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    iterations: int = 3
    model: str = ""


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


@rf.pipeline(
    placements={
        "whole": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "pp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", pp=2)}),
        "fsdp": rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")}),
    },
)
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    ref_lp = ops.log_probs(ref, samples)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    ops.update(actor, samples, advantages, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.05))
"""


def metrics(run: Path):
    return [
        json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def test_stages_learn_what_one_process_does_and_go_on_without(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PIPELINE)

    def train(place, *more):
        words = ("--placement", place, "--threads", 1, "--set", f"model={TINY}")
        devices = ("--devices", f"cpu:{1 if place == 'whole' else 2}")
        made = rlflow("run", "p.py", *words, *devices, "--check-sync", *more)
        assert 0 == made.code, made.err

    train("whole", "--run-dir", "whole", "--iterations", 4)
    train("pp", "--run-dir", "pp")
    train("fsdp", "--resume", "pp", "--iterations", 4)

    found = metrics(tmp_path / "pp")
    assert 4 == len(found)
    for one, other in zip(metrics(tmp_path / "whole"), found, strict=True):
        assert one.keys() == other.keys()
        for name in ("actor.update/loss", "actor.update/kl"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
        # What is rounding in a gradient becomes a step of Adam, and changes the next one.
        norms = (each["actor.update/grad_norm"] for each in (one, other))
        assert next(norms) == pytest.approx(next(norms), rel=1e-3)
        assert one["reward/mean"] == other["reward/mean"]

    for place in ("whole", "pp"):
        assert 0 == rlflow("export", place, "-o", f"{place}-out").code
    one, other = (load_file(tmp_path / f"{p}-out" / "model.safetensors") for p in ("whole", "pp"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) < 1e-4, name
