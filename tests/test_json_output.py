"""`--json` of every command: one document on standard output, of one style, and nothing else."""

from __future__ import annotations

import json
import re
import signal

import click
import pytest

from rlflow.cli.main import cli
from tests.conftest import PIPELINES, QUICK, TINY, process

GRPO = PIPELINES / "grpo_arithmetic.py"
FEW = ("--set", "prompts_per_iteration=4", "--set", "group_size=4", *QUICK)
PLAN = ("--threads", "1")
# What is typed after a command, where `RUN` is the directory of a run.
WORDS = {
    "bisect": ("RUN", "RUN"),
    "check": (GRPO,),
    "completion": ("zsh",),
    "diff": (GRPO, *PLAN),
    "doctor": (),
    "eval": ("RUN", "-n", 2, "--limit", 4, "--threads", 1),
    "export": ("RUN", "-o", "weights"),
    "idle": ("RUN",),
    "init": ("mine", "--model", TINY, "--data", "mine.jsonl"),
    "launch": (GRPO, "--slurm", "--devices", "cpu:2", "--dry-run"),
    "plan": (GRPO, *PLAN),
    "profile": (GRPO, *FEW, "--iterations", 2),
    "recipes": (),
    "rehearse": (GRPO, "--devices", "h100:1"),
    "replay": ("RUN", "--iteration", 0),
    "report": ("RUN",),
    "run": (GRPO, *FEW, "--iterations", 1),
    "samples": ("RUN",),
    "simulate": (GRPO, *PLAN),
    "trace": ("RUN",),
    "tune": (GRPO, "--top", 1, *PLAN),
    "viz": (GRPO,),
    "watch": ("RUN",),
}
OF_A_RUN = {name for name, words in WORDS.items() if "RUN" in words} | {"profile", "run"}
NAME = re.compile(r"[a-z][a-z0-9_]*")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_command_has_the_option_and_is_walked_here():
    assert set(WORDS) == set(cli.commands)
    for name, command in cli.commands.items():
        said = [p for p in command.params if isinstance(p, click.Option) and "--json" in p.opts]
        assert ["Print JSON only."] == [option.help for option in said], name


def document(text):
    """What was printed as JSON; its names are of one style, at its top or in its rows."""
    found = json.loads(text)
    for each in found if isinstance(found, list) else [found]:
        assert isinstance(each, dict)
        assert all(NAME.fullmatch(name) for name in each), [*each]
        assert list(each) == sorted(each)
    return found


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", sorted(set(WORDS) - OF_A_RUN - {"rehearse"}))
def test_what_is_printed_parses(rlflow, tmp_path, name):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 8)
    done = rlflow(name, *WORDS[name], "--json")

    assert 0 == done.code, done.err
    assert document(done.out)


def test_a_picture_is_written_and_a_document_says_where(rlflow):
    done = rlflow("viz", GRPO, "-o", "grpo.svg", "--json")

    assert {"file": "grpo.svg", "format": "svg", "level": "graph"} == document(done.out)
    refused = rlflow("viz", GRPO, "--format", "svg", "--json")
    assert (2, "") == (refused.code, refused.out)
    assert "-o FILE" in refused.err
    refused = rlflow("plan", GRPO, "--explain", "actor.update", "--json")
    assert (2, "") == (refused.code, refused.out)


def test_what_is_wrong_is_no_document(rlflow):
    failed = rlflow("plan", GRPO, "--set", "group_sise=4", "--json")

    assert (2, "") == (failed.code, failed.out)
    assert "error[" in failed.err


@pytest.mark.slow
@pytest.mark.torch
def test_what_a_run_and_what_is_read_of_it_print_parses(rlflow, tmp_path):
    made = rlflow("run", *WORDS["run"], "--run-dir", "first", "--json")
    assert 0 == made.code, made.err
    assert "first" == document(made.out)["run_dir"]
    for name in sorted((OF_A_RUN | {"rehearse"}) - {"run", "watch"}):
        words = ["first" if word == "RUN" else word for word in WORDS[name]]
        done = rlflow(name, *words, "--json")
        assert 0 == done.code, done.err
        assert document(done.out), name
    watching = process("watch", "first", "--json", cwd=tmp_path)
    said = ""
    while not said.endswith("}\n"):
        said += watching.stdout.readline()
    assert document(said)["address"].startswith("http://127.0.0.1:")
    watching.send_signal(signal.SIGINT)
    rest, err = watching.communicate(timeout=60)
    assert ("", 0) == (rest, watching.returncode), err
