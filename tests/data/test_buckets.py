"""Rows drawn from buckets: shares, places and epochs."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlflow import data
from rlflow.data.buckets import draw_rows, drawn_buckets, random_bits, row_of, shared_out

WEIGHTS = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def levels(sizes):
    """A source whose rows have a column `level`, so many rows of each, one after the other."""
    rows = [{"prompt": f"{level}:{n}", "level": level} for level, n in sizes for n in range(n)]
    return data.generator(rows.__getitem__, size=len(rows), columns=("prompt", "level"))


@pytest.mark.parametrize(
    ("weights", "floor", "shares"),
    [
        ([0.25, 0.75], 0.0, [0.25, 0.75]),
        ([0.25, 0.0], 0.2, [0.9, 0.1]),
        ([0.25, 0.1875, 0.0], 0.1, [0.1 / 3 + 0.9 * 4 / 7, 0.1 / 3 + 0.9 * 3 / 7, 0.1 / 3]),
        ([0.0, 0.0], 0.0, [0.5, 0.5]),
        ([3.0], 0.5, [1.0]),
        ([1.0, 2.0], 1.0, [0.5, 0.5]),
        ([5e-324, 5e-324], 0.5, [0.5, 0.5]),
    ],
)
def test_shares_are_those_computed_by_hand(weights, floor, shares):
    assert pytest.approx(shares, abs=1e-15) == shared_out(weights, floor)


@given(WEIGHTS, st.floats(0, 1))
def test_shares_add_up_and_none_is_below_the_floor(weights, floor):
    shares = shared_out(weights, floor)
    assert pytest.approx(1) == sum(shares)
    assert min(shares) >= floor / len(weights) * (1 - 1e-12)


@given(WEIGHTS, st.integers(1, 40), st.integers(0, 9), st.integers(0, 9))
def test_every_bucket_gets_its_share_of_a_batch_rounded_down_or_up(weights, size, seed, draw):
    shares = shared_out(weights, 0.0)
    found = Counter(drawn_buckets(shares, size, seed=seed, draw=draw))
    assert size == found.total()
    for bucket, share in enumerate(shares):
        assert abs(found[bucket] - share * size) < 1 + 1e-9
        assert share or not found[bucket]


def test_over_many_batches_draws_are_in_proportion_and_in_every_order():
    shares, draws = [0.55, 0.3, 0.15], 400
    batches = [drawn_buckets(shares, 4, seed=7, draw=draw) for draw in range(draws)]
    found = Counter(bucket for batch in batches for bucket in batch)
    assert pytest.approx(shares, abs=0.02) == [found[k] / (4 * draws) for k in range(3)]
    assert {0, 1} <= {batch[0] for batch in batches}
    assert {0, 1} <= {batch[3] for batch in batches}


def test_an_offset_and_steps_choose_the_buckets():
    """Points (offset + k) / 4 against the ends 0.5, 0.75 and 1 of the buckets."""
    offset = Fraction(random_bits(3, 5, "offset"), 2**64)
    ends = [Fraction(1, 2), Fraction(3, 4), Fraction(1)]
    points = [(offset + k) / 4 for k in range(4)]
    by_hand = [next(b for b, end in enumerate(ends) if point < end) for point in points]
    assert [0, 0, 1, 2] == by_hand == sorted(drawn_buckets([0.5, 0.25, 0.25], 4, seed=3, draw=5))


def test_draws_differ_by_seed_and_number():
    found = {
        tuple(drawn_buckets([0.4, 0.35, 0.25], 8, seed=seed, draw=draw))
        for seed in range(3)
        for draw in range(3)
    }
    assert 9 == len(found)


def test_buckets_are_the_values_of_a_column_in_the_order_of_their_first_rows():
    source = levels([("b", 2), ("a", 1), ("b", 1)])
    found = source.buckets("level")
    assert ["b", "a"] == list(found)
    assert ([0, 1, 3], [2]) == (list(found["b"]), list(found["a"]))
    assert found is source.buckets("level")
    assert {"0": (0,), "1": (1,), "2": (2,), "3": (3,)} == source.buckets("row_id")


def test_values_that_are_no_text_are_buckets_as_json():
    rows = [{"prompt": "p", "level": value} for value in (1, 2.5, "1", True)]
    source = data.generator(rows.__getitem__, size=4, columns=("prompt", "level"))
    assert {"1": [0, 2], "2.5": [1], "true": [3]} == {
        name: list(ids) for name, ids in source.buckets("level").items()
    }


def test_the_sources_of_a_mix_are_buckets_without_reading_them():
    one, two = levels([("x", 3)]), levels([("y", 2), ("x", 1)])
    mixed = data.mix({"one": one, "two": two}, column="of")
    assert {"one": range(3), "two": range(3, 6)} == mixed.buckets("of")
    assert {"x": [0, 1, 2, 5], "y": [3, 4]} == {
        name: list(ids) for name, ids in mixed.buckets("level").items()
    }
    three = data.mix({"1": data.arithmetic(digits=8), "2": data.arithmetic(digits=1, test_size=9)})
    assert [10**16 - 512, 91] == [len(rows) for rows in three.buckets("data_source").values()]


@given(
    st.lists(st.sampled_from("abc"), max_size=60),
    st.lists(st.integers(1, 60), max_size=8),
    st.integers(0, 5),
)
def test_rows_come_once_an_epoch_of_their_bucket_however_draws_are_cut(names, cuts, seed):
    source = levels([("a", 3), ("b", 1), ("c", 7)])
    ids = source.buckets("level")
    whole, counts = draw_rows(source, "level", names, {}, seed)
    assert dict(Counter(names)) == counts
    assert names == [row["level"] for row in whole]
    assert [source.rows()[row["row_id"]]["prompt"] for row in whole] == [r["prompt"] for r in whole]
    for name, rows in ids.items():
        drawn = [row["row_id"] for row in whole if row["level"] == name]
        for start in range(0, len(drawn), len(rows)):
            epoch = drawn[start : start + len(rows)]
            assert len(epoch) == len(set(epoch))
            assert set(epoch) <= set(rows)
    taken, found = {}, []
    ends = sorted({*cuts, len(names)})
    for start, end in zip([0, *ends], ends, strict=False):
        some, after = draw_rows(source, "level", names[start:end], taken, seed)
        taken |= after
        found += some
    assert whole == found


def test_epochs_and_buckets_have_orders_of_their_own():
    rows = range(50)
    orders = {
        tuple(row_of(bucket, rows, first + n, seed) for n in range(50))
        for bucket in ("a", "b")
        for first in (0, 50)
        for seed in (0, 1)
    }
    assert 8 == len(orders)
    assert {tuple(sorted(order)) for order in orders} == {tuple(rows)}
