"""An update on more ranks than there are prompts: the samples of a prompt lie apart."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

PIPELINE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    iterations: int = 3


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


def trained_on(count: int) -> rf.Placement:
    assign = {"*": rf.on("gen"), "actor.train": rf.on("train"), "ref": rf.on("train")}
    return rf.Placement(pools={"gen": 1, "train": count}, assign=assign)


@rf.pipeline(placements={"one": trained_on(1), "three": trained_on(3)})
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", "pipelines/assets/arith-tiny", optimizer=rf.AdamW(lr=1e-3, eps=1e-3))
    ref = rf.Model("ref", "pipelines/assets/arith-tiny")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    ref_log_probs = ops.log_probs(ref, samples)
    loss = rf.PolicyLoss("ppo_clip", kl_coef=0.02)
    ops.update(actor, samples, advantages, ref_log_probs, loss=loss)
"""


def test_three_ranks_learn_of_two_prompts_what_one_does(rlflow, tmp_path):
    (tmp_path / "p.py").write_text(PIPELINE)
    found = {}
    for place, devices in (("one", 2), ("three", 4)):
        words = ("--backend", "ray", "--devices", f"cpu:{devices}@2GB", "--threads", "1")
        run = tmp_path / place
        made = rlflow("run", str(tmp_path / "p.py"), "--placement", place, *words, "--run-dir", run)
        assert 0 == made.code, made.err
        lines = (run / "metrics.jsonl").read_text().splitlines()
        found[place] = [json.loads(line)["metrics"] for line in lines]
    plan = json.loads((tmp_path / "three" / "plan.json").read_text())
    rules = {a["id"]: (a.get("takes") or {}).get("rule") for a in plan["actions"]}
    assert "balanced rows" == rules["actor.update"] == rules["ref.log_probs"]
    for one, three in zip(found["one"], found["three"], strict=True):
        for name in ("reward/mean", "actor.update/loss", "actor.update/grad_norm"):
            assert one[name] == pytest.approx(three[name], rel=1e-4, abs=1e-6), name
