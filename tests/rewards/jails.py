"""Which walls there are on this machine, for tests that want them all."""

from __future__ import annotations

import pytest

from rlflow.errors import RewardError
from rlflow.rewards.sandbox import walls_here


def kind(isolation):
    """A wall as a parameter; skipped, with the reason, where it cannot be built."""
    try:
        walls_here(isolation)
    except RewardError as error:
        reason = error.findings[0].got
        return pytest.param(isolation, marks=pytest.mark.skip(reason=reason))
    return isolation


WALLS = [kind("bubblewrap"), kind("namespaces")]
JAILED = pytest.mark.parametrize("isolation", WALLS)
ALL = pytest.mark.parametrize("isolation", [*WALLS, "limits"])
