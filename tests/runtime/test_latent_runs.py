"""GRPO of models with latent attention and with layers that carry states: they learn."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file

from tests.conftest import TINY
from tests.engines.hybrids import save_hybrid
from tests.engines.latents import BIAS, save_latent
from tests.runtime.test_mixture_runs import PIPELINE

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

SIZES = {"vocab_size": 51, "eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02}
MAKERS = {"deepseek_v3": save_latent, "qwen3_5_text": save_hybrid}


@pytest.mark.parametrize("family", MAKERS)
def test_it_learns_over_ranks_what_it_learns_on_one(family, rlflow, tmp_path, monkeypatch):
    """Losses and rewards of two ranks are one's; what is exported has the form of what was read."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    MAKERS[family](family, model, hidden_size=64, **SIZES)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, model)
    (tmp_path / "p.py").write_text(PIPELINE)
    found = {}
    for place, devices in (("whole", 1), ("fsdp", 2)):
        words = ("--placement", place, "--devices", f"cpu:{devices}", "--threads", 1)
        made = rlflow("run", "p.py", *words, "--set", f"model={model}", "--run-dir", place)
        assert 0 == made.code, made.err
        lines = (tmp_path / place / "metrics.jsonl").read_text().splitlines()
        found[place] = [json.loads(line)["metrics"] for line in lines]

    rewards = [line["reward/mean"] for line in found["whole"]]
    assert sum(rewards[-2:]) > 2 * sum(rewards[:2])
    for one, other in zip(found["whole"], found["fsdp"], strict=True):
        for name in ("actor.update/loss", "reward/mean"):
            assert one[name] == pytest.approx(other[name], abs=1e-5), name

    assert 0 == rlflow("export", "fsdp", "-o", "out").code
    before, after = (load_file(at / "model.safetensors") for at in (model, tmp_path / "out"))
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    assert all((t == after[n]).all() for n, t in before.items() if n.endswith(BIAS))
    again = ("--placement", "whole", "--devices", "cpu:1", "--threads", 1, "--run-dir", "again")
    made = rlflow("run", "p.py", *again, "--set", "model=out", "--set", "iterations=1")
    assert 0 == made.code, made.err
    line = (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["metrics"]["reward/mean"] > 1.5 * rewards[0]
