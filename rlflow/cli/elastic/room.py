"""How many devices of a Ray cluster a run may have, once some of them are lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rlflow.cli.machines import answering_at
from rlflow.graph.placement import Placement
from rlflow.scheduler.devices.cluster import Cluster

# A cluster notices after seconds that a run has ended and gives its devices back.
SETTLED_SECONDS = 15.0
POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedDevices:
    """The devices that a run was told to have, and the placement that shares them out."""

    placement: Placement
    cluster: Cluster
    address: str | None

    def fitting(self, there: int) -> int:
        """The most devices that the placement divides, of those there are; 0 where none."""
        most = min(there, self.cluster.count)
        found = self.placement.most_of(most)
        return found if found <= most else 0


def left_of(wanted: WantedDevices, seconds: float) -> int:
    """How many of the wanted devices a run may have now, waiting for that they are enough for one.

    A cluster of the run's own is started anew, with all there are. Of another, nodes count that
    answer, and of those what is free: all of them at first, for a run that has just ended still
    holds some. 0 where not even the fewest are there after so many seconds.
    """
    if wanted.address is None:
        return wanted.fitting(wanted.cluster.count)
    settled = time.monotonic() + SETTLED_SECONDS
    end = time.monotonic() + max(seconds, SETTLED_SECONDS)
    while True:
        there, free = answering_at(wanted.address, wanted.cluster)
        now = time.monotonic()
        if wanted.fitting(free) and (free == there or now >= settled):
            return wanted.fitting(free)
        if now >= end:
            return 0
        time.sleep(POLL_SECONDS)


def seen_twice(wanted: WantedDevices, have: int, room: Callable[[], int]) -> Callable[[], bool]:
    """Whether there has been room for more than a run has at two looks in a row."""
    before = have

    def more() -> bool:
        nonlocal before
        now = wanted.fitting(room())
        both, before = min(now, before), now
        return both > have

    return more
