"""A run that trains adapters: what it saves, how it goes on, what is exported."""

from __future__ import annotations

import pytest

from rlflow.runtime.checkpoint import load_checkpoint
from tests.conftest import TINY

pytestmark = pytest.mark.torch

FILE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    model: str = "MODEL"


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(placements={
    "together": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
    "split": rf.Placement(
        pools={"a": 1, "b": 1}, assign={"actor": rf.on("a"), "actor.rollout": rf.on("b")}
    ),
})
def adapted(cfg: Config) -> None:
    adapters = rf.LoRA(rank=2, alpha=8, targets=("q_proj", "down_proj"))
    actor = rf.Model("actor", cfg.model, optimizer=rf.AdamW(lr=1e-2), lora=adapters)
    samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=4), n=4, max_new_tokens=6)
    adv = ops.advantage("grpo", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.fixture
def pipeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapted.py").write_text(FILE.replace("MODEL", str(TINY)))
    return "adapted.py"


def weights(path):
    checkpoint = load_checkpoint(path / "checkpoints")
    return {
        f"{part} {name}": tensor
        for part, tensors in checkpoint.components.items()
        for name, tensor in tensors.items()
    }


def test_checkpoints_hold_adapters_and_a_resumed_run_goes_on(rlflow, pipeline, tmp_path):
    import torch

    words = ("-q", "--threads", 1)
    assert 0 == rlflow("run", pipeline, *words, "--iterations", 2, "--run-dir", "whole").code
    assert 0 == rlflow("run", pipeline, *words, "--iterations", 1, "--run-dir", "cut").code
    again = rlflow("run", pipeline, *words, "--iterations", 2, "--run-dir", "cut", "--resume")
    assert 0 == again.code, again.err

    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")

    assert expected.keys() == found.keys()
    assert all(name.endswith(("lora_A", "lora_B")) for name in expected)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_copy_for_the_rollout_gets_the_adapters(rlflow, pipeline, tmp_path):
    import torch

    words = ("-q", "--threads", 1, "--iterations", 2)
    for placement in ("together", "split"):
        done = rlflow("run", pipeline, *words, "--placement", placement, "--run-dir", placement)
        assert 0 == done.code, done.err

    expected, found = weights(tmp_path / "together"), weights(tmp_path / "split")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_export_is_a_plain_model_with_the_adapters_in_it(rlflow, pipeline, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    done = rlflow("run", pipeline, "-q", "--threads", 1, "--iterations", 1, "--run-dir", "out")
    assert 0 == done.code, done.err
    assert 0 == rlflow("export", "out", "-o", "model").code

    start, found = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for path in (TINY, tmp_path / "model")
    )
    saved = load_checkpoint(tmp_path / "out" / "checkpoints").components["actor"]
    assert start.keys() == found.keys()
    for name, before in start.items():
        layer = name.removesuffix(".weight")
        expected = before.detach()
        if f"{layer}.lora_A" in saved:
            expected = expected + 4 * saved[f"{layer}.lora_B"] @ saved[f"{layer}.lora_A"]
        assert torch.allclose(expected, found[name], atol=1e-6), name
    changed = [name for name in start if not torch.equal(start[name], found[name])]
    assert {"q_proj", "down_proj"} == {name.split(".")[-2] for name in changed}
