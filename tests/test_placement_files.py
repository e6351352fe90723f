"""What `tune` finds is run by one paste; an engine is named on the command line."""

from __future__ import annotations

import shlex

import pytest

from rlflow.cli.continuing import words_of_run
from rlflow.cli.options import read_run
from tests.conftest import PIPELINES

GSM8K = PIPELINES / "grpo_gsm8k.py"
GRPO = PIPELINES / "grpo_arithmetic.py"
ON = ("--devices", "h100:8", "--model-shape", "qwen2.5-7b")


def test_the_line_that_tune_prints_goes_on_with_what_it_finds(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    last = rlflow("tune", GRPO, "--devices", "cpu:2").err.strip().splitlines()[-1]
    first, then = last.removeprefix("next: ").split(" && ")
    assert 0 == rlflow(*shlex.split(first)[1:]).code
    words = shlex.split(then)[1:]
    assert "run" == words[0]
    assert '"*"' in (tmp_path / "best.py").read_text()
    found = rlflow("plan", *words[1:])
    assert 0 == found.code, found.err
    assert "placement best on cpu:2" in found.out
    for command in ("viz", "simulate", "check"):
        assert 0 == rlflow(command, *words[1:]).code
    both = rlflow("diff", GRPO, "--placement", "best.py", "--placement", "split", "--staleness", 1)
    assert both.out.split()[:2] == ["best", "split"]
    assert "<= 1 update old" in both.out


def test_a_placement_in_shares_is_taken_to_any_number_of_devices(rlflow, tmp_path):
    best = tmp_path / "best.py"
    shape = ("--model-shape", "qwen2.5-7b")
    best.write_text(
        "import rlflow as rf\nplacement = rf.Placement(pools={'train': '3/4', 'gen': '1/4'}, "
        "assign={'*': rf.on('train'), 'actor.rollout': rf.on('gen')})\n"
    )
    words = ("plan", GSM8K, "--placement", best, *shape)
    assert "train [0:6], gen [6:8]" in rlflow(*words, "--devices", "h100:8").out
    assert "train [0:48], gen [48:64]" in rlflow(*words, "--devices", "h100:64").out
    refused = rlflow(*words, "--devices", "h100:10")
    assert (4, True) == (refused.code, "of 8 or 12" in refused.err)
    assert "actions on cpu:4" in rlflow("check", GSM8K, "--placement", best).out


@pytest.mark.parametrize("text", ["x = 1", "placement = 3"])
def test_a_file_without_a_placement_is_said(rlflow, tmp_path, text):
    (tmp_path / "mine.py").write_text(text)
    result = rlflow("plan", GRPO, "--placement", tmp_path / "mine.py")
    assert (2, True) == (result.code, "error[E316]" in result.err)
    assert "error[E306]" in rlflow("plan", GRPO, "--placement", tmp_path / "no.py").err


@pytest.mark.parametrize("command", ["plan", "simulate", "viz", "check"])
def test_an_engine_is_named_for_all_rollouts(rlflow, command):
    words = (command, GSM8K, *ON, "--placement", "split", "--engine", "sglang")
    more = ("--level", "plan", "--format", "text") if command == "viz" else ()
    result = rlflow(*words, *more)
    assert 0 == result.code, result.err
    assert "actor@gen/sglang" in result.out or command in ("simulate", "check")
    assert "E245" in rlflow(command, GSM8K, *ON, *more, "--engine", "sglagn").err


@pytest.mark.parametrize("name", ["grpo_gsm8k.py", "ppo_gsm8k.py"])
def test_the_pipelines_of_gsm8k_have_a_placement_with_sglang(rlflow, name):
    result = rlflow("plan", PIPELINES / name, *ON, "--placement", "sglang")
    assert "actor@gen/sglang" in result.out, result.err


def test_a_run_goes_on_with_the_file_that_its_placement_came_from():
    named, filed = (read_run([str(GRPO), "--placement", said]) for said in ("split", "a/best.py"))
    assert ("--placement", "split") == words_of_run(named, "split")[-2:]
    assert ("--placement", "a/best.py") == words_of_run(filed, "best")[-2:]
