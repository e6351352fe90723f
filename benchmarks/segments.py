"""Where the time of an action goes: moments of its way to a rank and back, taken from outside.

`Watch` stands between an executor and its backend and listens to the executor as well; it
knows their protocols and nothing of what is behind them. Seconds are those of
`time.perf_counter`, which the backend has to be given as its clock.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlflow.runtime.execute.executor import Backend, Completion
    from rlflow.scheduler.plan.plan import Action

NAMES = ("submit", "out", "rank", "back", "executor")


@dataclass(slots=True)
class Moments:
    """One action instance: handed to the backend, handed on, run, answered, heard of."""

    action: str
    iteration: int
    submitted: float = 0.0
    returned: float = 0.0
    start: float = 0.0
    end: float = 0.0
    done: float = 0.0
    heard: float = 0.0

    def segments(self) -> dict[str, float]:
        """Seconds between the moments; `out` is below 0 where a rank began before `returned`."""
        moments = (self.submitted, self.returned, self.start, self.end, self.done, self.heard)
        steps = (b - a for a, b in itertools.pairwise(moments))
        return dict(zip(NAMES, steps, strict=True))


class Watch:
    """A backend and a listener that note every action instance; `ends` are the iterations'."""

    def __init__(self, backend: Backend) -> None:
        self.moments: list[Moments] = []
        self.ends: list[float] = []
        self._backend = backend
        self._open: dict[tuple[str, int], Moments] = {}

    def submit(self, action: Action, iteration: int, done: Callable[[Completion], None]) -> None:
        """Hand the action on, and note when it comes back."""
        noted = Moments(action.id, iteration, submitted=time.perf_counter())
        self._open[action.id, iteration] = noted

        def answered(completion: Completion) -> None:
            noted.done = time.perf_counter()
            noted.start, noted.end = completion.start, completion.end
            done(completion)

        self._backend.submit(action, iteration, answered)
        noted.returned = time.perf_counter()

    def close(self, *, wait: bool = True) -> None:
        """Close what is watched."""
        self._backend.close(wait=wait)

    def started(self, action: Action, iteration: int) -> None:
        """Not needed here."""

    def finished(self, action: Action, completion: Completion) -> None:
        """The executor has heard of the end."""
        noted = self._open.pop((action.id, completion.iteration))
        noted.heard = time.perf_counter()
        self.moments.append(noted)

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The clock is read here."""
        self.ends.append(time.perf_counter())


def medians(moments: Sequence[Moments]) -> dict[str, float]:
    """The median seconds of every segment over action instances."""
    found = [noted.segments() for noted in moments]
    return {name: statistics.median(segments[name] for segments in found) for name in NAMES}
