"""Numbers of parts joined, against the numbers of everything at once."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rlflow.contract.values import Stat
from rlflow.errors import RunError
from rlflow.runtime.execute.stats import join_metrics

NUMBERS = st.lists(st.floats(-1e6, 1e6), max_size=8)


def stats(values):
    """The four numbers of some values, by numpy."""
    wide = np.array(values, dtype=np.float64)
    count = float(len(values))
    some = bool(values)
    return {
        "mean": Stat(kind="mean", total=wide.sum(), count=count),
        "std": Stat(kind="std", total=wide.sum(), count=count, spread=wide.var() if some else 0.0),
        "max": Stat(kind="max", total=wide.max() if some else 0.0, count=float(some)),
        "min": Stat(kind="min", total=wide.min() if some else 0.0, count=float(some)),
    }


@given(st.lists(NUMBERS, min_size=1, max_size=5))
def test_parts_joined_are_the_whole(parts):
    whole = np.array([value for part in parts for value in part])

    made = join_metrics([stats(part) for part in parts])

    if not len(whole):
        assert dict.fromkeys(("mean", "std", "max", "min"), 0.0) == made
        return
    largest = max(1.0, np.abs(whole).max())
    assert made["mean"] == pytest.approx(whole.mean(), rel=1e-12, abs=1e-12 * largest)
    assert made["std"] == pytest.approx(whole.std(), rel=1e-9, abs=1e-7 * largest)
    assert (whole.max(), whole.min()) == (made["max"], made["min"])


@given(NUMBERS)
def test_one_part_keeps_its_values_to_the_bit(values):
    made = stats(values)

    assert {name: stat.value for name, stat in made.items()} == join_metrics([made])


def test_a_deviation_far_from_zero_keeps_its_digits():
    first, second = [1e9, 1e9 + 1], [1e9 + 2, 1e9 + 3]

    made = join_metrics([stats(first), stats(second)])["std"]

    assert made == pytest.approx(math.sqrt(1.25), rel=1e-12)


def test_what_only_some_parts_have_is_joined_over_these():
    made = join_metrics([{}, {"x_max": Stat(kind="max", total=-3.0)}, {"y": 2.0}])

    assert {"x_max": -3.0, "y": 2.0} == made


def test_nothing_gives_nothing():
    assert {} == join_metrics([]) == join_metrics([{}, {}])


@pytest.mark.parametrize("kind", ["mean", "max", "min"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_number_that_is_none_stays_none(kind, order):
    parts = [{"x": Stat(kind=kind, total=math.nan)}, {"x": Stat(kind=kind, total=1.0)}]

    assert math.isnan(join_metrics(parts[::order])["x"])


@pytest.mark.parametrize("value", [0.5, math.nan, math.inf, 0.0, -3])
def test_plain_numbers_that_agree_are_one(value):
    made = join_metrics([{"loss": value}, {"loss": value}])["loss"]

    assert isinstance(made, float)
    assert math.isnan(made) if math.isnan(value) else value == made


def test_the_first_of_plain_numbers_that_differ_in_the_last_digit_is_taken():
    assert {"loss": 0.1} == join_metrics([{"loss": 0.1}, {"loss": 0.1 * (1 + 1e-9)}])


@pytest.mark.parametrize("other", [0.101, math.nan, math.inf, 0.0, -0.1])
def test_ranks_that_disagree_are_an_error(other):
    with pytest.raises(RunError, match="E762") as caught:
        join_metrics([{"loss": 0.1, "lr": 1e-9}, {"loss": other, "lr": 1e-9}])

    assert f"got          0.1, {other}\n" in str(caught.value)


def test_small_numbers_that_differ_are_no_agreement():
    with pytest.raises(RunError, match="ranks disagree about lr"):
        join_metrics([{"lr": 1e-7}, {"lr": 2e-7}])
