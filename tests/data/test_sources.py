"""Which rows an iteration sees: every row once per epoch, from (seed, iteration) alone."""

from __future__ import annotations

import copy
import os
import pickle
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlflow.data as data
from rlflow.data.sources import row_at
from rlflow.errors import DataError


def numbered(size):
    return data.generator(number_row, size=size, columns=["prompt"])


def number_row(index):
    return {"prompt": f"problem {index}"}


def epoch_order(rows, seed, epoch):
    return tuple(row_at(epoch * rows + place, rows, seed) for place in range(rows))


def ids(source, iteration, size, seed=0):
    return [row["row_id"] for row in source.batch(iteration, size, seed)]


@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 50),
    epochs=st.integers(1, 3),
    seed=st.integers(-5, 2**40),
)
def test_every_row_comes_once_per_epoch(rows, batch, epochs, seed):
    source = numbered(rows)
    iterations = -(-rows * epochs // batch)
    seen = [row_id for i in range(iterations) for row_id in ids(source, i, batch, seed)]

    for epoch in range(epochs):
        assert list(range(rows)) == sorted(seen[epoch * rows : (epoch + 1) * rows])


@given(calls=st.permutations(range(12)))
def test_a_batch_is_independent_of_the_calls_before_it(calls):
    forward = [ids(numbered(10), iteration, 7) for iteration in range(12)]
    source = numbered(10)

    assert {i: forward[i] for i in calls} == {i: ids(source, i, 7) for i in calls}


def test_a_batch_spans_two_epochs():
    source = numbered(5)
    both = [*epoch_order(5, 3, 0), *epoch_order(5, 3, 1)]

    assert both[4:8] == ids(source, 1, 4, seed=3)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {epoch_order(100, seed, epoch) for seed in range(3) for epoch in range(3)}

    assert 9 == len(orders)


def test_the_order_never_changes():
    """A resumed run on another machine must go on in the same order, so it is written here."""
    assert (6, 0, 8, 2, 9, 4, 7, 3, 1, 5) == epoch_order(10, 0, 0)


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 16])
def test_orders_are_even(rows):
    """Chi-square of where row 0 comes and of what follows row 0: both like fair draws."""
    orders = [epoch_order(rows, 0, epoch) for epoch in range(1500)]
    places = [order.index(0) for order in orders]
    followers = [(*order, order[0])[order.index(0) + 1] for order in orders]

    for draws, cells in ((places, rows), (followers, rows - 1)):
        fair = len(draws) / cells
        chi2 = sum((draws.count(cell) - fair) ** 2 / fair for cell in set(draws))
        assert chi2 < cells - 1 + 4 * (2 * cells) ** 0.5
        assert cells == len(set(draws))


def test_small_epochs_take_every_order():
    assert 24 == len({epoch_order(4, 0, epoch) for epoch in range(300)})


def test_a_huge_source_is_sampled_at_once():
    rows = ids(data.arithmetic(digits=6), 10**9, 1000)

    assert 1000 == len(set(rows))
    assert 0.45 < sum(rows) / len(rows) / 10**12 < 0.55


@pytest.mark.rows(1)
@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_a_batch_is_the_same_in_every_process(hash_seed):
    script = "import rlflow.data as d; print(d.arithmetic().batch(700, 16, 5))"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )

    assert f"{data.arithmetic().batch(700, 16, 5)}\n" == run.stdout


def test_the_global_generator_is_neither_read_nor_moved():
    random.seed(1)
    before = random.getstate()
    numbered(10).batch(0, 10, 0)

    assert before == random.getstate()


def test_rows_carry_their_index_and_are_copies():
    source = numbered(3)
    source.batch(0, 3, 0)[0]["prompt"] = "changed"

    assert [{"prompt": f"problem {i}", "row_id": i} for i in epoch_order(3, 0, 0)] == source.batch(
        0, 3, 0
    )


def test_rows_are_read_once(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    source = data.jsonl(path)
    source.rows()
    path.unlink()

    assert [{"prompt": "x"}] == source.rows()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_what_was_read_stays_behind_when_a_source_is_sent(tmp_path, clone):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    source = data.jsonl(path)
    source.rows()
    path.unlink()
    sent = clone(source)

    assert source == sent
    with pytest.raises(DataError, match="E601"):
        sent.rows()


def test_sources_are_values():
    assert data.arithmetic() == data.arithmetic()
    assert data.arithmetic() != data.arithmetic(split="test")
    assert 1 == len({data.jsonl("a.jsonl", limit=3), data.jsonl("a.jsonl", limit=3)})
