"""GRPO of mixtures, latent attention, hybrids and Gemma 3: they learn, and over ranks as on one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.conftest import TINY
from tests.engines.hybrids import SMALL, save_hybrid
from tests.engines.latents import BIAS, save_latent
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


def placed(count: int, **layout: int) -> rf.Placement:
    return rf.Placement(pools={"all": count}, assign={"*": rf.on("all", **layout)})


@rf.pipeline(
    placements={
        "whole": placed(1),
        "fsdp": placed(2),
        "ep": placed(2, ep=2),
        "tp": placed(2, tp=2),
        "cp": placed(2, cp=2),
        "pp": placed(2, pp=2),
        "virtual": placed(2, pp=2, virtual=2, micro=128),
        "virtual_ep": placed(4, fsdp=2, ep=2, pp=2, virtual=2, micro=128),
        "fsdp_tp": placed(4, fsdp=2, tp=2),
        "cp_tp": placed(4, cp=2, tp=2),
        "fsdp_pp": placed(4, fsdp=2, pp=2),
        "ep_tp": placed(4, fsdp=2, ep=2, tp=2),
        "replicas": placed(4, fsdp=2),
    }
)
def grpo(cfg: Config) -> None:
    # Far above the rounding of gradients: AdamW makes whole steps of what is below its eps, of
    # which routers of random weights, nearly tied, would choose other experts.
    adam = rf.AdamW(lr=1e-2, eps=1e-4)
    actor = rf.Model("actor", cfg.model, optimizer=adam)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
    samples = ops.rollout(actor, prompts, n=8, max_new_tokens=6)
    advantages = ops.advantage("grpo", samples, ops.reward(ones, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss("ppo_clip"), epochs=2)
"""
SIZES = {"vocab_size": 51, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02}


def save_gemma(family, path, **options):
    """Write a tiny Gemma 3, of which every other layer has a window."""
    torch.manual_seed(0)
    given = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.CONFIG_MAPPING[family](**{**SMALL, **given, **options})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


MAKERS = {
    "qwen3_moe": save_mixture,
    "deepseek_v3": save_latent,
    "qwen3_5_text": save_hybrid,
    "gemma3_text": save_gemma,
}
# Each family on two ranks in every way, and on four in mixes of them.
MIXED = ("ep", "fsdp", "tp", "cp", "pp", "ep_tp", "fsdp_pp", "replicas")
OTHER = ("fsdp", "tp", "cp", "pp", "fsdp_tp", "cp_tp", "fsdp_pp", "replicas")
PLACES = {
    "qwen3_moe": MIXED,
    "deepseek_v3": MIXED,
    "qwen3_5_text": OTHER,
    "gemma3_text": OTHER,
}
FIRST = [(family, places[0]) for family, places in PLACES.items()]
REST = [(family, place) for family, places in PLACES.items() for place in places[1:]]
# What a family learns on one rank, once for all that is compared with it.
WHOLE: dict[str, list[dict[str, float]]] = {}


@pytest.fixture
def run(rlflow, tmp_path, monkeypatch):
    """A run of a family in a placement: the metrics of each iteration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PIPELINE)

    def run(name, place, model="model", iterations=6):
        devices = 1 if place == "whole" else 4 if "_" in place or place == "replicas" else 2
        words = ("--placement", place, "--devices", f"cpu:{devices}", "--threads", 1)
        sets = ("--set", f"model={model}", "--set", f"iterations={iterations}")
        made = rlflow("run", "p.py", *words, *sets, "--run-dir", name)
        assert 0 == made.code, made.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"] for line in lines]

    return run


def saved(family, path, **options):
    """A tiny model of a family with the tokenizer of the tiny model."""
    MAKERS[family](family, path, hidden_size=64, **SIZES, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)


@pytest.mark.parametrize(("family", "place"), FIRST)
def test_it_learns_over_ranks_what_it_learns_on_one(family, place, rlflow, run, tmp_path):
    """Losses and rewards of ranks are one's; what is exported has the form of what was read."""
    saved(family, tmp_path / "model")
    whole = WHOLE[family] = run("whole", "whole")
    rewards = [line["reward/mean"] for line in whole]
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2])
    same(whole, run("apart", place))

    assert 0 == rlflow("export", "apart", "-o", "out").code
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("model", "out"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert all((t == after[n]).all() for n, t in before.items() if n.endswith(BIAS))
    again = run("again", "whole", model="out", iterations=1)
    assert again[0]["reward/mean"] > 1.5 * rewards[0]


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "place"), REST)
def test_it_learns_the_same_in_other_layouts_and_in_mixes_of_them(family, place, run, tmp_path):
    saved(family, tmp_path / "model")
    if family not in WHOLE:
        WHOLE[family] = run("whole", "whole")
    same(WHOLE[family], run("apart", place))


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_mixtures_learn_the_same_with_several_stages_on_a_rank(family, run, tmp_path):
    """With four layers, of which each of two ranks has every other one."""
    saved(family, tmp_path / "model", num_hidden_layers=4)
    whole = run("whole", "whole", iterations=4)
    for place in ("virtual", "virtual_ep"):
        same(whole, run(place, place, iterations=4))


def same(whole, apart):
    """Losses and rewards of ranks are those of one, to 1e-5; of two epochs one is off policy."""
    for one, other in zip(whole, apart, strict=True):
        for name in ("actor.update/loss", "reward/mean"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name
        norms = [each["actor.update/grad_norm"] for each in (one, other)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)
