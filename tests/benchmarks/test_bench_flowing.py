"""How sides of the benchmark of groups that flow into one step are read."""

from __future__ import annotations

import pytest
from continuous import WARMUP
from flowing import per_iteration, updates_take


def test_an_update_is_all_of_its_chunks():
    after = [["actor.update[1/2]", WARMUP, 1.0], ["actor.update[2/2]", WARMUP, 2.5]]
    spent = [["actor.update[1/2]", 0, 9.0], *after, ["actor.rollout[1/2]", WARMUP, 7.0]]
    assert pytest.approx(3.5) == updates_take({"spent": spent})


def test_an_iteration_is_of_those_after_the_first():
    ends = [*(10.0 * number for number in range(WARMUP)), 34.0, 40.0]
    assert pytest.approx((40.0 - 10.0 * (WARMUP - 1)) / 2) == per_iteration(ends)
