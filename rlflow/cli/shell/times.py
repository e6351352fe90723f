"""Options that take a time: one reading of it for all, one error for what is none."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from rlflow.cli.shell.numbers import is_count
from rlflow.errors import Finding, UsageError
from rlflow.scheduler.plan.durations import read_seconds


def time_of(option: str, *, bare: bool) -> Callable[[str | float], float]:
    """Reads the seconds of what an option is told; a number alone where it is `bare`.

    What it gives raises UsageError E209 for what is no time, or not above 0.
    """

    def time(value: str | float) -> float:
        seconds = read_seconds(value) if isinstance(value, str) else value
        if seconds is None and bare:
            with suppress(ValueError):
                seconds = float(value)
        if seconds is not None and 0 < seconds < math.inf:
            return float(seconds)
        raise UsageError(no_time(option, str(value), bare=bare))

    return time


def check_deadline(seconds: float | None) -> None:
    """Raise UsageError E209 for a longest wait that is no time at all, or never ends."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(no_time("--deadline", f"{seconds:g}", bare=True))


def no_time(option: str, said: str, *, bare: bool) -> Finding:
    """What is wrong with what is no time to wait."""
    forms = "600s, 10m, 4h, 2d, 4:00:00 or 1-12:00:00"
    number = is_count(said)
    return Finding(
        code="E209",
        what=f"{option} {said} is not a time to wait",
        got="a number without a unit" if number and not bare else "",
        expected=f"seconds above 0, or {forms}" if bare else forms,
        fix=f"{option} {said}m" if number else f"{option} {'600' if bare else '4h'}",
    )
