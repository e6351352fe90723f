"""GRPO with rows whose tokens lie on several ranks: what it learns on one, and written alike."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

PIPELINE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    iterations: int = 2
    model: str = ""


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


def over(**layout):
    pools = {"all": layout.get("fsdp", 1) * layout.get("cp", 1)}
    assign = {"*": rf.on("all", **layout), "actor.rollout": rf.on("all")}
    return rf.Placement(pools=pools, assign=assign)


@rf.pipeline(
    placements={
        "whole": over(),
        "heads": over(fsdp=1, cp=2, cp_by="ulysses"),
        "mixed": over(fsdp=2, cp=2, cp_by="ring"),
    }
)
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-3, eps=1e-3))
    ref = rf.Model("ref", cfg.model)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    loss = rf.PolicyLoss("gspo", kl_coef=0.05)
    ops.update(actor, samples, advantages, ops.log_probs(ref, samples), loss=loss)
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("place", "devices"), [("heads", 2), ("mixed", 4)])
def test_it_learns_with_parts_of_rows_what_it_learns_with_whole_ones(
    place, devices, rlflow, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PIPELINE)
    found, written = {}, {}
    for name, count in (("whole", 1), (place, devices)):
        words = ("--placement", name, "--devices", f"cpu:{count}", "--threads", 1)
        made = rlflow("run", "p.py", *words, "--set", f"model={TINY}", "--run-dir", name)
        assert 0 == made.code, made.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found[name] = [json.loads(line)["metrics"] for line in lines]
        assert 0 == rlflow("export", name, "-o", f"{name}-out").code
        written[name] = load_file(tmp_path / f"{name}-out" / "model.safetensors")

    for one, other in zip(found["whole"], found[place], strict=True):
        for name in ("actor.update/loss", "actor.update/kl", "reward/mean"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
        # One rank adds up its squares in float32.
        norms = (each["actor.update/grad_norm"] for each in (one, other))
        assert next(norms) == pytest.approx(next(norms), rel=1e-4)
    for name, weight in written["whole"].items():
        assert torch.allclose(weight, written[place][name], atol=1e-5), name
