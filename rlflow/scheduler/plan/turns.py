"""What the executor, the simulator and the fake backend need to know of a plan's turns."""

from __future__ import annotations

from collections.abc import Callable

from rlflow.scheduler.plan.plan import Action, Plan

Seconds = Callable[[Action, int], float]

UNKNOWN_SECONDS = 1.0


def estimated(action: Action, iteration: int) -> float:
    """Estimated seconds of an instance, weighted by its chance to run; 1 where none is known.

    Those of an action whose iterations differ are drawn ones, over and over.
    """
    seconds = UNKNOWN_SECONDS if action.cost.seconds is None else action.cost.seconds
    swings = action.cost.swings
    return seconds * action.chance * (swings[iteration % len(swings)] if swings else 1.0)


def serving(plan: Plan) -> dict[str, int]:
    """The iteration that each sleep and wake serves, relative to its turn.

    A wake serves the first run that waits for it and needs its part. A sleep serves the last run
    before it that needed the part. Runs ahead of their turn are of a later iteration.
    """
    moves = {action.id: action for action in plan.actions if action.part is not None}
    users = {action.id: action for action in plan.actions if action.part is None}
    brought: dict[str, list[int]] = {}
    for user in users.values():
        for dep in user.after:
            if dep.action in moves and moves[dep.action].part in user.needs:
                brought.setdefault(dep.action, []).append(dep.distance + user.ahead)
    found = {name: min(offsets) for name, offsets in brought.items()}
    for move in moves.values():
        before = [(users[dep.action], dep.distance) for dep in move.after if dep.action in users]
        last = [user.ahead - distance for user, distance in before if move.part in user.needs]
        if move.kind == "sleep" and last:
            found[move.id] = max(last)
    return found


def refilled(plan: Plan) -> frozenset[str]:
    """The reshards whose targets are discarded in every turn, so that they run in every turn."""
    emptied = {action.instance for action in plan.actions if action.mode == "discard"}
    return frozenset(a.id for a in plan.actions if emptied.intersection(a.targets))
