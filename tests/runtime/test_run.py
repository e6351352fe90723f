"""Whole runs, in this process: the same numbers whatever the placement or the memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlflow.runtime.metrics import read_metrics
from tests.conftest import PIPELINES, QUICK, SMALL

pytestmark = pytest.mark.torch

GRPO = PIPELINES / "grpo_arithmetic.py"
PPO = PIPELINES / "ppo_arithmetic.py"
GROUP = (*SMALL, "--set", "group_size=4")


@pytest.fixture
def train(rlflow, tmp_path, monkeypatch):
    """Run a pipeline for a few iterations; returns the run directory."""
    monkeypatch.chdir(tmp_path)

    def call(name, pipeline, *words, iterations=3):
        where = tmp_path / name
        options = ("--iterations", iterations, "--run-dir", where, "-q")
        result = rlflow("run", pipeline, *QUICK, *words, *options)
        assert 0 == result.code, result.err
        return where

    return call


def weights(run: Path):
    """The tensors of the last checkpoint by component and name."""
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_equal(first: Path, second: Path) -> None:
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    ours, others = weights(first), weights(second)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        same = tensor.contiguous().view(-1).numpy().tobytes()
        assert same == others[name].contiguous().view(-1).numpy().tobytes(), name


def kinds(run: Path) -> set[str]:
    return {action["kind"] for action in json.loads((run / "plan.json").read_text())["actions"]}


@pytest.mark.parametrize("kl_coef", [0, 0.05])
def test_grpo_has_the_same_bits_colocated_and_split(train, kl_coef):
    words = (*GROUP, "--set", f"kl_coef={kl_coef}", "--devices", "cpu:2")
    together = train("together", GRPO, *words, "--placement", "colocate")
    apart = train("apart", GRPO, *words, "--placement", "split")
    assert "reshard" in kinds(apart)
    assert "reshard" not in kinds(together)
    assert_equal(together, apart)


def test_ppo_has_the_same_bits_colocated_and_split(train):
    together = train("together", PPO, *SMALL, "--devices", "cpu:2", "--placement", "colocate")
    apart = train("apart", PPO, *SMALL, "--devices", "cpu:2", "--placement", "split")
    assert_equal(together, apart)


@pytest.mark.parametrize(
    ("pipeline", "words"), [(GRPO, (*GROUP, "--set", "kl_coef=0.05")), (PPO, SMALL)]
)
def test_memory_pressure_does_not_change_a_bit(train, pipeline, words):
    wide = train("wide", pipeline, *words, "--devices", "cpu:1")
    tight = train("tight", pipeline, *words, "--devices", "cpu:1@43MB")
    assert not {"sleep", "wake"} & kinds(wide)
    assert {"sleep", "wake"} <= kinds(tight)
    assert_equal(wide, tight)


def test_another_seed_changes_the_numbers(train):
    one = train("one", GRPO, *GROUP, "--devices", "cpu:1", iterations=1)
    two = train("two", GRPO, *GROUP, "--devices", "cpu:1", "--set", "seed=1", iterations=1)
    assert (one / "metrics.jsonl").read_bytes() != (two / "metrics.jsonl").read_bytes()


def test_metrics_have_one_line_an_iteration_and_one_for_the_end(train):
    run = train("run", GRPO, *GROUP, "--devices", "cpu:1", "--set", "eval_every=3", iterations=4)
    lines = read_metrics(run / "metrics.jsonl")
    assert [0, 1, 2, 3, 4] == [line.iteration for line in lines]
    assert [0, 3, 4] == [line.iteration for line in lines if "eval/reward" in line.metrics]
    assert {"eval"} == {name.partition("/")[0] for name in lines[-1].metrics}


def test_every_action_leaves_a_span(train):
    run = train("run", GRPO, *GROUP, "--devices", "cpu:2", "--placement", "split", iterations=2)
    lines = [json.loads(line) for line in (run / "spans" / "main.jsonl").read_text().splitlines()]
    spans = [(line["action"], line["iteration"]) for line in lines if "action" in line]
    plan = json.loads((run / "plan.json").read_text())
    for action in plan["actions"]:
        name = action["id"]
        expected = {i for i in (0, 1) if i % action["every"] == action["phase"]}
        expected |= {2} if action["closing"] else set()
        assert expected == {iteration for span, iteration in spans if span == name}, name
    assert len(spans) == len(set(spans))


def test_what_is_in_flight_is_bounded(train):
    """Prompts wait for nothing, and ran fifteen iterations ahead of a slow update."""
    run = train("sft", PIPELINES / "sft_arithmetic.py", "--set", "batch=8", iterations=8)
    lines = [json.loads(line) for line in (run / "spans" / "main.jsonl").read_text().splitlines()]
    starts, ends = {}, {}
    for span in lines[1:]:
        starts[span["action"], span["iteration"]] = span["start"]
        ends[span["action"], span["iteration"]] = span["end"]
    for iteration in range(2, 8):
        assert starts["prompts", iteration] >= ends["student.update", iteration - 2]
