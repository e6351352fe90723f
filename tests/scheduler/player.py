"""A plan played in one random interleaving under the eyes of the monitor: an oracle for `verify`.

It knows nothing of reachability: it starts whatever `after` allows, in a random order, and the
monitor looks at devices, memory, rows and weights as they are at that moment.
"""

from __future__ import annotations

from random import Random

from rlflow.runtime.execute.executor import Completion
from rlflow.runtime.execute.monitor import Monitor
from rlflow.runtime.execute.segments import Segment
from rlflow.runtime.execute.stats import logged_as
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.turns import refilled, serving


def play(plan: Plan, seed: int, iterations: int = 4) -> list[str]:
    """What the monitor says of one interleaving of a few iterations; [] where it says nothing."""
    monitor = Monitor(plan, start=0, end=iterations, barrier=iterations, ahead=iterations)
    try:
        _drive(plan, monitor, Random(seed), iterations)
    except AssertionError as error:
        return [str(error)]
    return []


def _drive(plan: Plan, monitor: Monitor, random: Random, end: int) -> None:
    """Start and end every turn of every action, at random among those that are allowed."""
    first = -max(action.ahead for action in plan.actions)
    known = refilled(plan), False, {}, serving(plan)
    segment = Segment(0, end, first, frozenset(), *known)
    pending = [(action, turn) for turn in range(first, end) for action in plan.actions]
    eager, ends = random.choice([0.3, 0.6, 0.95]), random.choice([0.0, 0.0, 0.5])
    running, over = [], set()
    while pending or running:
        allowed = [
            (action, turn)
            for action, turn in pending
            if all(
                turn - dep.distance < first or (dep.action, turn - dep.distance) in over
                for dep in action.after
            )
        ]
        if allowed and (not running or random.random() < eager):
            action, turn = random.choice(allowed)
            pending.remove((action, turn))
            segment.turns[action.id] = turn
            i = segment.done_for(action)
            if segment.due(action) and not monitor.trips.left_out(action.id, i):
                monitor.started(action, i)
                running.append((action, turn, i))
            else:
                over.add((action.id, turn))
        else:
            assert running, "stuck"
            action, turn, i = running.pop(random.randrange(len(running)))
            reached = action.trip.goal * (random.random() < ends) if action.trip else 0.0
            made = {"reached": reached}
            ended = Completion(action=action.id, iteration=i, start=0.0, end=0.0, metrics=made)
            monitor.finished(action, ended)
            over.add((action.id, turn))
    for i in range(end):
        monitor.iteration_done(i, {f"{logged_as(action)}/n": i for action in plan.actions})
    monitor.finish()
