"""Runs on more ranks than there are prompts: the samples of a prompt are drawn and lie apart."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

PIPELINE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    iterations: int = 3
    prompts: int = 2
    n: int = 4


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


def trained_on(count: int) -> rf.Placement:
    assign = {"*": rf.on("gen"), "actor.train": rf.on("train"), "ref": rf.on("train")}
    return rf.Placement(pools={"gen": 1, "train": count}, assign=assign)


def on(count: int) -> rf.Placement:
    return rf.Placement(pools={"all": count}, assign={"*": rf.on("all")})


placed = {"one": trained_on(1), "three": trained_on(3), "1": on(1), "2": on(2), "4": on(4)}


@rf.pipeline(placements=placed)
def grpo(cfg: Config) -> None:
    actor = rf.Model("actor", "pipelines/assets/arith-tiny", optimizer=rf.AdamW(lr=1e-3, eps=1e-3))
    ref = rf.Model("ref", "pipelines/assets/arith-tiny")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.prompts)
    samples = ops.rollout(actor, prompts, n=cfg.n, max_new_tokens=6, temperature=1.5)
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


def test_samples_of_one_prompt_are_the_same_on_one_rank_two_and_four(rlflow, tmp_path):
    """Tokens bit for bit in every iteration, what is learned of them to float tolerance."""
    (tmp_path / "p.py").write_text(PIPELINE)
    size = ("--set", "prompts=1", "--set", "n=8", "--set", "iterations=2")
    drawn, found = {}, {}
    for count in (1, 2, 4):
        words = ("--backend", "ray", "--devices", f"cpu:{count}@1GB", "--threads", "1", *size)
        run = tmp_path / f"run{count}"
        place = ("--placement", str(count))
        made = rlflow("run", str(tmp_path / "p.py"), *place, *words, "--run-dir", run)
        assert 0 == made.code, made.err
        shown = rlflow("samples", str(run), "--iteration", "all", "--limit", "500", "--json")
        rows = sorted(json.loads(shown.out), key=lambda row: (row["iteration"], row["row"]))
        kept = ("prompt", "response_tokens", "group", "sample", "reward", "answer", "row_id")
        drawn[count] = [{name: row[name] for name in kept} for row in rows]
        lines = (run / "metrics.jsonl").read_text().splitlines()
        found[count] = [json.loads(line)["metrics"] for line in lines]
        plan = json.loads((run / "plan.json").read_text())
        takes = next(a["takes"] for a in plan["actions"] if a["id"] == "actor.rollout")
        assert count == takes.get("pieces", 1)
    assert 16 == len(drawn[1])
    assert 1 < len({str(row["response_tokens"]) for row in drawn[1]})
    assert drawn[1] == drawn[2] == drawn[4]
    for count in (2, 4):
        for one, several in zip(found[1], found[count], strict=True):
            for name in ("reward/mean", "actor.update/loss", "actor.update/grad_norm"):
                assert one[name] == pytest.approx(several[name], rel=1e-4, abs=1e-6), name
