"""Reward models with their heads: declared, refused, run, trained, exported, loaded again."""

from __future__ import annotations

import json
import shutil
import struct

import pytest

from tests.conftest import TINY

PIPELINE = """\
import rlflow as rf
from rlflow import ops


def exact(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def judged(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "TINY", optimizer=rf.AdamW(lr=1e-4))
    judge = rf.Model("judge", "JUDGE", head="value"OPTIMIZER)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
    scored = ops.scores(judge, samples, field="reward")
    advantages = ops.advantage("grpo", samples, scored)
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss())
"""
TRAINED = ", optimizer=rf.AdamW(lr=1e-3)"
LEARNS = """\
    reward = ops.reward(exact, samples)
    ops.update(judge, samples, reward, loss=rf.RewardModelLoss("regression"))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(home, judge, *, trained=False):
    text = PIPELINE.replace("TINY", str(TINY)).replace("JUDGE", str(judge))
    text = text.replace("OPTIMIZER", TRAINED if trained else "")
    (home / "judged.py").write_text(text + LEARNS if trained else text)


def with_tensors(home, name, shapes, config=None):
    """The shipped model with more tensors of some shapes, all zero, in a second file."""
    folder = home / name
    shutil.copytree(TINY, folder)
    text = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(text))
    shard, index, header, end = "head.safetensors", {}, {}, 0
    for key, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        index[key], end = shard, end + size
    written = json.dumps(header).encode()
    (folder / shard).write_bytes(struct.pack("<Q", len(written)) + written + bytes(end))
    with (folder / "model.safetensors").open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        names = set(json.loads(stream.read(size))) - {"__metadata__"}
    index |= dict.fromkeys(names, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


HIDDEN = json.loads((TINY / "config.json").read_text())["hidden_size"]
ONE = [1, HIDDEN]


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_judge_without_a_head_is_refused_before_anything_starts(rlflow, home, command):
    write(home, TINY)

    found = rlflow(command, "judged.py")

    assert 2 == found.code
    assert "error[E524]" in found.err
    assert "judged.py:12" in found.err


@pytest.mark.parametrize(
    ("shapes", "config", "trained", "expected"),
    [
        ({"score.weight": ONE}, {}, False, "that of judge is score.weight of its files"),
        ({"v_head.summary.weight": ONE}, {}, False, "judge is v_head.summary.weight of its files"),
        ({"rate.out.weight": ONE}, {}, False, "rate.out.weight of its files, known by its shape"),
        ({}, {}, True, "that of judge is fresh: its files hold none"),
        ({"score.weight": [3, HIDDEN]}, {}, False, "error[E525]"),
        ({"score.weight": [3, HIDDEN]}, {}, True, "error[E525]"),
        ({"score.0.weight": [8, HIDDEN], "score.2.weight": [1, 8]}, {}, False, "error[E525]"),
        (
            {"score.0.weight": [8, HIDDEN], "score.2.weight": [1, 8]},
            {"architectures": ["Qwen2ForRewardModel"]},
            False,
            "judge is score.0.weight and score.2.weight of its files",
        ),
    ],
)
def test_the_plan_says_where_a_head_comes_from(rlflow, home, shapes, config, trained, expected):
    write(home, with_tensors(home, "judge", shapes, config), trained=trained)

    found = rlflow("plan", "judged.py")

    assert expected in found.out + found.err


@pytest.mark.slow
@pytest.mark.torch
def test_a_trained_head_is_exported_and_judges_again(rlflow, home):
    import torch
    from transformers import AutoModelForTokenClassification

    from rlflow.runtime.record.metrics import read_metrics
    from tests.runtime.whole_checkpoints import load_checkpoint

    write(home, TINY, trained=True)
    words = ("--iterations", 1, "-q", "--threads", 1)
    assert 0 == rlflow("run", "judged.py", *words, "--run-dir", "out").code
    assert 0 == rlflow("export", "out", "--model", "judge", "-o", "judge").code

    made = AutoModelForTokenClassification.from_pretrained(home / "judge")
    saved = load_checkpoint(home / "out" / "checkpoints").components["judge"]
    assert made.config.num_labels == 1
    assert torch.equal(saved["value_head.weight"], made.score.weight)
    assert torch.equal(saved["value_head.bias"], made.score.bias)
    assert saved["value_head.weight"].abs().max() > 0

    write(home, home / "judge")
    done = rlflow("run", "judged.py", *words, "--run-dir", "again")
    assert 0 == done.code, done.err
    lines = [line.metrics for line in read_metrics(home / "again" / "metrics.jsonl")]
    assert lines[0]["judge.scores/std"] > 0
