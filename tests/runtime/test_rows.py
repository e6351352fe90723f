"""How rows are shared out and brought from one spread to another, against slow references."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rlflow.errors import RunError, Source
from rlflow.graph.user import dispatch
from rlflow.graph.user.dispatch import register_dispatch
from rlflow.runtime.execute.rows import (
    balanced,
    cuts,
    dispatched,
    generated,
    row_positions,
    sub_groups,
)
from tests.budget import examples

SIZES = st.integers(0, 1000)


def lists(parts):
    return [part.tolist() for part in parts]


def loads(parts, tokens):
    return [int(tokens[part].sum()) for part in parts]


@st.composite
def grouped(draw, max_groups=40, max_parts=6):
    """Tokens and group ids of rows in any order, and a number of parts."""
    ids = draw(st.lists(st.integers(-50, 50), min_size=1, max_size=max_groups, unique=True))
    member = [name for name in ids for _ in range(draw(st.integers(1, 4)))]
    groups = np.array(draw(st.permutations(member)), dtype=np.int64)
    tokens = draw(st.lists(SIZES, min_size=len(groups), max_size=len(groups)))
    return np.array(tokens, dtype=np.int64), groups, draw(st.integers(1, max_parts))


# --- balanced -------------------------------------------------------------------------------


@given(grouped())
def test_every_row_is_in_one_part_and_groups_stay_whole(case):
    tokens, groups, parts = case

    made = balanced(tokens, groups, parts)

    assert parts == len(made)
    assert list(range(len(tokens))) == sorted(itertools.chain.from_iterable(lists(made)))
    for part in lists(made):
        assert sorted(part) == part
    homes = [set(groups[part].tolist()) for part in made]
    assert sum(map(len, homes)) == len(set(groups.tolist()))


@given(grouped())
def test_no_part_is_empty_while_there_are_groups_for_it(case):
    tokens, groups, parts = case

    filled = [part for part in balanced(tokens, groups, parts) if len(part)]

    assert min(parts, len(set(groups.tolist()))) == len(filled)


@given(grouped())
def test_parts_come_in_the_order_of_their_first_row_empty_ones_last(case):
    tokens, groups, parts = case

    first = [
        part[0] if len(part) else len(tokens) for part in lists(balanced(tokens, groups, parts))
    ]

    assert sorted(first) == first


def best_largest(sizes, parts):
    """The smallest possible load of the largest part, by trying every partition."""
    best = sum(sizes)
    for homes in itertools.product(range(parts), repeat=len(sizes) - 1):
        filled = [0] * parts
        for size, home in zip(sizes, (0, *homes), strict=True):
            filled[home] += size
        best = min(best, max(filled))
    return best


@settings(max_examples=examples(150))
@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(2, 3))
def test_the_largest_part_is_within_a_sixth_or_two_ninths_of_the_best(sizes, parts):
    tokens = np.array(sizes, dtype=np.int64)

    largest = max(loads(balanced(tokens, None, parts), tokens))

    # Michiels et al. 2007; rows decide between equal tokens, which costs less than two tokens.
    assert largest < (4 / 3 - 1 / (3 * parts)) * best_largest(sizes, parts) + 2


@given(grouped())
def test_parts_differ_by_no_more_than_one_group(case):
    tokens, groups, parts = case
    most = max(int(tokens[groups == group].sum()) for group in set(groups.tolist()))

    made = loads(balanced(tokens, groups, parts), tokens)

    assert max(made) - min(made) <= most + 1


def greedy(sizes, parts):
    """Longest first to the least loaded (Graham 1969): the loads."""
    filled = [0] * parts
    for size in sorted(sizes, reverse=True):
        filled[filled.index(min(filled))] += size
    return filled


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_responses_of_many_lengths_are_evened_out_better_than_greedily(parts, seed):
    tokens = np.random.default_rng(seed).lognormal(5, 1, 256).astype(np.int64) + 1

    made = loads(balanced(tokens, None, parts), tokens)

    by_greed = greedy(tokens.tolist(), parts)
    assert max(made) - min(made) <= max(by_greed) - min(by_greed)
    assert max(made) - min(made) <= 0.001 * max(made)


def test_the_example_of_karmarkar_and_karp():
    tokens = np.array([8, 7, 6, 5, 4])

    made = balanced(tokens, None, 2)

    assert [14, 16] == sorted(loads(made, tokens))


@pytest.mark.parametrize(("count", "parts"), [(64, 4), (63, 4), (5, 3), (2, 4), (7, 1), (3, 3)])
def test_equal_groups_give_equal_counts_in_consecutive_runs(count, parts):
    groups = np.arange(count).repeat(2)
    tokens = np.full(2 * count, 9)

    made = lists(balanced(tokens, groups, parts))

    sizes = [len(part) // 2 for part in made]
    assert max(sizes) - min(sizes) <= 1
    assert list(range(2 * count)) == list(itertools.chain.from_iterable(made))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 5))
def test_without_token_counts_rows_are_evened_out(sizes, parts):
    groups = np.repeat(np.arange(len(sizes)), sizes)

    made = balanced(np.zeros(len(groups), dtype=np.int64), groups, parts)

    counts = [len(part) for part in made]
    assert max(counts) - min(counts) <= max(sizes)


def test_no_rows_give_empty_parts():
    nothing = np.empty(0, dtype=np.int64)

    assert [[], [], []] == lists(balanced(nothing, nothing, 3)) == lists(balanced(nothing, None, 3))


@given(grouped(max_groups=4, max_parts=16))
def test_groups_are_cut_into_runs_of_their_rows_so_that_no_part_is_empty(case):
    tokens, groups, parts = case

    ids = sub_groups(groups, parts)

    assert len(set(ids.tolist())) >= min(parts, len(groups))
    pieces = {}
    for group in set(groups.tolist()):
        own = ids[groups == group]
        assert sorted(own.tolist()) == own.tolist()
        sizes = np.bincount(own - own[0])
        assert sizes.max() - sizes[sizes > 0].min() <= 1
        pieces[group] = set(own.tolist())
    assert sum(map(len, pieces.values())) == len(set(ids.tolist()))

    taken, kept = dispatched("balanced rows", tokens, groups, parts)
    assert lists(taken) == lists(kept)
    assert list(range(len(tokens))) == sorted(itertools.chain.from_iterable(lists(taken)))
    assert min(parts, len(groups)) == sum(len(part) > 0 for part in taken)


def test_two_groups_of_four_over_four_parts_go_in_pairs():
    groups = np.repeat(np.array([7, 3]), 4)

    taken, _ = dispatched("balanced rows", np.zeros(8, dtype=np.int64), groups, 4)

    assert [[0, 1], [2, 3], [4, 5], [6, 7]] == lists(taken)
    assert [0, 0, 1, 1, 2, 2, 3, 3] == sorted(sub_groups(groups, 3).tolist())


@given(grouped(), st.randoms(use_true_random=False))
def test_what_parts_weigh_does_not_depend_on_the_order_of_rows(case, random):
    tokens, groups, parts = case
    order = list(range(len(tokens)))
    random.shuffle(order)

    there = loads(balanced(tokens, groups, parts), tokens)
    again = loads(balanced(tokens[order], groups[order], parts), tokens[order])

    assert sorted(there) == sorted(again)


@given(grouped())
def test_parts_do_not_depend_on_the_names_of_groups(case):
    tokens, groups, parts = case

    named = lists(balanced(tokens, groups, parts))

    assert named == lists(balanced(tokens, 1000 - 3 * groups, parts))
    assert named == lists(balanced(tokens, groups, parts))


# --- generated ------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=4), st.integers(1, 5))
def test_children_follow_their_parents(parents, factor):
    made = generated([np.array(part, dtype=np.int64) for part in parents], factor)

    assert [[p * factor + s for p in part for s in range(factor)] for part in parents] == lists(
        made
    )


# --- dispatched -----------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(dispatch, "_PAIRS", {})


TOKENS = np.array([5, 3, 1, 4])
GROUPS = np.array([7, 7, 8, 8])
HERE = Source(path="mine.py", line=7, text="scored(samples)")


def ask(parts=2, **options):
    return dispatched("mine", TOKENS, GROUPS, parts, where=HERE, **options)


def test_rules_of_the_engine():
    taken, kept = dispatched("whole", TOKENS, None, 1)
    assert [[0, 1, 2, 3]] == lists(taken) == lists(kept)
    taken, kept = dispatched("balanced", TOKENS, GROUPS, 2)
    assert lists(balanced(TOKENS, GROUPS, 2)) == lists(taken) == lists(kept)


def test_a_pair_gets_plain_numbers_and_places_rows(registry):
    asked = []

    def by_length(tokens, groups, parts):
        asked.append((tokens, groups, parts))
        order = sorted(range(len(tokens)), key=lambda row: -tokens[row])
        return [order[part::parts] for part in range(parts)]

    register_dispatch("mine", by_length)

    taken, kept = ask()

    assert [([5, 3, 1, 4], [7, 7, 8, 8], 2)] == asked
    assert [[0, 1], [3, 2]] == lists(taken) == lists(kept)


def test_of_repeated_rows_the_first_result_is_kept(registry):
    register_dispatch("mine", lambda tokens, groups, parts: [[3, 0, 3], [0, 1], [], (2, 1)])

    taken, kept = ask(4)

    assert [[3, 0, 3], [0, 1], [], [2, 1]] == lists(taken)
    assert [[3, 0], [1], [], [2]] == lists(kept)


def test_collect_chooses_among_repeated_rows(registry):
    given_to = []

    def last(parts):
        given_to.append(parts)
        return [[1], np.array([0]), [3, 2]]

    register_dispatch("mine", lambda tokens, groups, parts: [[0, 1, 0], [1, 0], [2, 3]], last)

    _, kept = ask(3)

    assert [[[0, 1, 0], [1, 0], [2, 3]]] == given_to
    assert [[1], [0], [2, 3]] == lists(kept)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([[0, 1], [2]], "row 3 is in no part"),
        ([[0, 1, 2, 3]], "1 parts instead of 2"),
        ([[0, 1], [2, 3], []], "3 parts instead of 2"),
        ([[0, 1], [2, 4]], "4 is none of the 4 rows"),
        ([[0, 1, -1], [2, 3]], "-1 is none of the 4 rows"),
        ([[0.0, 1.0], [2, 3]], "it is no list of lists of row numbers"),
        ([["0"], [1, 2, 3]], "it is no list of lists of row numbers"),
        ([[[0, 1]], [2, 3]], "it is no list of lists of row numbers"),
        ([[[0], [1, 2]], [3]], "it is no list of lists of row numbers"),
        ([0, 1, 2, 3], "it is no list of lists of row numbers"),
        (None, "it is no list of lists of row numbers"),
    ],
)
def test_a_dispatch_function_that_returns_no_partition_is_named(registry, returned, problem):
    def wrong(tokens, groups, parts):
        return returned

    register_dispatch("mine", wrong)

    with pytest.raises(RunError, match="E761") as caught:
        ask()

    message = str(caught.value)
    assert f"wrong of rule 'mine': {problem}\n  mine.py:7   scored(samples)\n" in message
    assert f"got          {returned!r}\n" in message
    assert message.endswith(
        "expected     2 lists of row numbers below 4, every row in at least one of them"
    )


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([[0, 1], [3]], "row 2 is kept 0 times"),
        ([[0, 1, 2], [2, 3]], "row 2 is kept 2 times"),
        ([[0, 1, 3], [2]], "part 0 was not given row 3"),
        ([[0, 1, 2, 3]], "1 parts instead of 2"),
    ],
)
def test_a_collect_function_that_keeps_the_wrong_rows_is_named(registry, returned, problem):
    def wrong(parts):
        return returned

    register_dispatch("mine", lambda tokens, groups, parts: [[0, 1, 2], [2, 3]], wrong)

    with pytest.raises(RunError, match="E761") as caught:
        ask()

    assert f"collect function {wrong.__qualname__} of rule 'mine': {problem}" in str(caught.value)
    assert "every row in exactly one of them" in str(caught.value)


def test_a_dispatch_function_that_raises_keeps_its_cause(registry):
    register_dispatch("mine", lambda tokens, groups, parts: 1 // 0)

    with pytest.raises(RunError, match="raised ZeroDivisionError: ") as caught:
        ask()

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_groups_are_torn_apart_only_where_the_op_allows_it(registry):
    register_dispatch("mine", lambda tokens, groups, parts: [[0, 1, 2], [3]])
    assert [[0, 1, 2], [3]] == lists(ask()[0])

    with pytest.raises(RunError, match="part 0 lacks row 3, the rest of whose group it has"):
        ask(whole_groups=True)

    register_dispatch("mine", lambda tokens, groups, parts: [[1, 0, 3, 2], [3, 2]])
    assert [[1, 0, 3, 2], [3, 2]] == lists(ask(whole_groups=True)[0])


def test_a_rule_that_nobody_registered_is_refused_with_those_that_are_there(registry):
    register_dispatch("mine", lambda tokens, groups, parts: [])

    with pytest.raises(RunError) as caught:
        dispatched("mime", TOKENS, None, 2)

    assert "no dispatch rule 'mime' is registered in this process" in str(caught.value)
    assert "did you mean 'mine'" in str(caught.value)


# --- cuts -----------------------------------------------------------------------------------


@st.composite
def two_spreads(draw):
    """Parts that hold every row at least once, and parts that want any of them, any times."""
    rows = draw(st.integers(1, 24))
    number = st.integers(0, rows - 1)
    source = draw(st.lists(st.lists(number, unique=True, max_size=rows), min_size=1, max_size=4))
    missing = sorted(set(range(rows)) - set(itertools.chain.from_iterable(source)))
    source[draw(st.integers(0, len(source) - 1))] += missing
    target = draw(st.lists(st.lists(number, max_size=12), min_size=1, max_size=4))
    return [[np.array(part, dtype=np.int64) for part in side] for side in (source, target)]


@given(two_spreads())
def test_cuts_fill_every_place_of_every_target_part_once_with_its_row(case):
    source, target = case
    filled = [np.full(len(part), -1) for part in target]

    for cut in cuts(source, target):
        assert len(cut.taken) == len(cut.placed) > 0
        assert (filled[cut.target][cut.placed] == -1).all()
        filled[cut.target][cut.placed] = source[cut.source][cut.taken]

    assert lists(target) == lists(filled)


@given(two_spreads())
def test_what_a_part_has_itself_it_is_not_sent(case):
    source, target = case

    for cut in cuts(source, target):
        moved = set(source[cut.source][cut.taken].tolist())
        own = set(source[cut.target].tolist()) if cut.target < len(source) else set()
        assert cut.source == cut.target or not moved & own


@given(two_spreads())
def test_a_pair_of_parts_has_one_cut(case):
    pairs = [(cut.target, cut.source) for cut in cuts(*case)]

    assert sorted(set(pairs)) == pairs


@given(grouped(), st.integers(1, 6))
def test_between_two_partitions_every_row_is_sent_once(case, other):
    tokens, groups, parts = case
    source, target = balanced(tokens, groups, parts), balanced(tokens, None, other)

    moved = [source[cut.source][cut.taken] for cut in cuts(source, target)]

    assert list(range(len(tokens))) == sorted(np.concatenate(moved).tolist())


def test_equal_spreads_stay_where_they_are():
    parts = [np.array([0, 3]), np.array([], dtype=np.int64), np.array([1, 2])]

    made = cuts(parts, parts)

    assert [(0, 0, [0, 1], [0, 1]), (2, 2, [0, 1], [0, 1])] == [
        (cut.source, cut.target, cut.taken.tolist(), cut.placed.tolist()) for cut in made
    ]


def test_a_row_that_nobody_has_is_not_looked_for_in_vain():
    with pytest.raises(AssertionError, match="a row is wanted that no part has"):
        cuts([np.array([0, 1])], [np.array([2])])
    with pytest.raises(AssertionError, match="in a part that lacks it"):
        row_positions(np.array([1]), np.array([0, 2]))


def test_a_place_is_the_first_of_its_row():
    assert [1, 0, 1] == row_positions(np.array([4, 9, 4]), np.array([9, 4, 4, 9])).tolist()
