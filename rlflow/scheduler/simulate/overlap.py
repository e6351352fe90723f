"""What runs beside an action on its devices, on a virtual clock."""

from __future__ import annotations

from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.simulate.simulate import play_plan


def overlapping(plan: Plan, action: Action) -> list[str]:
    """The actions on the other lane of its devices that run while it does, in the plan's order."""
    others = [
        other
        for other in plan.actions
        if other.lane != action.lane and set(other.devices) & set(action.devices)
    ]
    if not others:
        return []
    spans = play_plan(plan).spans
    own = [span for span in spans if span.action.id == action.id]
    names = {
        span.action.id
        for span in spans
        if any(span.start < mine.end and mine.start < span.end for mine in own)
    }
    return [other.id for other in others if other.id in names]
