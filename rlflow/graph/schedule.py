"""In which iterations something runs: in every n-th, and within a window of them.

What is not due in an iteration makes no rows and writes no version of its weights. This file
knows neither ops nor plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

Window = tuple[int, int | None]
ALWAYS: Window = (0, None)


class Scheduled(Protocol):
    """What is due in some iterations: those of its window whose remainder is its phase."""

    @property
    def every(self) -> int:
        """The period in iterations."""

    @property
    def phase(self) -> int:
        """The remainder of those that are due."""

    @property
    def within(self) -> Window:
        """The first iteration, and the one that is none of them any more."""


def is_due(it: Scheduled, iteration: int) -> bool:
    """Whether something is due in an iteration."""
    start, stop = it.within
    inside = start <= iteration and (stop is None or iteration < stop)
    return inside and iteration % it.every == it.phase


def last_due(it: Scheduled, iteration: int) -> int | None:
    """The latest iteration up to one in which something is due; None for none."""
    start, stop = it.within
    latest = iteration if stop is None else min(iteration, stop - 1)
    latest -= (latest - it.phase) % it.every
    return latest if latest >= max(start, 0) else None


def written(updates: Iterable[Scheduled], version: int) -> int:
    """The newest version up to one that an update has written; 0 where none has.

    An update that is due in iteration i writes version i + 1.
    """
    found = (last_due(update, version - 1) for update in updates)
    return max((last + 1 for last in found if last is not None), default=0)


def dues(updates: Iterable[Scheduled], start: int, stop: int) -> Iterator[int]:
    """The iterations from `start` on, before `stop`, in which one of them is due."""
    known = tuple(updates)
    return (i for i in range(start, stop) if any(is_due(update, i) for update in known))


def due_text(every: int, within: Window) -> str:
    """In words: `, every 2 iterations, from iteration 20`; empty for all iterations."""
    start, stop = within
    words = [f"every {every} iterations"] if every != 1 else []
    if stop is None:
        words += [f"from iteration {start} on"] if start else []
    else:
        words.append(f"in iterations {start} to {stop - 1}")
    return "".join(f", {word}" for word in words)
