"""Command lines are written and read by one description: what is written reads as what was said."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlflow.cli.main import cli
from rlflow.cli.options import read_run, repeated, run_words
from tests.budget import examples

RUN = cli.commands["run"]
TEXT = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8)
POSITIVE = st.floats(min_value=1e-9, allow_infinity=False, allow_nan=False)


def values_of(option: click.Parameter) -> st.SearchStrategy:
    """Everything that an option of `rlflow run` may be read as."""
    if isinstance(option, click.Option) and option.is_flag:
        return st.booleans()
    if isinstance(option.type, click.IntRange):
        most = 10**9 if option.type.max is None else option.type.max
        one = st.integers(option.type.min, most)
    elif isinstance(option.type, click.Choice):
        one = st.sampled_from(option.type.choices)
    elif "float" in option.type.name or option.type.name == "time":
        one = POSITIVE
    else:
        one = TEXT
    if option.multiple if isinstance(option, click.Option) else False:
        return st.lists(one, max_size=3).map(tuple)
    unsaid = read_run(["p.py"])[option.name]
    return one if isinstance(option, click.Argument) or unsaid is not None else st.none() | one


@settings(max_examples=examples(200))
@example(read_run(["p.py", "--save-every="]) | {"resume": "-0"})
@given(st.fixed_dictionaries({str(option.name): values_of(option) for option in RUN.params}))
def test_a_written_line_reads_as_what_was_said(values):
    run = values["resume"]
    expected = values | ({"resume": f"./{run}"} if run and run.startswith("-") else {})

    assert expected == read_run(run_words(values))


def test_the_description_is_that_of_the_command():
    assert {option.name for option in RUN.params} == set(read_run(["p.py"]))


def test_a_line_for_another_command_leaves_out_what_that_lacks():
    said = {"pipeline": "a b.py", "settings": ("x=1",), "model_shape": "qwen2.5-7b"}
    assert "'a b.py' --placement split --set x=1" == repeated(said, "split", run=True)
    assert "--model-shape qwen2.5-7b" in repeated(said, "split", run=False)


def test_help_still_lists_every_option():
    text = CliRunner().invoke(cli, ["run", "--help"]).output
    assert all(max(o.opts, key=len) in text for o in RUN.params if isinstance(o, click.Option))


@pytest.mark.parametrize(
    ("words", "found"), [("rlflow pl", "plan"), ("rlflow run --dev", "--devices")]
)
def test_a_shell_completes_commands_and_options(rlflow, monkeypatch, capsys, words, found):
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    monkeypatch.setenv("_RLFLOW_COMPLETE", "bash_complete")
    assert f"plain,{found}" in rlflow().out.split()
