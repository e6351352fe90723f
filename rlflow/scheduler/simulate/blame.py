"""What something waited for, followed back over time: of a plan that was played, or of a run.

Whoever calls knows of every span which other one let it start, and what they are. This file
knows starts and ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class TimedSpan(Protocol):
    """What has a start and an end, in seconds."""

    @property
    def start(self) -> float:
        """When it began."""

    @property
    def end(self) -> float:
        """When it was over."""


def waited_for(
    spans: Sequence[TimedSpan], released: Sequence[int | None], place: int, free: float
) -> Iterator[tuple[int | None, float, float]]:
    """What the span at `place` waited for since `free`: (place of a span, from, to), latest first.

    `released[n]` is the place of the span whose end let span n start. What released it, what
    released that, and so on, each for as long as it ran. The place is None for time in which
    none of these ran. The pieces cover `free` to the start of the span, each moment once.
    """
    until, at = spans[place].start, released[place]
    while at is not None and until > free:
        ended = min(spans[at].end, until)
        if ended < until:
            yield None, max(ended, free), until
        if ended > free:
            yield at, max(spans[at].start, free), ended
        until, at = min(spans[at].start, ended), released[at]
    if until > free:
        yield None, free, until
