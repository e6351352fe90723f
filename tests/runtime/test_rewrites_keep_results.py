"""Weights after some iterations are the same with a rewrite and without it."""

from __future__ import annotations

import json

import pytest

from rlflow.runtime.record.metrics import read_metrics
from rlflow.scheduler.passes import rewrite
from tests.conftest import TINY
from tests.runtime.whole_checkpoints import load_checkpoint

pytestmark = pytest.mark.torch

FILE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    model: str = "MODEL"
    ref: bool = True
    again: bool = False
    cold: bool = False
    old: bool = False
    lora: bool = False
    against: str = "auto"
    kl_coef: float = 0.1


def digits(response: str, answer: str) -> float:
    return len(set(response) & set(answer)) / 4


@rf.pipeline(placements={
    "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
    "ahead": rf.Placement(
        pools={"a": 1, "b": 1},
        assign={"*": rf.on("a"), "actor.rollout": rf.on("b")},
        staleness=1,
    ),
    "sharded": rf.Placement(pools={"a": 2}, assign={"*": rf.on("a", fsdp=2)}),
})
def tried(cfg: Config) -> None:
    adapters = rf.LoRA(rank=2, alpha=8, targets=("q_proj", "down_proj")) if cfg.lora else None
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-2), lora=adapters)
    ref = rf.Model("ref", cfg.model)
    samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=4), n=4, max_new_tokens=6)
    reward = ops.reward(digits, samples)
    given = []
    if cfg.ref:
        given.append(ops.log_probs(ref, samples))
    if cfg.old:
        given.append(ops.log_probs(actor, samples))
    if cfg.again:
        ops.metrics(ops.log_probs(ref, samples, name="again"), name="seen")
    if cfg.cold:
        cold = ops.log_probs(ref, samples, temperature=0.5, name="cold")
        adv = ops.advantage("grpo", samples, reward, cold, kl_coef=0.05)
    else:
        adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss("ppo_clip", kl_coef=cfg.kl_coef, old=cfg.against)
    ops.update(actor, samples, adv, *given, loss=loss)
"""


@pytest.fixture
def train(rlflow, tmp_path, monkeypatch):
    """Run the pipeline for three iterations, some rewrites switched off; its run directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tried.py").write_text(FILE.replace("MODEL", str(TINY)))

    def call(name, *words, off=(), placement="colocate"):
        kept = tuple(one for one in rewrite.REWRITES if one[0] not in off)
        assert len(kept) == len(rewrite.REWRITES) - len(off)
        options = ("-q", "--threads", 1, "--iterations", 3, "--run-dir", name)
        options += ("--placement", placement)
        with monkeypatch.context() as patch:
            patch.setattr(rewrite, "REWRITES", kept)
            done = rlflow("run", "tried.py", *(w for s in words for w in ("--set", s)), *options)
        assert 0 == done.code, done.err
        return tmp_path / name

    return call


def plan(run):
    return json.loads((run / "plan.json").read_text())


def nodes(run):
    return {action["node"] for action in plan(run)["actions"]}


def models(run):
    return {instance["model"] for instance in plan(run)["instances"]}


def logged(run):
    return [dict(row.metrics) for row in read_metrics(run / "metrics.jsonl")]


def weights(run):
    checkpoint = load_checkpoint(run / "checkpoints")
    return {
        f"{part} {name}": tensor
        for part, tensors in checkpoint.components.items()
        for name, tensor in tensors.items()
    }


def assert_same_bits(first, second):
    """Weights, optimizer state, and every number that both have logged."""
    import torch

    ours, others = weights(first), weights(second)
    assert ours.keys() == others.keys()
    assert all(torch.equal(ours[name], others[name]) for name in ours)
    for one, other in zip(logged(first), logged(second), strict=True):
        shared = one.keys() & other.keys()
        assert "actor.update/loss" in shared
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}


@pytest.mark.slow
def test_equal_nodes(train):
    on, off = train("on", "again=true"), train("off", "again=true", off=["equal nodes"])
    apart = train("apart", "again=true", off=["equal nodes", "one forward"])

    assert "again" not in nodes(on) | nodes(off)
    assert "again" in nodes(apart)
    assert_same_bits(on, off)
    assert_same_bits(on, apart)


@pytest.mark.rows(1)
def test_a_shared_forward(train):
    """The temperatures matter: the reward reads one, the loss the other."""
    on, off = train("on", "cold=true"), train("off", "cold=true", off=["one forward"])

    assert "cold" in nodes(off) - nodes(on)
    assert_same_bits(on, off)


@pytest.mark.slow
def test_nodes_and_models_that_nobody_needs(train):
    on, never = train("on", "kl_coef=0"), train("never", "kl_coef=0", "ref=false")

    assert {"actor"} == models(on)
    assert_same_bits(on, never)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        pytest.param("colocate", (), marks=pytest.mark.slow),
        ("colocate", ("cold=true",)),
        pytest.param("ahead", ("against=rollout",), marks=pytest.mark.slow),
        pytest.param("sharded", (), marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.extra]),
    ],
)
def test_a_reference_served_by_the_base_weights(placement, words, train):
    """Rollouts that run ahead are ordered with the updates, forwards of the base are not."""
    words = ("lora=true", *words)
    on = train("on", *words, placement=placement)
    off = train("off", *words, placement=placement, off=["base weights"])

    assert ({"actor"}, {"actor", "ref"}) == (models(on), models(off))
    assert_same_bits(on, off)
    assert any(row["actor.update/kl"] > 0 for row in logged(on))


@pytest.mark.slow
def test_the_current_policy_for_the_old_one(train):
    """The dropped forward is one without gradient, of the same weights: rounding apart."""
    import torch

    on, off = train("on", "old=true"), train("off", "old=true", off=["old policy"])

    assert "actor.log_probs" in nodes(off) - nodes(on)
    ours, others = weights(on), weights(off)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, others[name], rtol=1e-4, atol=1e-6), name
