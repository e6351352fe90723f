"""Coefficients that follow what is measured: by hand, guards, positivity for every history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.ops.math.controllers import adaptive_entropy, adaptive_kl, gated_entropy

anything = st.floats(allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),  # at the target nothing moves
        (0.11, 1 + 0.1 * 64 / 1000),  # error 0.1, within the clip
        (0.095, 1 - 0.05 * 64 / 1000),
        (0.5, 1 + 0.2 * 64 / 1000),  # error 4, held at 0.2
        (0.0, 1 - 0.2 * 64 / 1000),
        (-3.0, 1 - 0.2 * 64 / 1000),  # k1 may be negative
    ],
)
def test_the_coefficient_of_kl_by_hand(kl, factor):
    found = adaptive_kl(0.3, kl, target=0.1, horizon=1000, n=64)
    assert pytest.approx(0.3 * factor, rel=1e-12) == found


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_moves_no_coefficient(kl):
    assert 0.3 == adaptive_kl(0.3, kl, target=0.1, horizon=10, n=4)
    assert 0.3 == adaptive_entropy(0.3, kl, target=0.1, step=0.01, low=0, high=1)


@pytest.mark.parametrize(("horizon", "target"), [(0, 0.1), (-1, 0.1), (10, 0), (10, -1)])
def test_a_horizon_and_a_target_are_above_0(horizon, target):
    with pytest.raises(ValueError, match="above 0"):
        adaptive_kl(0.3, 0.1, target=target, horizon=horizon, n=1)


def test_a_batch_far_beyond_the_horizon_takes_at_most_four_fifths():
    """1 - 0.2 * 60 / 10 is -0.2; 1 - 0.2 * 30 / 10 is 0.4, within the bound."""
    assert pytest.approx(0.2) == adaptive_kl(1.0, 0.0, target=1, horizon=10, n=60)
    assert pytest.approx(0.4) == adaptive_kl(1.0, 0.0, target=1, horizon=10, n=30)
    assert pytest.approx(2.2) == adaptive_kl(1.0, 9.0, target=1, horizon=10, n=60)


@given(
    st.lists(anything, max_size=30),
    st.floats(1e-3, 10),
    st.floats(0.1, 1e4),
    st.integers(0, 10**6),
)
def test_the_coefficient_of_kl_stays_above_0_and_finite(history, target, horizon, n):
    coef = 0.2
    for kl in history:
        coef = adaptive_kl(coef, kl, target=target, horizon=horizon, n=n)
        assert 0 < coef < math.inf


def test_the_coefficient_of_kl_never_reaches_0():
    coef = 1.0
    for _ in range(2000):
        coef = adaptive_kl(coef, 0.0, target=1, horizon=1, n=100)
    assert coef > 0
    assert adaptive_kl(coef, 9.0, target=1, horizon=1, n=1) > coef


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_larger_divergence_never_has_a_smaller_coefficient(one, two):
    low, high = sorted((one, two))
    rules = {"target": 0.3, "horizon": 50, "n": 20}
    assert adaptive_kl(0.1, low, **rules) <= adaptive_kl(0.1, high, **rules)


@pytest.mark.parametrize(
    ("coef", "entropy", "expected"),
    [
        (0.1, 0.19, 0.105),
        (0.1, 0.2, 0.105),  # at the target it still rises
        (0.1, 0.21, 0.095),
        (0.002, 0.21, 0.0),
        (0.998, 0.1, 1.0),
    ],
)
def test_the_coefficient_of_entropy_by_hand(coef, entropy, expected):
    found = adaptive_entropy(coef, entropy, target=0.2, step=0.005, low=0.0, high=1.0)
    assert pytest.approx(expected, rel=1e-12) == found


@pytest.mark.parametrize(
    ("entropy", "expected"), [(None, 0.1), (0.1, 0.1), (0.2, 0.1), (0.201, 0.0), (math.nan, 0.1)]
)
def test_the_entropy_acts_up_to_its_target(entropy, expected):
    assert expected == gated_entropy(0.1, entropy, target=0.2)
