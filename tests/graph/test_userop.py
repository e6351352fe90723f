"""Options of `@rf.op`: how rows reach the ranks that an op runs on."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow.errors import GraphError


def made(**options):
    @rf.op(**options)
    def judged(reward: rf.Row[float]) -> rf.Row[float]:
        return reward

    return judged.op


@pytest.mark.parametrize(
    ("options", "dispatched"),
    [
        ({"per": "row"}, "split"),
        ({"per": "group"}, "split"),
        ({"per": "batch"}, "first"),
        ({"per": "row", "dispatch": "all"}, "all"),
        ({"per": "batch", "dispatch": "all"}, "all"),
        ({"per": "row", "dispatch": "by_length"}, "by_length"),
        ({"per": "group", "dispatch": "parts"}, "parts"),
    ],
)
def test_rows_reach_ranks_as_said_or_as_granularity_allows(options, dispatched):
    assert dispatched == made(**options).dispatched


def test_parts_may_differ_unless_the_op_refuses():
    assert "pad" == made(per="row").uneven
    assert "refuse" == made(per="row", uneven="refuse").uneven


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"per": "rows"}, "an op with per='rows'"),
        ({"per": "row", "dispatch": None}, "an op with dispatch=None"),
        ({"per": "batch", "dispatch": "split"}, "per=\"batch\" and dispatch='split'"),
        ({"per": "batch", "dispatch": "parts"}, "per=\"batch\" and dispatch='parts'"),
        ({"per": "row", "uneven": "padded"}, "an op with uneven='padded'"),
    ],
)
def test_options_that_no_op_can_have_are_refused_where_they_are_written(options, says):
    with pytest.raises(GraphError, match="E123") as caught:
        made(**options)

    assert says in str(caught.value)
    assert "test_userop.py" in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(GraphError) as caught:
        made(per="rows", uneven="no")

    assert 2 == len(caught.value.findings)
