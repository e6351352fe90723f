"""Rules of a user's own for spreading rows, by name."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow.errors import GraphError
from rlflow.graph.op import DISPATCHES
from rlflow.graph.user import dispatch


def halves(tokens, groups, parts):
    return [range(len(tokens)), *[[]] * (parts - 1)]


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(dispatch, "_PAIRS", {})


def test_a_pair_is_found_by_the_name_it_was_registered_by():
    assert "first_half" == rf.register_dispatch("first_half", halves)
    assert "another" == rf.register_dispatch("another", halves, lambda parts: parts)

    assert ["another", "first_half"] == dispatch.registered()
    found = dispatch.dispatch_pair("first_half")
    assert (halves, None) == (found.dispatch, found.collect)
    assert dispatch.dispatch_pair("third") is None


def test_a_name_registered_again_is_replaced():
    rf.register_dispatch("mine", lambda tokens, groups, parts: [])
    rf.register_dispatch("mine", halves)

    assert halves is dispatch.dispatch_pair("mine").dispatch


@pytest.mark.parametrize("name", [*DISPATCHES, "whole", "balanced", "generated", "", " ", None, 3])
def test_a_name_that_is_taken_or_none_is_refused(name):
    with pytest.raises(GraphError, match="E122") as caught:
        rf.register_dispatch(name, halves)

    assert f"cannot be named {name!r}" in str(caught.value)
    assert "test_dispatch.py" in str(caught.value)


@pytest.mark.parametrize(
    ("functions", "role"), [((None,), "dispatch"), (("x",), "dispatch"), ((halves, 3), "collect")]
)
def test_what_is_no_function_is_refused(functions, role):
    with pytest.raises(GraphError, match=f"{role} of dispatch rule 'mine' is not a function"):
        rf.register_dispatch("mine", *functions)

    assert [] == dispatch.registered()
