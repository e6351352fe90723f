"""The period of a schedule whose turns differ: each turn's tasks take their own seconds.

Where a turn waits for two tasks, it waits for the longer one: the mean of maxima is no less than
the maximum of means, which is the period of a cycle (Baccelli et al. 1992, section 7.2). Found by
playing turns, each task as soon as all are over that it comes after. This file knows numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlflow.scheduler.periodic.cycles import Arc


def period_of_turns(
    seconds: Callable[[int, int], float], arcs: Sequence[Arc], count: int, turns: int
) -> float:
    """The mean seconds that a turn adds in the last two thirds of `turns`.

    `seconds(task, turn)`; arcs (source, target, distance) stand in an order in which those of one
    turn flow forward.
    """
    begun = max(turns // 3 - 1, 0)
    ends: list[list[float]] = []
    for turn in range(turns):
        starts = [0.0] * count
        for before, after, distance in arcs:
            if 0 < distance <= turn:
                starts[after] = max(starts[after], ends[turn - distance][before])
        now = [0.0] * count
        for before, after, distance in arcs:
            now[before] = starts[before] + seconds(before, turn)
            if distance == 0:
                starts[after] = max(starts[after], now[before])
        ends.append([start + seconds(task, turn) for task, start in enumerate(starts)])
    over = [max(each) for each in ends]
    return (over[-1] - over[begun]) / (turns - 1 - begun)
