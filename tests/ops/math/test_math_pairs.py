"""One pair a group: the best row against the worst, by hand, by brute force, in any order.

group   rewards          pair
7       1 2 2            row of the first 2 against the 1
9       5 5              none: a tie
4       3                none: alone
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlflow.ops.math.pairs import best_against_worst, pair_rows, penalise_unfinished

pytestmark = pytest.mark.torch


def found(reward, group, **options):
    """Of every pair the chosen and the rejected row, by id; the counts."""
    made = best_against_worst(torch.tensor(reward), torch.tensor(group), **options)
    better, worse = pair_rows(made.pair, made.chosen)
    ids = made.pair[better].tolist()
    pairs = dict(zip(ids, zip(better.tolist(), worse.tolist(), strict=True), strict=True))
    return pairs, (made.kept, made.ties, made.invalid, made.single), made


def test_the_best_row_of_a_group_stands_against_its_worst():
    reward, group = [1.0, 2.0, 5.0, 2.0, 3.0, 5.0], [7, 7, 9, 7, 4, 9]

    pairs, counts, made = found(reward, group)

    assert {7: (1, 0)} == pairs
    assert (1, 1, 0, 1) == counts
    assert [7, 7, -1, -1, -1, -1] == made.pair.tolist()
    assert [False, True, False, False, False, False] == made.chosen.tolist()
    assert [1.0, 1.0, 0.0, 0.0, 0.0, 0.0] == made.margin.tolist()


def test_of_equally_good_rows_that_of_the_lowest_order_is_taken():
    pairs, _, _ = found([2.0, 2.0, 0.0, 0.0], [1, 1, 1, 1], order=torch.tensor([3, 1, 9, 4]))
    assert {1: (1, 3)} == pairs


def test_a_valid_row_beats_an_invalid_one_whatever_their_rewards():
    valid = torch.tensor([True, False, False, False])
    pairs, counts, made = found([0.0, 9.0, 9.0, 1.0], [1, 1, 2, 2], valid=valid)
    assert {1: (0, 1)} == pairs
    assert (1, 0, 1, 0) == counts
    assert [-9.0, -9.0, 0.0, 0.0] == made.margin.tolist()


def test_equal_rewards_of_a_valid_and_an_invalid_row_are_no_tie():
    valid = torch.tensor([False, True])
    pairs, counts, _ = found([1.0, 1.0], [1, 1], valid=valid)
    assert {1: (1, 0)} == pairs
    assert (1, 0, 0, 0) == counts


def test_rows_that_are_not_usable_and_rewards_that_are_nan_are_left_out():
    usable = torch.tensor([True, True, False, True, True])
    reward = [0.0, 1.0, 9.0, float("nan"), 2.0]
    pairs, counts, _ = found(reward, [1, 1, 1, 2, 2], usable=usable)
    assert {1: (1, 0)} == pairs
    assert (1, 0, 0, 1) == counts


def test_no_rows_make_no_pairs():
    made = best_against_worst(torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert [] == made.pair.tolist() == made.chosen.tolist()
    assert 0 == made.kept + made.ties + made.invalid + made.single


def test_a_penalty_falls_on_what_did_not_end():
    reward, finished = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    assert [1.0, -0.5] == penalise_unfinished(reward, finished, 1.5).tolist()


@pytest.mark.parametrize(
    ("pair", "chosen"),
    [
        ([1, 1], [True, True]),
        ([1, -1], [True, False]),
        ([1, 1, 1], [True, False, False]),
        ([1, 2], [True, False]),
        ([1, 1, 1, 1], [True, False, True, False]),
    ],
)
def test_half_a_pair_is_refused(pair, chosen):
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        pair_rows(torch.tensor(pair), torch.tensor(chosen))


ROWS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(-2, 2), st.booleans(), st.booleans()), max_size=16
)


@given(ROWS, st.randoms(use_true_random=False))
def test_it_is_brute_force_in_any_order_of_rows(rows, random):
    names = list(range(len(rows)))
    expected, counts = {}, [0, 0, 0, 0]
    for group in {row[0] for row in rows}:
        members = [i for i in names if rows[i][0] == group and rows[i][3]]
        if len(members) < 2:
            counts[3] += 1
            continue
        best = min(members, key=lambda i: (not rows[i][2], -rows[i][1], i))
        worst = min(members, key=lambda i: (rows[i][2], rows[i][1], i))
        if not rows[best][2]:
            counts[2] += 1
        elif (rows[best][1], rows[best][2]) == (rows[worst][1], rows[worst][2]):
            counts[1] += 1
        else:
            expected[group * 3] = (best, worst)
            counts[0] += 1
    random.shuffle(names)
    mixed = [rows[name] for name in names]

    made = best_against_worst(
        torch.tensor([float(row[1]) for row in mixed]),
        torch.tensor([row[0] * 3 for row in mixed], dtype=torch.int64),
        valid=torch.tensor([row[2] for row in mixed], dtype=torch.bool),
        usable=torch.tensor([row[3] for row in mixed], dtype=torch.bool),
        order=torch.tensor(names, dtype=torch.int64),
    )

    better, worse = pair_rows(made.pair, made.chosen)
    ids = made.pair[better].tolist()
    assert expected == {
        i: (names[b], names[w])
        for i, b, w in zip(ids, better.tolist(), worse.tolist(), strict=True)
    }
    assert counts == [made.kept, made.ties, made.invalid, made.single]
