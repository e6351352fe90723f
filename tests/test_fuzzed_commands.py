"""Any value of any option is taken, or refused by name: never an error of rlflow's own."""

from __future__ import annotations

import click
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from rlflow.cli.main import cli
from tests.budget import examples
from tests.conftest import PIPELINES

PIPELINE = PIPELINES / "grpo_arithmetic.py"
# Commands that start nothing, and end by themselves.
COMMANDS = ("check", "plan", "viz", "diff", "simulate", "tune", "run")
# What would look for a cluster, wait, or write where it is told.
LEFT_OUT = {"help", "optimize", "output", "address", "run_dir", "sweep"}
# A value that an option takes, which edits make a nearly right one.
TAKEN = {
    "acceptance": "0.7",
    "allow_changes": "lr,kl_coef",
    "backend": "ray",
    "deadline": "600s",
    "devices": "cpu:2@4GB",
    "engine": "sglang",
    "explain": "actor.update",
    "from_": "runs/a:actor.rollout",
    "host_memory": "512GB",
    "lengths": "prompt=512,response=mean:1800,p95:4000,max:8192",
    "model_shape": "actor=qwen2.5-7b",
    "only": "actor.rollout",
    "placement": "split",
    "record": "actor.rollout=every:5",
    "reserve": "8%",
    "save_every": "50,600s",
    "set": "group_size=16",
    "track": "wandb=PROJECT",
}
WORDS = (
    *("cpu", "h100", "split", "actor", "qwen3-30b-a3b", "sglang", "max", "lr=", "group_size="),
    *("0", "1", "8", "64", "-1", "0.5", "1e-5", "1e400", "nan", "inf", "٣", "²", "9" * 30, "08"),
    *(":", "@", "=", ",", "..", "/", "%", "GB", "TiB", "m", " ", "\n", "\x1b[31m", "{", "'", "é"),
)
# What a process can be given as an argument.
ARGUMENTS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
PIECES = st.sampled_from(WORDS) | st.text(ARGUMENTS, max_size=4)
# Of the command line, the graph, the plan: nothing was started.
REFUSED = (2, 3, 4)
fuzzed = settings(
    max_examples=examples(4),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def options(command: str) -> list[click.Option]:
    """The options of a command that take a value."""
    found = cli.commands[command].params
    return [
        one
        for one in found
        if isinstance(one, click.Option) and not one.is_flag and one.name not in LEFT_OUT
    ]


@st.composite
def values(draw, option):
    """What an option takes, with up to three pieces put in or in the place of others."""
    text = TAKEN.get(option.name, "1")
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, len(text)))
        text = text[:begin] + draw(PIECES) + text[end:]
    return text


@st.composite
def words_of(draw, command):
    """Words of a command: one option or two, and their values."""
    words = []
    for option in draw(st.lists(st.sampled_from(options(command)), min_size=1, max_size=2)):
        words += [option.opts[-1], draw(values(option))]
    return words


def taken_or_refused(rlflow, command, words):
    """Whether a command takes its words, or says by name what is wrong with them."""
    dry = ["--dry-run"] if command == "run" else []
    result = rlflow(command, PIPELINE, *dry, *words)
    line = (command, words)
    assert "E900" not in result.err, (line, result.err)
    assert result.code in REFUSED if result.code else "error[" not in result.err, (line, result)
    assert result.code == 0 or result.err, (line, "nothing is said")
    assert "\x1b[31m" not in result.err, line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", ["--record-cap", "1e400"]),
        ("plan", ["--stream", "²"]),
        ("check", ["--devices", "cpu:2@..4GB"]),
        ("run", ["--from-weights", "1"]),
        ("simulate", ["--iterations", "9" * 30]),
    ],
)
def test_values_that_were_bugs(rlflow, monkeypatch, tmp_path, command, words):
    monkeypatch.chdir(tmp_path)
    taken_or_refused(rlflow, command, words)


@pytest.mark.parametrize("command", COMMANDS)
@fuzzed
@given(data=st.data())
def test_any_value_of_an_option(command, rlflow, monkeypatch, tmp_path, data):
    monkeypatch.chdir(tmp_path)
    taken_or_refused(rlflow, command, data.draw(words_of(command)))
