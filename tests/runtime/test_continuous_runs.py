"""Whole runs of rollouts that never drain: no group comes twice, and no token is too old."""

from __future__ import annotations

import pytest

from tests.runtime.whole_runs import LASTING, REPLICAS
from tests.runtime.whole_runs import numbers as logged

pytestmark = pytest.mark.torch

GROUPS = tuple(f"seen/group{place}" for place in range(4))
SPANS = {"apart2": 1, "apart4": 3, "together1": 1, "together3": 3, "replicas4": 3}

SLOW = pytest.param("replicas4", marks=(pytest.mark.slow, pytest.mark.ray))


def numbers(run) -> list[dict[str, float]]:
    """The numbers of every iteration; those that `seen` has made are equal for all rows."""
    return [
        {
            name.removesuffix("_mean") if name.startswith("seen/") else name: value
            for name, value in line.items()
        }
        for line in logged(run)
    ]


def groups(line: dict[str, float]) -> list[int]:
    return [int(line[name]) for name in GROUPS]


@pytest.mark.rows(2)
@pytest.mark.parametrize("placement", [*list(SPANS)[:-1], SLOW])
def test_no_group_is_used_twice_and_no_token_is_too_old(train, placement):
    what, span = REPLICAS if placement == "replicas4" else LASTING, SPANS[placement]
    lines = numbers(train(what, placement))
    used = [group for line in lines for group in groups(line)]
    assert len(used) == len(set(used)) == 4 * len(lines)
    staleness = int(placement[-1])
    for i, line in enumerate(lines):
        assert (4, 8) == (line["seen/groups"], line["seen/samples"])
        assert 1 == line["seen/up"]
        assert max(groups(line)) < 4 * (i + span + 1)
        assert i - staleness <= line["seen/oldest"] <= line["seen/newest"] <= i
        assert i - line["seen/oldest"] == line["actor.rollout/lag_max"]
        assert line["actor.update/staleness/max"] <= staleness
    assert 0 < sum(line["seen/crossed"] for line in lines), "no row lived through an update"


def test_at_first_it_makes_the_tokens_of_a_rollout_that_drains(train):
    """Before any update a group's tokens are those that it has in its own iteration."""
    lasting, drained = (numbers(train(LASTING, name)) for name in ("apart2", "drained"))
    first = set(groups(drained[0])) | set(groups(drained[1]))
    assert set(groups(lasting[0])) <= first
