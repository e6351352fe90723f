"""GRPO of models that see: over ranks as on one, with a tower that is trained, or left as it is."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from rlflow.modelfiles.pictures.towers import model_part
from tests.conftest import PIPELINES

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.ray]

SHAPES = str(PIPELINES / "assets" / "shapes-tiny")
PIPELINE = """\
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    iterations: int = 3
    model: str = ""
    freeze: str = ""


def close(response: str, answer: str) -> float:
    return len(set(response) & set(answer)) / len(set(answer))


def placed(count: int, **layout: int) -> rf.Placement:
    return rf.Placement(pools={"all": count}, assign={"*": rf.on("all", **layout)})


@rf.pipeline(
    placements={
        "whole": placed(1),
        "fsdp": placed(2),
        "tp": placed(2, tp=2),
        "cp": placed(2, cp=2),
        "pp": placed(2, pp=2),
        "replicas": placed(4, tp=2),
    }
)
def grpo(cfg: Config) -> None:
    # Above the rounding of gradients: AdamW makes whole steps of what is below its eps.
    adam = rf.AdamW(lr=1e-3, eps=1e-4)
    actor = rf.Model("actor", cfg.model, optimizer=adam, freeze=cfg.freeze or ())
    samples = ops.rollout(actor, ops.prompts(rf.data.shapes(), batch=8), n=4, max_new_tokens=6)
    adv = ops.advantage("grpo", samples, ops.reward(close, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"), epochs=2)
"""


@pytest.fixture
def run(rlflow, tmp_path, monkeypatch):
    """A run in a placement: the metrics of each iteration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").write_text(PIPELINE)

    def run(name, place, freeze):
        devices = 1 if place == "whole" else 4 if "_" in place or place == "replicas" else 2
        words = ("--placement", place, "--devices", f"cpu:{devices}", "--threads", 1)
        sets = ("--set", f"model={SHAPES}", "--set", f"freeze={freeze}")
        made = rlflow("run", "p.py", *words, *sets, "--run-dir", name)
        assert 0 == made.code, made.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"] for line in lines]

    return run


@pytest.mark.extra
@pytest.mark.timeout(900)
@pytest.mark.parametrize("freeze", ["", "vision"])
def test_ranks_learn_what_one_learns(freeze, rlflow, run, tmp_path):
    """Rewards and losses are one's, and so is what is exported, a frozen tower as it was read."""
    whole = run("whole", "whole", freeze)
    assert 0 == rlflow("export", "whole", "-o", "one").code
    start, one = load_file(f"{SHAPES}/model.safetensors"), load_file("one/model.safetensors")
    changed = {model_part(name) for name in start if (start[name] != one[name]).any()}
    assert changed == {"language", "projector"} | ({"vision"} - {freeze})
    for place in PLACES:
        apart = run(place, place, freeze)
        for mine, other in zip(whole, apart, strict=True):
            for name in ("actor.update/loss", "reward/mean"):
                assert mine[name] == pytest.approx(other[name], abs=1e-5), (place, name)
            norms = [each["actor.update/grad_norm"] for each in (mine, other)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-3), place
        assert 0 == rlflow("export", place, "-o", f"{place}-out").code
        found = load_file(f"{place}-out/model.safetensors")
        assert found.keys() == one.keys()
        assert all((found[name] - one[name]).abs().max() < 1e-4 for name in one), place


PLACES = ("fsdp", "tp", "cp", "pp", "replicas")
