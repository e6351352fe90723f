"""Lengths of responses: the mean asked for, the longest of many, stages of decoding."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rlflow.scheduler.costs.lengths import (
    STEPS,
    ResponseLengths,
    assumed,
    fitted_lengths,
    full_lengths,
    stages,
)

LENGTHS = st.builds(
    lambda longest, share, spread: ResponseLengths(longest, max(1.0, share * longest), spread),
    st.integers(2, 5000),
    st.floats(0.05, 0.9),
    st.sampled_from([0.2, 0.6, 1.2]),
)


@given(LENGTHS)
def test_survival_falls_from_one_to_nothing(lengths: ResponseLengths) -> None:
    values = [lengths.survival(lengths.longest * n / 20) for n in range(21)]

    assert 1.0 == values[0]
    assert 0.0 == values[-1]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(values))


@given(LENGTHS)
def test_the_mean_is_the_one_asked_for(lengths: ResponseLengths) -> None:
    assert lengths.expected_longest(1) == pytest.approx(lengths.mean, rel=0.02, abs=0.6)


@given(LENGTHS, st.integers(1, 200))
def test_more_rows_have_a_longer_longest_within_the_limit(
    lengths: ResponseLengths, rows: int
) -> None:
    some, more = lengths.expected_longest(rows), lengths.expected_longest(2 * rows)

    assert some <= more + 1e-9
    assert more <= lengths.longest + 1e-9


def test_responses_of_one_length_take_just_that() -> None:
    found = stages(full_lengths(1000), 8, 4)

    assert 1000 == sum(stage.tokens for stage in found)
    assert {(8.0, 1.0)} == {(stage.live, stage.goes_on) for stage in found}


def test_two_tokens_by_hand() -> None:
    """Half of the rows end after the first of two tokens: of 2, 3/4 of the time one goes on."""
    lengths = ResponseLengths(2, 1.5, 0.6)
    first, second = stages(lengths, 2, 1)

    assert (0.5, 1.0, 1.0) == (first.age, first.tokens, first.goes_on)
    assert lengths.survival(1) == pytest.approx(0.5, abs=1e-6)
    assert second.goes_on == pytest.approx(0.75, abs=1e-6)
    assert second.live == pytest.approx(4 / 3, abs=1e-5)


def test_ranks_that_end_together_go_on_longer_than_one() -> None:
    alone = sum(s.tokens * s.goes_on for s in stages(assumed(1000), 4, 1))
    together = sum(s.tokens * s.goes_on for s in stages(assumed(1000), 4, 8))

    assert together > 1.1 * alone
    assert together == pytest.approx(assumed(1000).expected_longest(32))


def test_stages_are_few_and_cover_every_token() -> None:
    for longest in (1, 7, STEPS, STEPS + 1, 40_000):
        found = stages(full_lengths(longest), 1, 1)
        assert len(found) <= STEPS
        assert longest == sum(stage.tokens for stage in found)


@pytest.mark.parametrize("spread", [0.2, 0.5, 1.0])
def test_a_fit_finds_the_spread_that_was_measured(spread: float) -> None:
    true = ResponseLengths(4096, 500.0, spread)

    assert spread == fitted_lengths(4096, 500.0, true.expected_longest(256), 256).spread


def test_a_long_tail_costs_more_than_a_short_one() -> None:
    """512 rows of 500 tokens in the mean: nobody reaches 2000 with a spread of 0.2."""
    short, long = ResponseLengths(8192, 500.0, 0.2), ResponseLengths(8192, 500.0, 1.0)

    assert short.expected_longest(512) < 1000
    assert long.expected_longest(512) > 4000
