"""The longer pipelines: each one is sound under every placement, and runs.

What holds for every file of `pipelines/` is in test_catalogue.py.
"""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from rlflow.cli.commands import Target, compile_target
from rlflow.cli.config import load_pipeline
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL, TINY

PLACEMENTS = {
    "grpo_arithmetic.py": ["async", "colocate", "fsdp", "fsdp_tp", "sglang", "split"],
    "grpo_gsm8k.py": ["one", "colocate", "split", "sglang", "sglang_colocate", "sglang_one"],
    "ppo_gsm8k.py": [
        *("one", "colocate", "split", "rack", "rack_split"),
        *("sglang", "sglang_colocate", "sglang_one"),
    ],
    "ppo_arithmetic.py": ["colocate", "split"],
    "sft_arithmetic.py": ["colocate"],
    "vlm_grpo.py": ["colocate", "fsdp", "split"],
}
FILES = sorted(PLACEMENTS)
EXAMPLES = [
    ("tom has 3 apples and buys 4 more. how many has he?", "3+4=7 #### 7"),
    ("a box holds 12 eggs. how many are in 3 boxes?", "12*3=36 #### 36"),
    ("sue had 90 and spent 15.", "90-15=75 #### 75"),
    ("2 teams of 11", "2*11=22 #### 22"),
]


@pytest.mark.parametrize("name", FILES)
def test_pipelines_have_these_placements(name):
    """That each of them checks is in `test_catalogue.py`."""
    assert sorted(PLACEMENTS[name]) == sorted(load_pipeline(str(PIPELINES / name)).placements)


def test_a_check_of_local_files_makes_no_run(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "ppo_gsm8k.py"
    result = rlflow("check", PIPELINES / name, *local(name, tmp_path), "--json")
    assert 0 == result.code, result.err
    assert sorted(PLACEMENTS[name]) == sorted(json.loads(result.out)["placements"])
    assert not (tmp_path / "runs").exists()


def on_gpus(name, placement, devices, shape):
    target = Target(
        pipeline=str(PIPELINES / name), placement=placement, devices=devices, model_shape=shape
    )
    return compile_target(target).compiled.plan


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("pipeline", ["grpo_gsm8k.py", pytest.param("ppo_gsm8k.py", marks=SLOW)])
@pytest.mark.parametrize(
    ("placement", "devices", "shape", "ranks"),
    [
        ("sglang_one", "h100:1@73.6GB", "qwen2.5-0.5b", 1),
        pytest.param("sglang_one", "h100:1@73.6GB", "qwen2.5-1.5b", 1, marks=SLOW),
        ("sglang_colocate", "h100:8@73.6GB", "qwen2.5-7b", 2),
        pytest.param("sglang", "h100:8@73.6GB", "qwen2.5-7b", 1, marks=SLOW),
    ],
)
def test_sglang_fits_on_gpus_that_keep_a_twelfth_back(pipeline, placement, devices, shape, ranks):
    plan = on_gpus(pipeline, placement, devices, shape)

    (engine,) = plan.engines
    assert ("sglang", ranks) == (engine.engine_plan.settings.engine, engine.tp)
    trained = next(i for i in plan.instances if i.model == "actor" and i.trained)
    assert trained.recompute
    together = set(engine.devices) == set(trained.devices)
    assert together == (placement != "sglang")
    used = {device: peak for device, peak in plan.peaks.items() if device >= 0}
    assert len(used) == int(devices.partition(":")[2].partition("@")[0])
    assert all(0 < peak <= plan.budget(device) == 73_600_000_000 for device, peak in used.items())


def test_the_pool_of_the_only_gpu_has_its_share():
    plan = on_gpus("grpo_gsm8k.py", "sglang_one", "h100:1", "qwen2.5-0.5b")

    (engine,) = plan.engines
    held = dict(each for part in plan.parts if part.instance == engine.name for each in part.holds)
    assert 81559 * 2**19 == held["weights"] + held["keys and values"], "half of a GPU"


@pytest.mark.slow
@pytest.mark.torch
def test_supervised_learning_evaluates_on_both_kinds_of_samples(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--set", "batch=4", "--iterations", 2, "--run-dir", "out", "-q")
    result = rlflow("run", PIPELINES / "sft_arithmetic.py", *QUICK, *options)
    assert 0 == result.code, result.err
    lines = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [0, 1, 2] == [line.iteration for line in lines]
    assert {"student.update/loss", "sampled/reward"} <= set(lines[0].metrics)


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


@pytest.mark.slow
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
    # What bfloat16 weights are trained on, and the one form in which they are saved.
    assert {"torch.float32"} == {
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


@pytest.mark.slow
@pytest.mark.torch
def test_a_model_that_sees_learns_what_is_drawn(rlflow, tmp_path):
    """It begins with a guess among four colours."""
    words = ("--placement", "colocate", "--threads", 1, "--set", "eval_every=120")
    options = ("--iterations", 120, "--run-dir", tmp_path / "run", "-q")
    result = rlflow("run", PIPELINES / "vlm_grpo.py", *words, *options)
    assert 0 == result.code, result.err
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    held_out = [line.metrics["eval/reward"] for line in lines if "eval/reward" in line.metrics]

    assert held_out[0] < 0.35
    assert held_out[-1] > 0.8
