"""Whole runs on Ray: the numbers are the local backend's, and sharding changes none of them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlflow.runtime.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL, TINY

pytestmark = [pytest.mark.ray, pytest.mark.torch]

GRPO = PIPELINES / "grpo_arithmetic.py"
GROUP = (*SMALL, "--set", "group_size=4")

GREEDY = f"""
import zlib
import rlflow as rf
from rlflow import ops

class Config(rf.Config):
    rows: int = 12

def judge(response: str, answer: str) -> float:
    return float(sum(map(ord, response)) % 7)

@rf.op(per="batch")
def digest(response: rf.Row[str]) -> rf.Row[float]:
    import torch
    from rlflow.batch import strings
    number = zlib.crc32("|".join(strings(response)).encode())
    return torch.full((len(response),), float(number % 2**20))

def placement(devices, **layout):
    return rf.Placement(
        pools={{"all": devices}},
        assign={{
            "*": rf.on("all", **layout),
            "actor.rollout": rf.on("all", tp=layout.get("tp", 1)),
        }},
    )

@rf.pipeline(placements={{
    "one": placement(1),
    "dp2": placement(2, fsdp=1),
    "fsdp2": placement(2, fsdp=2),
    "tp2": placement(2, fsdp=1, tp=2),
    "fsdp2tp2": placement(4, fsdp=2, tp=2),
    "hsdp": placement(4, fsdp=2),
    "hybrid": rf.Placement(
        pools={{"train": [0, 1], "gen": [1, 2]}},
        assign={{"*": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")}},
    ),
}})
def greedy(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=3e-4))
    ref = rf.Model("ref", {str(TINY)!r})
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.rows)
    samples = ops.rollout(actor, prompts, n=1, max_new_tokens=6, temperature=0.0)
    reward = ops.reward(judge, samples)
    ref_lp = ops.log_probs(ref, samples)
    adv = ops.advantage("reinforce++", samples, reward)
    ops.update(actor, samples, adv, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.1))
    ops.metrics(digest(samples))
"""


@pytest.fixture
def train(rlflow, tmp_path, monkeypatch):
    """Run a pipeline; returns the run directory."""
    monkeypatch.chdir(tmp_path)

    def call(name, pipeline, *words, iterations=3):
        where = tmp_path / name
        options = ("--iterations", iterations, "--run-dir", where, "-q")
        result = rlflow("run", pipeline, *words, *options)
        assert 0 == result.code, result.err
        return where

    return call


def weights(run: Path):
    """The tensors of the last checkpoint by component and name."""
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_close(one: Path, many: Path, iterations: int) -> None:
    """The same tokens in every iteration, and all other numbers to float32 tolerance."""
    whole = [line.metrics for line in read_metrics(one / "metrics.jsonl")]
    parts = [line.metrics for line in read_metrics(many / "metrics.jsonl")]
    assert iterations == len(whole) == len(parts)
    for iteration, (left, right) in enumerate(zip(whole, parts, strict=True)):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if "digest" in name:
                assert value == right[name], (iteration, name)
            assert math.isclose(value, right[name], rel_tol=2e-3, abs_tol=2e-4), (iteration, name)


def kinds(run: Path) -> set[str]:
    return {action["kind"] for action in json.loads((run / "plan.json").read_text())["actions"]}


@pytest.mark.parametrize("placement", ["colocate", "split"])
def test_one_process_a_device_has_the_bits_of_one_process(train, placement):
    words = (*QUICK, *GROUP, "--set", "kl_coef=0.05", "--devices", "cpu:2")
    here = train("here", GRPO, *words, "--placement", placement)
    there = train("there", GRPO, *words, "--placement", placement, "--backend", "ray")

    assert "transfer" in kinds(there)
    assert "transfer" not in kinds(here)
    assert (here / "metrics.jsonl").read_bytes() == (there / "metrics.jsonl").read_bytes()
    ours, others = weights(here), weights(there)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name


@pytest.mark.parametrize("placement", ["dp2", "fsdp2", "tp2", "fsdp2tp2", "hsdp"])
def test_sharded_ranks_make_the_same_tokens_and_losses(train, tmp_path, placement):
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY)
    devices = 4 if placement in ("fsdp2tp2", "hsdp") else 2
    one = train("one", file, "--placement", "one", "--threads", "1", iterations=20)
    words = ("--placement", placement, "--devices", f"cpu:{devices}", "--threads", "1")

    many = train("many", file, *words, "--check-sync", iterations=20)

    assert_close(one, many, iterations=20)


@pytest.mark.slow
def test_parts_that_sleep_on_one_of_their_devices_change_no_number(train, tmp_path):
    """Beside training a copy of the weights sleeps, and shards of the optimizer; others stay."""
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY)
    words = ("--placement", "hybrid", "--threads", "1")
    roomy = train("roomy", file, *words, "--devices", "cpu:3@1GB")

    tight = train("tight", file, *words, "--devices", "cpu:3@8.5MB", "--check-sync")

    parts = json.loads((tight / "plan.json").read_text())["parts"]
    stays = {part["name"]: part["stays"] for part in parts if "stays" in part}
    assert [2] == stays["actor@gen/weights"]
    assert [0] == stays["actor@train/optimizer"]
    assert (roomy / "metrics.jsonl").read_bytes() == (tight / "metrics.jsonl").read_bytes()


def test_two_nodes_make_the_same_tokens_as_one_process(train, tmp_path, two_nodes):
    file = tmp_path / "greedy.py"
    file.write_text(GREEDY)
    one = train("one", file, "--placement", "one", "--threads", "1", iterations=5)
    words = ("--placement", "fsdp2tp2", "--devices", "cpu:4", "--threads", "1")

    many = train("many", file, *words, "--address", two_nodes, "--check-sync", iterations=5)

    plan = (many / "plan.txt").read_text()
    assert "by collective (across hosts or GPUs)" in plan
    ranks = re.findall(r"^\d +cpu +(\S+) ", plan, flags=re.MULTILINE)
    assert ["127.0.0.2", "127.0.0.2", "127.0.0.10", "127.0.0.10"] == ranks
    assert_close(one, many, iterations=5)
