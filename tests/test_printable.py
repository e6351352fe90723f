"""Text from outside: what a terminal would obey is shown, and no line passes for one of ours."""

from __future__ import annotations

import json
import unicodedata

import hypothesis.strategies as st
from hypothesis import given, settings
from rich.console import Console

from rlflow.cli.shell.printed import json_text
from rlflow.errors import Finding, RunError, printable
from rlflow.runtime.display import Display
from tests.budget import examples

FORGED = "\x1b[31merror[E999]\x1b[0m: forged\r\nerror[E999]: forged\x85error[E999]: forged"


@given(st.text(st.characters()))
def test_what_is_left_is_shown_and_letters_stay(text):
    shown = printable(text)

    kinds = {unicodedata.category(letter) for letter in shown if letter not in "\n\t"}
    assert not kinds & {"Cc", "Cs", "Zl", "Zp"}
    assert shown == printable(shown)
    if text.isprintable():
        assert text == shown


def test_marks_that_turn_text_are_shown():
    assert "a\\u202eb\\u2066" == printable("a\u202eb\u2066")


def test_a_finding_has_one_line_that_begins_as_an_error():
    finding = Finding(code="E640", what=FORGED, got=FORGED, expected=FORGED, fix=FORGED)
    text = RunError(finding, summary="continue with: rlflow").render()

    assert "\x1b" not in text
    assert 1 == sum(line.startswith("error[") for line in text.splitlines())
    assert text.startswith("error[E640]: \\x1b[31merror[E999]")


def test_what_a_run_says_is_shown(capsys):
    display = Display(Console(stderr=True))
    display.warn(FORGED)
    display.say("\x1b]0;title\x07")
    err = capsys.readouterr().err

    assert "\x1b" not in err
    assert not [line for line in err.splitlines() if line.startswith("error")]
    assert "\\x1b]0;title\\x07" in err


@settings(max_examples=examples(60))
@given(st.text(max_size=20))
def test_json_stays_the_same_value(text):
    made = json_text({"a": text})

    assert {"a": text} == json.loads(made)
    assert made.replace("\n", "") == printable(made).replace("\n", "")
