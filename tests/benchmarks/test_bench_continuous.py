"""The figures of the comparisons of rollouts that never drain."""

from __future__ import annotations

import learning_continuous
import pytest
from continuous import WARMUP, rate, step_seconds
from learning_all import Series


def test_the_difference_is_of_pairs_of_the_same_seed():
    """By 0.1, 0.2 and 0.3, whose standard deviation is 0.1, though seeds differ by more."""
    made = [
        Series(metric="eval/reward", held_out=True, iterations=(0, 20), values=rows)
        for rows in (((0, 0.1), (0, 0.5), (0, 0.3)), ((0, 0.2), (0, 0.7), (0, 0.6)))
    ]
    apart, reach = learning_continuous.difference(*made)
    assert pytest.approx(0.2) == apart
    assert pytest.approx(4.30 * 0.1 / 3**0.5) == reach


def test_steps_between_those_that_were_timed_lie_on_lines():
    narrow = {"1": 1.0, "4": 4.0, "16": 10.0}
    wide = {"1": 2.0, "4": 5.0, "16": 11.0}
    steps = {"50": narrow, "250": wide}
    assert pytest.approx(7.0) == step_seconds(steps, 10, 50)
    assert pytest.approx(13.0) == step_seconds(steps, 22, 50)
    assert pytest.approx(7.5) == step_seconds(steps, 10, 150)


def test_a_rate_is_of_what_ends_after_the_first_iterations():
    ends = [float(10 * number) for number in range(WARMUP)] + [35.0, 40.0]
    assert pytest.approx(12.0) == rate(ends, [99.0] * WARMUP + [60.0, 60.0])
