"""Starting says what it does: lines without a terminal, a view that clears itself with one."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from rlflow.runtime.record import stages
from rlflow.runtime.record.stages import stage, telling
from tests.conftest import ROOT

GRPO = ROOT / "pipelines" / "grpo_arithmetic.py"

SHOWN_CURSOR = "\x1b[?25h"
HIDDEN_CURSOR = "\x1b[?25l"


def console(*, terminal):
    # rich asks the environment too: a dumb terminal is none.
    settings = {"TERM": "xterm"}
    return Console(
        file=io.StringIO(), force_terminal=terminal, force_interactive=terminal, _environ=settings
    )


def told(shown, **options):
    with telling(shown, **options):
        with stage("reading data"), stage("reading [a].jsonl"):
            pass
        with pytest.raises(KeyboardInterrupt), stage("starting Ray"):
            raise KeyboardInterrupt
    with stage("after it all"):
        pass
    return shown.file.getvalue()


def test_plain_lines_without_a_terminal():
    assert ["reading data", "reading [a].jsonl", "starting Ray"] == told(
        console(terminal=False)
    ).splitlines()


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_where_nobody_looks_on(terminal):
    assert "" == told(console(terminal=terminal), quiet=True)


def test_a_terminal_is_left_clean_by_an_interrupt():
    text = told(console(terminal=True))

    assert "starting Ray" in text
    assert text.rindex(HIDDEN_CURSOR) < text.rindex(SHOWN_CURSOR)
    assert text.count(HIDDEN_CURSOR) == text.count(SHOWN_CURSOR) == 2


def test_what_lasted_leaves_a_line_on_a_terminal(monkeypatch):
    monkeypatch.setattr(stages, "WORTH_A_LINE", 0.0)

    text = told(console(terminal=True))

    assert "reading data: 0.0 s\n" in text
    assert "starting Ray: " not in text, "it was interrupted"


def test_standard_output_is_left_alone(capsys):
    with telling(console(terminal=True)), stage("reading data"):
        assert sys.stdout.__class__.__module__.partition(".")[0] != "rich"
        sys.stdout.write("a result\n")

    assert "a result\n" == capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("word", ["--no-color", "--quiet", "--json"])
def test_a_start_is_told_on_standard_error(rlflow, word):
    result = rlflow("run", GRPO, "--dry-run", "--devices", "cpu:1", word)

    expected = "reading data\nplanning\nmeasuring prompts\n" if word == "--no-color" else ""
    assert (0, expected) == (result.code, result.err)
    assert "reading data" not in result.out
