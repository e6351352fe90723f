"""The rows of a generation, answered in every order and lost on the way."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import flat, lengths
from rlflow.contract.values import Reach
from rlflow.engines.process.client.link import LostError
from rlflow.engines.process.client.rows.answers import Rows, WrongAnswerError
from rlflow.graph.rules.completion_order import ended_rows

pytestmark = pytest.mark.torch


def answered(row, size, reason="stop"):
    return {
        "row": row,
        "tokens": array("q", range(row, row + size)).tobytes(),
        "log_probs": array("f", [-0.5 * row] * size).tobytes(),
        "reason": reason,
        "cached": 2,
        "versions": ["3"],
    }


class Played:
    """Messages in a fixed order; a LostError among them is raised."""

    def __init__(self, messages):
        self.messages = iter(messages)

    def next(self):
        message = next(self.messages)
        if isinstance(message, Exception):
            raise message
        return message


def rows(count, *plays, stopped=False):
    asked = []

    def ask(wanted):
        asked.append(wanted)
        return Played(plays[len(asked) - 1])

    made = Rows(
        count,
        ask,
        stopped=lambda: stopped,
        give_up=lambda reason: RuntimeError(f"gone: {reason}"),
        vocabulary=20,
        most=lambda row: 6,
    )
    return made, asked


@st.composite
def generations(draw):
    """Sizes of rows, and the messages of an engine that makes them a few at a time."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    width = draw(st.integers(1, len(sizes)))
    waiting, running, messages = list(range(len(sizes))), {}, []
    while waiting or running:
        while waiting and len(running) < width:
            running[waiting.pop(0)] = 0
        counts = {}
        for row in draw(st.permutations(sorted(running))):
            running[row] += 1
            if running[row] == sizes[row]:
                messages.append(answered(row, sizes[row]))
                del running[row]
            elif draw(st.booleans()):
                counts[row] = running[row]
        messages.append({"counts": counts})
    return sizes, messages


@given(generations(), st.integers(1, 4))
def test_pieces_follow_from_the_sizes_alone(generation, pieces):
    sizes, messages = generation
    made, asked = rows(len(sizes), messages)
    order = sorted(range(len(sizes)), key=lambda row: (sizes[row], row))
    for piece in range(pieces):
        first, last = (ended_rows(len(sizes), n, pieces) for n in (piece, piece + 1))
        reach = Reach(piece=piece, pieces=pieces)
        assert sorted(order[first:last]) == made.piece(reach, 1).tolist()
    assert [list(range(len(sizes)))] == asked


@given(generations(), st.integers(1, 3), st.integers(1, 3))
def test_pieces_of_groups_follow_from_the_sizes_alone(generation, n, pieces):
    """Rows that make no whole group are as many groups of one less row, and so on."""
    sizes, messages = generation
    n = next(each for each in range(n, 0, -1) if len(sizes) % each == 0)
    made, asked = rows(len(sizes), messages)
    count = len(sizes) // n
    order = sorted(range(count), key=lambda group: (max(sizes[group * n :][:n]), group))
    for piece in range(pieces):
        first, last = (ended_rows(count, done, pieces) for done in (piece, piece + 1))
        found = made.piece(Reach(piece=piece, pieces=pieces, groups=True), n).tolist()
        assert sorted(order[first:last]) == [row // n for row in found[::n]]
        assert len(found) == (last - first) * n
    assert [list(range(len(sizes)))] == asked


def test_a_row_is_settled_once_no_other_can_end_before_it():
    made, _ = rows(3, [])
    made._take(answered(1, 2))
    assert not made.settled(1)
    made._grown |= {0: 1, 2: 1}
    assert not made.settled(1), "row 0 may end with 2 tokens, and comes before row 1"
    made._grown |= {0: 2}
    assert made.settled(1)
    assert not made.settled(2)


def test_the_rows_as_fields():
    made, _ = rows(3, [answered(2, 1), answered(0, 6, "length"), answered(1, 2, "abort")])
    made.run()
    found = made.result(None)
    assert [0, 1, 2, 3, 4, 5, 1, 2, 2] == flat(found.response_tokens).tolist()
    assert [6, 2, 1] == lengths(found.log_probs).tolist()
    assert [0, 0, 0, 0, 0, 0, -0.5, -0.5, -1] == flat(found.log_probs).tolist()
    assert [False, False, True] == found.finished.tolist()
    assert (6, {"3"}) == (made.cached, made.versions)
    some = made.result(torch.tensor([0, 2]))
    assert [0, 1, 2, 3, 4, 5, 2] == flat(some.response_tokens).tolist()


def test_what_is_left_of_a_lost_engine_is_asked_of_the_next_one():
    made, asked = rows(
        3,
        [{"counts": {0: 5}}, answered(1, 2), LostError("its process ended")],
        [answered(2, 1), answered(0, 3)],
    )
    made.run()
    assert [[0, 1, 2], [0, 2]] == asked
    assert [3, 2, 1] == lengths(made.result(None).response_tokens).tolist()


def test_what_a_lost_engine_had_counted_is_forgotten():
    made, _ = rows(2, [{"counts": {0: 5, 1: 5}}, LostError("")], [])
    made.advance()
    assert {0: 5, 1: 5} == made._grown
    made.advance()
    assert {0: 0, 1: 0} == made._grown


def test_rows_that_a_second_engine_makes_shorter_are_given_once():
    made, _ = rows(
        4,
        [answered(0, 5), answered(1, 6), {"counts": {2: 7, 3: 7}}, LostError("")],
        [answered(3, 1), answered(2, 2)],
    )
    # Of four rows two pieces have two each.
    assert [[0, 1], [2, 3]] == [
        made.piece(Reach(piece=number, pieces=2), 1).tolist() for number in range(2)
    ]


def test_a_second_loss_is_an_error():
    made, _ = rows(1, [LostError("one")], [LostError("two")])
    with pytest.raises(RuntimeError, match="gone: two"):
        made.run()


def test_after_an_abort_nothing_is_asked_again():
    made, asked = rows(2, [answered(1, 2), LostError("one")], stopped=True)
    made.run()
    assert [[0, 1]] == asked
    found = made.result(None)
    assert [0, 2] == lengths(found.response_tokens).tolist()
    assert [False, True] == found.finished.tolist()


ROW = answered(0, 3)
WRONG = {
    "numbers of 0 came": {"tokens": b"", "log_probs": b"", "made": 3},
    "3 tokens with 0 log-probs": {"log_probs": b""},
    "3 tokens with 2 log-probs": {"log_probs": array("f", [-1.0, -1.0]).tobytes()},
    "token 20 of a vocabulary of 20": {"tokens": array("q", [1, 20, 2]).tobytes()},
    "token -1 of": {"tokens": array("q", [1, -1, 2]).tobytes()},
    "a log-prob of 0.5": {"log_probs": array("f", [-1.0, 0.5, -1.0]).tobytes()},
    "7 tokens, and 6 at most": answered(0, 7),
    "0 tokens, and 'stop' ends 1 at least": {"tokens": b"", "log_probs": b""},
    "3 tokens, and 'length' ends 6 at least": answered(0, 3, "length"),
    "row 5 that nobody has asked for": {"row": 5},
    "row 1 a second time": {"row": 1},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_no_engine_can_mean_is_no_row(said):
    made, _ = rows(3, [answered(1, 2), {**ROW, **WRONG[said]}])
    with pytest.raises(WrongAnswerError, match=said):
        made.run()
    assert {1} == made.tokens.keys()


def test_what_was_drafted_adds_up_over_the_rows():
    drafts = {"drafted": 6, "accepted": 4}
    made, _ = rows(2, [{**answered(0, 2), **drafts}, {**answered(1, 3), **drafts}])
    made.run()
    assert (12, 8) == (made.drafted, made.accepted)
