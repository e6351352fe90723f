"""GRPO of a model in stages: what one process learns; its checkpoint goes on in another layout."""

from __future__ import annotations

import json
import shutil
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
    lora: bool = False


def ones(response: str, answer: str) -> float:
    return response.count("1") / 6


def placed(count: int, **on: int | str) -> rf.Placement:
    return rf.Placement(pools={"all": count}, assign={"*": rf.on("all", **on)})


@rf.pipeline(
    placements={
        "whole": placed(1),
        "pp": placed(2, pp=2),
        "fsdp": placed(2),
        "split": placed(2, pp=2, schedule="zero-bubble", micro=128),
        "split-dp": placed(4, pp=2, schedule="zero-bubble", fsdp=1, micro=128),
        "split-tp": placed(4, pp=2, schedule="zero-bubble", tp=2, micro=128),
        "virtual": placed(2, pp=2, virtual=2, micro=128),
        "virtual-dp": placed(4, pp=2, virtual=2, fsdp=1, micro=128),
        "virtual-fsdp": placed(4, pp=2, virtual=2, micro=128),
        "virtual-tp": placed(4, pp=2, virtual=2, tp=2, micro=128),
    },
)
def grpo(cfg: Config) -> None:
    lora = rf.LoRA(rank=4, alpha=16, targets=("q_proj", "down_proj")) if cfg.lora else None
    # With a small eps Adam makes steps of what is rounding in a gradient.
    actor = rf.Model("actor", "model", optimizer=rf.AdamW(lr=1e-3, eps=1e-3), lora=lora)
    ref = rf.Model("ref", "model")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    ref_lp = ops.log_probs(ref, samples)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    ops.update(actor, samples, advantages, ref_lp, loss=rf.PolicyLoss("ppo_clip", kl_coef=0.05))
"""
DEVICES = {"whole": 1, "pp": 2, "fsdp": 2, "split": 2, "virtual": 2}
LAYERS = 5


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the pipeline and a drawn model of as many layers as make uneven stages."""
    import torch
    import transformers

    found = tmp_path_factory.mktemp("stages")
    (found / "p.py").write_text(PIPELINE)
    torch.manual_seed(5)
    options = {"num_hidden_layers": LAYERS, "initializer_range": 0.1}
    config = transformers.AutoConfig.from_pretrained(TINY, **options)
    config.layer_types = ["full_attention"] * LAYERS
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(found / "model")
    for file in TINY.glob("token*"):
        shutil.copy(file, found / "model")
    return found


def metrics(run: Path):
    return [
        json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("place", "then", "lora"),
    [
        pytest.param("pp", "fsdp", False, id="pp"),
        pytest.param("split", "fsdp", False, id="split"),
        pytest.param("split", "pp", True, id="split-lora", marks=pytest.mark.extra),
        pytest.param("split-dp", "split", False, id="split-dp", marks=pytest.mark.extra),
        pytest.param("split-tp", "split-dp", False, id="split-tp", marks=pytest.mark.extra),
        pytest.param("virtual", "fsdp", False, id="virtual", marks=pytest.mark.extra),
        pytest.param("virtual", "virtual", True, id="lora", marks=pytest.mark.extra),
        pytest.param("virtual-dp", "virtual-dp", False, id="dp", marks=pytest.mark.extra),
        pytest.param("virtual-fsdp", "pp", True, id="fsdp-lora", marks=pytest.mark.extra),
        pytest.param("virtual-tp", "virtual", False, id="tp", marks=pytest.mark.extra),
    ],
)
def test_stages_learn_what_one_process_does_and_go_on_elsewhere(
    place, then, lora, home, rlflow, monkeypatch
):
    """Metrics of each iteration, and the weights at last; saved by one layout, read by another."""
    monkeypatch.chdir(home)
    run, whole = f"{place}-{lora}", f"whole-{lora}"

    def train(place, *more):
        words = ("--placement", place, "--threads", 1, "--set", f"lora={lora}")
        devices = ("--devices", f"cpu:{DEVICES.get(place, 4)}")
        made = rlflow("run", "p.py", *words, *devices, "--check-sync", *more)
        assert 0 == made.code, made.err

    def exported(run):
        assert 0 == rlflow("export", run, "-o", f"{run}-out").code
        return load_file(home / f"{run}-out" / "model.safetensors")

    if not Path(whole).exists():
        train("whole", "--run-dir", whole, "--iterations", 3)
        exported(whole)
    train(place, "--run-dir", run, "--iterations", 2)
    train(then, "--resume", run, "--iterations", 3)

    one, found = metrics(home / whole), metrics(home / run)
    assert len(one) == len(found) == 3
    for before, after in zip(one, found, strict=True):
        assert before.keys() == after.keys()
        assert before["reward/mean"] == after["reward/mean"]
        for name in ("actor.update/loss", "actor.update/kl", "actor.update/grad_norm"):
            assert before[name] == pytest.approx(after[name], abs=1e-5), name
    start = load_file(home / "model" / "model.safetensors")
    one, found = load_file(home / f"{whole}-out" / "model.safetensors"), exported(run)
    assert start.keys() == one.keys() == found.keys()
    assert any(float((tensor - one[name]).abs().max()) > 1e-3 for name, tensor in start.items())
    for name, tensor in one.items():
        assert float((tensor - found[name]).abs().max()) < 1e-5, name
