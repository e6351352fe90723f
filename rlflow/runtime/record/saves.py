"""When a checkpoint is due, and which ones stay.

A rule of iterations, of seconds, or of both: at every so many iterations, if so much time has
passed. This file writes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.errors import Finding, UsageError
from rlflow.scheduler.plan.durations import read_seconds

FORM = re.compile(r"(?:(?P<every>[1-9]\d*)(?:,|$))?(?P<time>.+)?")
LEAST = "min:"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRule:
    """After every multiple of `every` iterations (0: after any) when `seconds` have passed."""

    every: int
    seconds: float = 0.0

    def due(self, done: int, passed: float) -> bool:
        """Whether to save after so many iterations, so many seconds after the last save."""
        return passed >= self.seconds and (not self.every or done % self.every == 0)


def parse_rule(text: str, *, drains: bool) -> SaveRule:
    """The rule that `--save-every` says: `50`, `600s`, `10m`, or `50,600s` for both.

    Where rollouts run ahead a run `drains` at checkpoints, so that its numbers depend on where
    those are: not on a clock. Raises UsageError E312.
    """
    found = FORM.fullmatch(text)
    every = int(found["every"] or 0) if found else 0
    seconds = read_seconds(found["time"]) if found and found["time"] else 0.0
    if seconds is None or text.endswith(",") or not (every or seconds):
        raise UsageError(
            Finding(
                code="E312",
                what=f"--save-every {text!r} is no number of iterations and no time",
                expected="iterations, 50; a time, 600s, 10m or 2h; or both, 50,600s",
                fix="--save-every 50",
            )
        )
    if drains and not every:
        raise UsageError(
            Finding(
                code="E312",
                what=f"--save-every {text}: rollouts that run ahead, and loops that keep rows, "
                "begin anew at a checkpoint; at times of a clock no run could be repeated",
                expected="after how many iterations one may be saved, and the time",
                fix=f"--save-every 10,{text}",
            )
        )
    return SaveRule(every=every, seconds=seconds)


def best_of(saved: Sequence[int], curve: Mapping[int, float], metric: str) -> int | None:
    """Of checkpoints after so many iterations the best one; None where no number is known.

    The number of a checkpoint is the metric's newest one up to its iteration: line `i` of the
    metrics is of weights after `i` updates. The highest wins, the lowest for `min:NAME`, the
    older one of equals.
    """
    sign = -1.0 if metric.startswith(LEAST) else 1.0
    scores = {}
    for done in sorted(saved):
        known = [iteration for iteration in curve if iteration <= done]
        if known:
            scores[done] = sign * curve[max(known)]
    scores = {done: score for done, score in scores.items() if not math.isnan(score)}
    return max(scores, key=lambda done: (scores[done], -done)) if scores else None
