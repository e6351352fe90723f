"""`--lengths` on the command line: words, files and runs, and what wins over what."""

from __future__ import annotations

import json

import pytest

import rlflow as rf
from rlflow.cli.commands import Target, declare
from rlflow.cli.planning.lengths import asked_lengths
from rlflow.errors import UsageError
from tests.conftest import PIPELINES

GRPO = PIPELINES / "grpo_arithmetic.py"
H100 = ("--devices", "h100:2", "--placement", "split")


def run_of(folder, rows):
    folder.mkdir()
    lines = [json.dumps({"iteration": n, "metrics": row}) for n, row in enumerate(rows)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, "{not whole"]))
    return folder


def test_a_run_says_its_mean_and_its_longest(tmp_path):
    """The first iteration warms up; an evaluation says no longest; a broken line is left out."""
    named = ("a.rollout/length", "a.rollout/length_max", "eval/length")
    values = [(90.0, 99.0, 1.0), (10.0, 30.0, 1.0), (20.0, 40.0, 1.0)]
    run = run_of(tmp_path / "run", [dict(zip(named, row, strict=True)) for row in values])
    found = asked_lengths(str(run))
    assert rf.Length(15.0, max=35, seen=True) == found.responses
    assert "run run, 2 iterations" == found.source


@pytest.mark.parametrize(
    ("said", "code", "told"),
    [
        ("nothing", "E355", "no such file"),
        ("nothing.jsonl", "E357", "No such file"),
        ("empty", "E357", "no figure in metrics.jsonl"),
        (".", "E357", "metrics.jsonl: No such file"),
    ],
)
def test_what_says_no_lengths_is_named(tmp_path, monkeypatch, said, code, told):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "empty", [{"reward/mean": 1.0}])
    with pytest.raises(UsageError, match=code) as raised:
        asked_lengths(said)
    assert told in raised.value.render()


def test_the_option_wins_over_the_pipeline(tmp_path):
    text = GRPO.read_text()
    said = text.replace("@rf.pipeline(", '@rf.pipeline(\n    lengths="response=3",', 1)
    own = tmp_path / "own.py"
    own.write_text(said.replace("pipelines/assets", str(PIPELINES / "assets")))
    for option, mean in ((None, 3), ("response=5", 5)):
        graph = declare(Target(pipeline=str(own), lengths=option)).graph
        assert mean == graph.lengths.responses.mean


def test_plan_diff_and_simulate_say_what_they_rest_on(rlflow):
    options = (*H100, "--model-shape", "qwen2.5-7b", "--lengths", "prompt=90,response=mean:4,p95:8")
    told = "responses 4 tokens in the mean, 95 % within 8, 12 at most (given), prompts 90 (given)"
    printed = rlflow("plan", GRPO, *options)
    assert told in printed.out
    assert "  range: " in printed.out
    assert "--lengths prompt=90,response=mean:4,p95:8" in printed.err or not printed.err
    assert told in rlflow("simulate", GRPO, *options).out
    plain = rlflow("plan", GRPO, "--devices", "cpu:2", "--placement", "split")
    assert "  range: " not in plain.out
    assert "  inputs: responses 6 tokens in the mean, 12 at most (assumed" in plain.out


def test_diff_compares_placements_world_by_world(rlflow):
    both = ("--placement", "split", "--placement", "async", "--model-shape", "qwen2.5-7b")
    text = rlflow("diff", GRPO, *both, "--devices", "h100:2", "--lengths", "response=5").out
    assert "range, 90 %" in text
    assert "async is " in text
    found = json.loads(rlflow("diff", GRPO, *both, "--devices", "h100:2", "--json").out)
    assert {"times", "low", "high", "wins", "larger_than_uncertain"} == found["range"].keys()


def test_every_door_takes_lengths():
    plan = rf.compile(
        str(GRPO),
        placement="split",
        devices="h100:2",
        model_shape="qwen2.5-7b",
        lengths=rf.Lengths(prompt=90, response=rf.Length(4, 8)),
    )
    assert plan.range.low < plan.range.median < plan.range.high
    words = rf.compile(
        str(GRPO),
        placement="split",
        devices="h100:2",
        model_shape="qwen2.5-7b",
        lengths="prompt=90,response=mean:4,p95:8",
    )
    assert plan.hash == words.hash
    assert str(plan) == str(words)
