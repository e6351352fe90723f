"""The longer pipelines: each one is sound under every placement, and runs.

What holds for every file of `pipelines/` is in test_catalogue.py.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL, TINY

PLACEMENTS = {
    "grpo_arithmetic.py": ["async", "colocate", "fsdp", "fsdp_tp", "sglang", "split"],
    "grpo_gsm8k.py": ["one", "colocate", "split", "sglang"],
    "ppo_gsm8k.py": ["one", "colocate", "split", "rack", "rack_split", "sglang"],
    "ppo_arithmetic.py": ["colocate", "split"],
    "sft_arithmetic.py": ["colocate"],
}
FILES = sorted(PLACEMENTS)
EXAMPLES = [
    ("tom has 3 apples and buys 4 more. how many has he?", "3+4=7 #### 7"),
    ("a box holds 12 eggs. how many are in 3 boxes?", "12*3=36 #### 36"),
    ("sue had 90 and spent 15.", "90-15=75 #### 75"),
    ("2 teams of 11", "2*11=22 #### 22"),
]


@pytest.mark.parametrize("name", FILES)
def test_every_pipeline_checks_under_every_placement(rlflow, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    result = rlflow("check", PIPELINES / name, *local(name, tmp_path), "--json")
    assert 0 == result.code, result.err
    assert sorted(PLACEMENTS[name]) == sorted(json.loads(result.out)["placements"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", FILES)
def test_no_pipeline_has_a_default_that_the_checks_refuse(rlflow, name):
    result = rlflow("check", PIPELINES / name)
    assert 0 == result.code, result.err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "words", "numbers"),
    [
        ("grpo_arithmetic.py", (*SMALL, "--set", "group_size=4"), ["eval/reward", "reward/mean"]),
        ("ppo_arithmetic.py", SMALL, ["critic.update/loss", "advantage/kl", "eval/reward"]),
        ("sft_arithmetic.py", ("--set", "batch=4"), ["student.update/loss", "sampled/reward"]),
    ],
)
def test_two_iterations(rlflow, tmp_path, monkeypatch, name, words, numbers):
    monkeypatch.chdir(tmp_path)
    options = ("--iterations", 2, "--run-dir", "out", "-q")
    result = rlflow("run", PIPELINES / name, *words, *QUICK, *options)
    assert 0 == result.code, result.err
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [0, 1, 2] == [line.iteration for line in lines]
    for number in numbers:
        assert number in lines[0].metrics


def local(name, folder):
    """Settings that point the pipeline of GSM8K at files of the same form."""
    if not name.endswith("gsm8k.py"):
        return ()
    data = folder / "gsm8k"
    data.mkdir()
    rows = [{"question": question, "answer": answer} for question, answer in EXAMPLES]
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (data / f"{split}.jsonl").write_text(text)
    return ("--set", f"model={TINY}", "--set", f"data={data}", "--set", "max_new_tokens=8")


@pytest.mark.torch
def test_ppo_on_gsm8k_runs_on_local_files(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*local("ppo_gsm8k.py", tmp_path), "--set", "prompts_per_iteration=4")
    options = ("--placement", "one", "--iterations", 1, "--run-dir", "out", "-q")
    result = rlflow("run", PIPELINES / "ppo_gsm8k.py", *words, *options)
    assert 0 == result.code, result.err
    (line,) = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert {"critic.update/loss", "actor.update/loss", "reward/mean"} <= set(line.metrics)


@pytest.mark.torch
def test_gsm8k_on_local_files_of_the_same_form(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (*local("grpo_gsm8k.py", tmp_path), "--set", "group_size=2", *SMALL)
    options = ("--placement", "one", "--iterations", 2, "--run-dir", "out", "-q")
    result = rlflow("run", PIPELINES / "grpo_gsm8k.py", *words, *options)
    assert 0 == result.code, result.err
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [0, 1, 2] == [line.iteration for line in lines]
    assert 0 <= lines[0].metrics["eval/reward"] <= 1
    (last,) = (tmp_path / "out" / "checkpoints").glob("iteration-000002")
    assert {"torch.bfloat16"} == {
        str(tensor.dtype) for tensor in load_file(last / "actor.safetensors").values()
    }


@pytest.mark.torch
def test_gsm8k_needs_its_columns(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = local("grpo_gsm8k.py", tmp_path)
    for split in ("train", "test"):
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text('{"question": "1+1"}\n')
    result = rlflow("run", PIPELINES / "grpo_gsm8k.py", *words, "--placement", "one")
    assert 2 == result.code
    assert "answer" in result.err
    assert not (tmp_path / "runs").exists()
