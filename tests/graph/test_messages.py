"""Messages about what a user has misspelt: the near name, the line, no traceback of a library."""

from __future__ import annotations

import inspect

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.cli.config import trace_error
from rlflow.errors import GraphError, near_names
from rlflow.graph.pipeline import validation_findings
from rlflow.scheduler.devices.cluster import distinct_amounts
from rlflow.scheduler.plan.text import numbers
from rlflow.scheduler.search.text import rate


def options_of(name: str) -> list[str]:
    """The keywords of an op; none where it takes any, or is no function."""
    function = getattr(ops, name)
    parameters = inspect.signature(function).parameters.values() if callable(function) else ()
    if any(each.kind == each.VAR_KEYWORD for each in parameters):
        return []
    return [each.name for each in parameters if each.kind == each.KEYWORD_ONLY]


OPS = sorted(name for name in ops.__all__ if options_of(name))


def test_an_unknown_pool_is_told_by_its_line(tmp_path, rlflow):
    text = 'import rlflow as rf\nrf.Placement(pools={"all": 1}, assign={"*": rf.on("al")})\n'
    (tmp_path / "p.py").write_text(text)
    result = rlflow("check", tmp_path / "p.py")
    assert 3 == result.code
    assert "error[E134]: assign['*'] names pool 'al'" in result.err
    assert "p.py:2   rf.Placement(" in result.err
    assert "did you mean 'all'" in result.err
    assert 'fix          "*": rf.on("all")' in result.err


def test_a_value_that_a_placement_cannot_have_is_no_traceback(tmp_path, rlflow):
    (tmp_path / "p.py").write_text('import rlflow as rf\nrf.on("all", fsdp="many")\n')
    result = rlflow("check", tmp_path / "p.py")
    assert 2 == result.code
    assert "error[E301]: fsdp: " in result.err
    assert "pydantic" not in result.err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"share": 0, "also": "b"}, 'share: Input should be a part of the prompts, "1/4", or how'),
        ({"also": 3}, 'also: Input should be another pool: also="gen"'),
        ({"also": {"pool": "b", "also": "c"}}, "also= names one pool, and that of 'b' names 'c'"),
        ({"also": "a"}, "also='a' is the pool that has the rest"),
        ({"pools": {"a": 0}}, "pools: pool 'a' should be a number of devices, from 1 on, a list"),
        ({"stream": 0}, "stream: Input should be 'auto', or how many chunks, from 1 on"),
    ],
)
def test_an_option_of_several_kinds_has_one_message(options, what):
    of_all = {"pools": {"a": 1}, "assign": {"*": rf.on("a")}}
    placed = not set(options).isdisjoint(rf.Placement.model_fields)
    with pytest.raises(ValidationError) as caught:
        rf.Placement(**{**of_all, **options}) if placed else rf.on("a", **options)
    (found,) = validation_findings(caught.value, "E301")
    assert what in found.what
    assert bool(found.got) == (found.what.split(":")[0] in options)


@pytest.mark.parametrize("name", OPS)
def test_an_option_that_an_op_does_not_have_is_told_with_those_it_has(name):
    wrong = f"{max(options_of(name), key=len)}s"

    @rf.pipeline()
    def declares(cfg: rf.Config) -> None:
        function = getattr(ops, name)
        function(**{wrong: 1})

    with pytest.raises(TypeError) as caught:
        declares.trace()
    (found,) = trace_error(declares, caught.value).findings
    assert ("E135", f"{name} has no option {wrong!r}") == (found.code, found.what)
    assert wrong[:-1] in found.near
    assert "function(**{wrong: 1})" == found.where.text


def test_near_names_are_named_once():
    assert ("actor.rollout",) == near_names("actor.rolout", ["actor.rollout", "actor.rollout"])


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([3], "3"),
        ([0, 1], "0:2"),
        ([0, 2], "0,2"),
        ([0, 2, 4, 6], "0:7:2"),
        ([0, 1, 2, 3, 8, 9, 10, 11], "0:4,8:12"),
        ([0, 8, 16, 17, 18], "0:17:8,17:19"),
        ([5, 3], "5,3"),
    ],
)
def test_devices_are_printed_as_slices(devices, text):
    assert text == numbers(devices)
    read = [
        number
        for part in text.split(",")
        for number in (range(*map(int, part.split(":"))) if ":" in part else [int(part)])
    ]
    assert devices == read


def test_rates_and_sizes_that_differ_are_printed_so():
    assert ["0.0123", "90.5", "386", "7,540"] == [rate(x) for x in (0.01234, 90.5, 386.2, 7540)]
    assert ("36.55 MB", "36.47 MB") == distinct_amounts(36.549e6, 36.47e6)
    assert ("354.0 GB", "8.0 GB") == distinct_amounts(354e9, 8e9)
    assert ("1.0 kB", "1.0 kB") == distinct_amounts(1000, 1000)
    assert ("2.000000 GB", "1.999999 GB") == distinct_amounts(2e9, 2e9 - 999)


def test_a_placement_that_is_made_by_hand_raises_the_same():
    with pytest.raises(GraphError, match="E134"):
        rf.Placement(pools={"all": 1}, assign={"*": rf.on("other")})
