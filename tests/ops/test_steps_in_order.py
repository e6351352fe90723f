"""Updates whose mini-batches take the rows in their order, in one call or in several."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.batch import make_batch, ragged_rows
from rlflow.errors import NumericsError
from rlflow.ops.bodies import update
from tests.budget import examples
from tests.ops.calls import call_of

pytestmark = pytest.mark.torch


class Stepper:
    """A model that notes the rows of each step; `applied` says which steps are."""

    learning_rate = 0.5

    def __init__(self, applied=()):
        self.applied = list(applied)
        self.rows = []

    def step(self, mini, loss, *, outputs, temperature, max_grad_norm):
        self.rows.append(mini["row"].tolist())
        applied = self.applied.pop(0) if self.applied else True
        number = float(len(self.rows))
        return SimpleNamespace(metrics={"loss": number}, grad_norm=number, applied=applied)


def batch_of(rows, groups):
    sizes = [1 + row % 3 for row in rows]
    fields = {
        "response_tokens": ragged_rows([list(range(3, 3 + n)) for n in sizes], torch.int64),
        "response_mask": ragged_rows([[True] * n for n in sizes], torch.bool),
        "row": torch.tensor(rows, dtype=torch.int64),
        "group": torch.tensor(groups, dtype=torch.int64),
    }
    return make_batch(fields, len(rows))


def update_call(model, rows, groups, total, *, parts, piece=(0, 1), carried=None, epochs=1):
    params = {
        "loss": rf.SFTLoss(),
        "epochs": epochs,
        "mini_batches": parts,
        "shuffle": False,
        "max_grad_norm": 1.0,
    }
    call = call_of(inputs=batch_of(rows, groups), params=params, model=model)
    carried = {} if carried is None else carried
    numbers = torch.tensor(rows, dtype=torch.int64)
    return replace(call, rows=numbers, total=total, piece=piece, carried=carried)


def in_pieces(model, groups, each, parts, count, left_out=()):
    """The metrics of the calls of an update, each with the rows of its piece that are there."""
    total, carried, found = len(groups), {}, []
    for index in range(count):
        first, last = total * index // count, total * (index + 1) // count
        rows = [row for row in range(first, last) if row not in left_out]
        call = update_call(
            model,
            rows,
            [groups[row] for row in rows],
            total,
            parts=parts,
            piece=(index, count),
            carried=carried,
        )
        found.append(update.update(call).metrics)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    prompts=st.sampled_from([4, 8]),
    each=st.integers(1, 3),
    parts=st.sampled_from([2, 4]),
    count=st.sampled_from([1, 2, 4]),
    dropped=st.sets(st.integers(0, 23)),
)
def test_calls_with_a_part_of_the_rows_make_the_steps_of_one_call(
    prompts, each, parts, count, dropped
):
    """Rows without a reward are left out, and move no other row to another mini-batch."""
    if parts % count:
        return
    total = prompts * each
    groups = [(7 * (row // each) + 3) % 11 for row in range(total)]
    whole, pieces = Stepper(), Stepper()
    kept = [row for row in range(total) if row not in dropped]
    call = update_call(whole, kept, [groups[row] for row in kept], total, parts=parts)
    expected = update.update(call).metrics
    found = in_pieces(pieces, groups, each, parts, count, dropped)

    assert parts == len(whole.rows)
    assert kept == [row for rows in whole.rows for row in rows]
    assert whole.rows == pieces.rows
    for part, rows in enumerate(whole.rows):
        assert {row * parts // total for row in rows} <= {part}
    assert [{}] * (count - 1) == found[:-1]
    assert expected == found[-1]


def test_a_group_is_in_the_mini_batch_of_its_first_row():
    model = Stepper()
    groups = [0, 0, 0, 1, 1, 1]
    update.update(update_call(model, list(range(6)), groups, 6, parts=3))
    assert [[0, 1, 2], [3, 4, 5], []] == model.rows


def test_every_epoch_has_the_same_order():
    model = Stepper()
    update.update(update_call(model, list(range(4)), [0, 0, 1, 1], 4, parts=2, epochs=2))
    assert [[0, 1], [2, 3]] * 2 == model.rows


def test_only_all_steps_together_are_an_error():
    groups = [0, 0, 1, 1]
    (_, made) = in_pieces(Stepper([False, True]), groups, 2, 2, 2)
    assert {"skipped": 1.0, "loss": 2.0, "grad_norm": 2.0, "lr": 0.5} == made
    with pytest.raises(NumericsError, match="no optimizer step of iteration 0 was finite"):
        in_pieces(Stepper([False, False]), groups, 2, 2, 2)
