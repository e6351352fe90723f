"""How sides of the benchmark of groups that flow into one step are read."""

from __future__ import annotations

import pytest
from continuous import WARMUP
from flowing import least, per_iteration


def test_each_action_counts_with_the_turn_in_which_it_took_least():
    turns = [
        {"spent": [["a", 0, 1.0], ["b", 0, 3.0]], "length": [5]},
        {"spent": [["a", 0, 2.0], ["b", 0, 2.5]], "length": [5]},
    ]
    found = least(turns)
    assert [["a", 0, 1.0], ["b", 0, 2.5]] == found["spent"]
    assert [5] == found["length"]


def test_an_iteration_is_of_those_after_the_first():
    ends = [*(10.0 * number for number in range(WARMUP)), 34.0, 40.0]
    assert pytest.approx((40.0 - 10.0 * (WARMUP - 1)) / 2) == per_iteration(ends)
