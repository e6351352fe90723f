"""Notes `reward beside`: what a reward runs beside, and how much later it may end.

A reward waits for the rollout whose rows it reads and for nothing else, so it costs time only
where nothing else goes on meanwhile. This file looks at a plan that is finished, and changes
nothing but its notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Action, Note, Plan
from rlflow.scheduler.text import duration

MOST_NAMED = 3
RULE = "reward beside"


def rewards_beside(plan: Plan, context: Context) -> Plan:
    """Note for every reward which uses of models run beside it, and its slack."""
    before = {action.id: _now(action) for action in plan.actions}
    after: dict[str, list[str]] = {action.id: [] for action in plan.actions}
    for name, sources in before.items():
        for source in sources:
            after[source].append(name)
    slack = dict(plan.timing.slack) if plan.timing else {}
    notes = []
    for node in plan.graph.nodes:
        runs = [a for a in plan.actions if a.kind == "run" and a.node == node.name]
        if node.op.name == "reward" and runs:
            texts = [_beside(plan, runs, before, after), _slack(runs, slack)]
            text = f"{node.name} {'; '.join(text for text in texts if text)}"
            notes.append(Note(rule=RULE, text=text))
    return replace(plan, notes=(*plan.notes, *notes))


def _now(action: Action) -> list[str]:
    return [dep.action for dep in action.after if dep.distance == 0]


def _beside(
    plan: Plan,
    runs: list[Action],
    before: Mapping[str, list[str]],
    after: Mapping[str, list[str]],
) -> str:
    """The uses of models that some run of a reward neither waits for nor holds up in its turn."""
    ordered = set(before)
    for run in runs:
        ordered &= _reached(run.id, before) | _reached(run.id, after)
    seconds: dict[str, float] = {}
    for action in plan.actions:
        if action.kind == "run" and action.instance and action.id not in ordered:
            longest = max(seconds.get(str(action.node), 0.0), action.cost.seconds or 0.0)
            seconds[str(action.node)] = longest
    named = sorted(seconds, key=lambda name: -seconds[name])[:MOST_NAMED]
    where = "the host" if runs[0].on_host else runs[0].pool
    if not named:
        return f"runs on {where} with no use of a model beside it"
    return f"runs on {where} beside {' and '.join(named)}"


def _reached(start: str, arcs: Mapping[str, Iterable[str]]) -> set[str]:
    """What arcs lead to from an action, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        for name in arcs[waiting.pop()]:
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def _slack(runs: list[Action], slack: Mapping[str, float]) -> str:
    known = [slack[run.id] for run in runs if run.id in slack]
    if not known:
        return ""
    if min(known) <= 0:
        return "it is on the critical path"
    return f"the period is the same if it ends {duration(min(known))} later"
