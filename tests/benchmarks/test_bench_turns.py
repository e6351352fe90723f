"""The comparisons of a GPU, as far as a CPU goes: pairs of turns, and both sides of an update."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace

import models
import pytest
import torch
import vs_sglang
import vs_torch
import vs_trl
from plain_torch import PlainTrainer
from turns import MODEL_SIZES, Turns, filled, in_turns, model_directory

from rlflow.engines.hf.loading import load_model
from tests.conftest import ROOT

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("ours", "target", "ratio", "met"),
    [
        ((1.0, 2.2, 3.0), 1.0, 1.0, "yes"),
        ((1.1, 2.2, 3.0), 1.0, 1.1, "NO"),
        ((4.0, 4.0, 4.0), None, 2.0, ""),
    ],
)
def test_a_ratio_is_the_median_over_the_pairs(ours, target, ratio, met):
    found = Turns(case="c", ours=ours, theirs=(1.0, 2.0, 3.0), target=target, beside={"MFU": "1%"})
    assert pytest.approx(ratio) == found.ratio
    assert [met, "MFU 1%"] == list(found.row()[-2:])


@pytest.mark.slow
def test_turns_are_a_b_b_a_after_one_of_each():
    order = []
    seconds = in_turns(lambda: order.append("a"), lambda: order.append("b"), pairs=3, device="cpu")
    assert "abab" + "ba" + "ab" == "".join(order)
    assert [3, 3] == [len(taken) for taken in seconds]


def test_a_gpu_that_is_not_there_is_said():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    options = argparse.Namespace(device="cuda:0", size=None, pairs=None, quick=False)
    with pytest.raises(SystemExit, match="sees no GPU"):
        filled(options)


def test_plain_torch_makes_the_step_that_its_formula_says(tmp_path):
    """Its first loss is minus the mean log-prob of each row alone, computed in float64."""
    size = replace(MODEL_SIZES["tiny"], layers=1)
    path = str(model_directory(size, 64))
    prompts, responses = vs_torch.rows_of(size.vocabulary, 3, 2, 7, 12)
    model = load_model(path, dtype=torch.float32, device="cpu", init="random", seed=3)
    weights = {name: shard.tensor.clone() for name, shard in model.shards().items()}
    plain = PlainTrainer(
        path, weights, device="cpu", dtype=torch.float32, micro_tokens=40, recompute=True, lr=1e-2
    )
    exact = load_model(path, dtype=torch.float64, device="cpu", init="random", seed=3)
    for name, shard in exact.shards().items():
        shard.tensor.copy_(weights[name])
    expected = 0.0
    with torch.no_grad():
        for prompt, response in zip(prompts, responses, strict=True):
            row = torch.cat([prompt, response])
            found = plain_scores(exact, row)
            wanted = found[len(prompt) - 1 : -1].gather(-1, response[:, None])
            expected -= float(wanted.sum())
    expected /= sum(map(len, responses))

    losses = [plain.step(prompts, responses) for _ in range(3)]

    assert expected == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] < losses[1] < losses[0]


def plain_scores(model, row):
    """Log-probs of a row alone by the unmodified model, float64 `[tokens, vocabulary]`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = str(model_directory(replace(MODEL_SIZES["tiny"], layers=1), 64))
    there = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float64)
    there.load_state_dict({n: s.tensor for n, s in model.shards().items()}, strict=False)
    return there(row[None]).logits[0].log_softmax(-1)


def test_what_is_reached_is_the_work_over_the_median_turn():
    size = MODEL_SIZES["tiny"]
    work = {"passed": 10.0, "predicted": 4.0, "pairs": 55.0}
    layer = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128
    forward = 2 * 2 * layer * 10 + 2 * 96 * 64 * 4 + 4 * 55 * 2 * 4 * 16
    seconds = ((1e-6, 9.0, 2e-6), (4e-6, 4e-6, 4e-6))
    rates = [3 * forward / each / 1e9 for each in (2e-6, 4e-6)]

    found = vs_torch.reached(size, work, seconds, gpu=False)

    assert {"Gflop/s": f"{rates[0]:.2f} and {rates[1]:.2f}"} == found


def test_what_is_not_installed_is_left_out_and_ends_well(capsys):
    with pytest.raises(SystemExit) as ended:
        vs_sglang.require_sglang("/nowhere/bin/python")
    assert 0 == ended.value.code
    assert "has no SGLang" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        vs_sglang.require_sglang("/bin/false")
    assert 0 == ended.value.code


def test_a_case_of_a_gpu_tells_both_sides_of_its_lengths_and_dtype():
    on_cpu, on_gpu = (
        vs_trl.Case(size=vs_trl.ON_GPUS, kl_coef=0.04, fixed=True, device=device)
        for device in ("cpu", "cuda:0")
    )
    assert {} == on_cpu.shape
    assert {"new_tokens": 256, "dtype": "bfloat16"} == on_gpu.shape


def test_a_model_for_longer_rows_is_the_same_but_for_its_context(tmp_path):
    base = tmp_path / "m"
    base.mkdir()
    models.write(base / "config.json", {"max_position_embeddings": 8, "vocab_size": 3})
    made = models.longer_directory(base, 512)
    assert {"max_position_embeddings": 512, "vocab_size": 3} == models.read(made / "config.json")
    assert 8 == models.read(base / "config.json")["max_position_embeddings"]


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("name", ["vs_torch", "vs_generate", "vs_head"])
def test_a_comparison_runs_small_on_a_cpu(name):
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert 0 == done.returncode, done.stderr
    assert "rlflow ms" in done.stdout
