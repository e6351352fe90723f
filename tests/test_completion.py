"""Completion in shells: bash on a terminal, and what a shell is told for each place of a line."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import PIPELINES, ROOT

GRPO = str(PIPELINES / "grpo_arithmetic.py")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("rlflow pl", ["plain,plan"]),
        ("rlflow run --dev", ["plain,--devices"]),
        (f"rlflow plan {GRPO} --placement spl", ["plain,split"]),
        (f"rlflow run {GRPO} --set group_s", ["plain,group_size="]),
        (f"rlflow run {GRPO} --only actor.r", ["plain,actor.rollout"]),
        ("rlflow run nothing.py --placement spl", []),
        ("rlflow plan pipe", ["file,pipe"]),
        ("rlflow samples runs/", ["file,runs/"]),
        ("rlflow viz --level ", ["plain,graph", "plain,plan"]),
    ],
)
def test_each_place_of_a_line_is_completed(rlflow, monkeypatch, line, found):
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    monkeypatch.setenv("_RLFLOW_COMPLETE", "bash_complete")

    assert found == rlflow().out.split()


class Terminal:
    """A shell on a terminal of its own: what is typed, and what it shows."""

    def __init__(self, folder: Path) -> None:
        ours, its = pty.openpty()
        termios.tcsetwinsize(its, (24, 400))  # a longer line would be scrolled
        environment = {**os.environ, "PS1": "ready> ", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{folder}:{environment['PATH']}"
        self.shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=its,
            stdout=its,
            stderr=its,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        os.close(its)
        self.ours = ours

    def types(self, text: str, until: str, seconds: float = 60) -> str:
        """Type a text; what is shown up to a mark."""
        os.write(self.ours, text.encode())
        shown, end = "", time.monotonic() + seconds
        while until not in shown:
            assert time.monotonic() < end, shown
            if select.select([self.ours], [], [], 1)[0]:
                shown += os.read(self.ours, 4096).decode()
        return shown

    def close(self) -> None:
        self.shell.kill()
        self.shell.wait()
        os.close(self.ours)


@pytest.fixture
def terminal(tmp_path):
    """A bash that finds this rlflow, with its completion, as the documents say to start it."""
    program = tmp_path / "rlflow"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlflow.cli.main "$@"\n')
    program.chmod(0o755)
    made = Terminal(tmp_path)
    try:
        made.types('eval "$(rlflow completion bash)"; echo all "set"\n', "all set")
        yield made
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_real_bash_completes_with_tab(terminal):
    terminal.types("rlflow sim\t", "simulate ")
    terminal.types("pipelines/grpo_ari\t", "pipelines/grpo_arithmetic.py ")
    terminal.types("--placement sp\t", "split ")
    terminal.types("--model-s\t", "--model-shape ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_is_printed_is_of_the_shell(rlflow, shell):
    done = rlflow("completion", shell)

    assert f"_RLFLOW_COMPLETE={shell}_complete" in done.out
    assert 0 == done.code
    if shutil.which(shell):
        words = [shell, "-n", "/dev/stdin"]
        subprocess.run(words, input=done.out, text=True, check=True)
