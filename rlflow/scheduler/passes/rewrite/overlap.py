"""Notes `reward beside`: what a reward runs beside, and how much later it may end.

A reward waits for the rollout whose rows it reads and for nothing else, so it costs time only
where nothing else goes on meanwhile. This file looks at a plan that is finished, and changes
nothing but its notes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from rlflow.scheduler.context import Context
from rlflow.scheduler.plan.plan import Action, Note, Plan
from rlflow.scheduler.plan.text import duration

MOST_NAMED = 3
RULE = "reward beside"


def rewards_beside(plan: Plan, context: Context) -> Plan:
    """Note for every reward which uses of models run beside it, and its slack."""
    bit = {action.id: 1 << number for number, action in enumerate(plan.actions)}
    ordered = _ordered(plan, bit)
    uses = [(a, bit[a.id]) for a in plan.actions if a.kind == "run" and a.instance]
    slack = dict(plan.timing.slack) if plan.timing else {}
    notes = []
    for node in plan.graph.nodes:
        if node.op.name != "reward":
            continue
        runs = [a for a in plan.actions if a.kind == "run" and a.node == node.name]
        if runs:
            always = functools.reduce(int.__and__, (ordered[run.id] for run in runs))
            beside = [action for action, own in uses if not always & own]
            texts = [_beside(runs[0], beside), _slack(runs, slack)]
            text = f"{node.name} {'; '.join(text for text in texts if text)}"
            notes.append(Note(rule=RULE, text=text))
    return replace(plan, notes=(*plan.notes, *notes))


def _now(action: Action) -> list[str]:
    return [dep.action for dep in action.after if dep.distance == 0]


def _ordered(plan: Plan, bit: Mapping[str, int]) -> dict[str, int]:
    """The actions of its turn that each action waits for or holds up, itself included; as bits.

    An action is listed after those that it waits for.
    """
    before, after = dict(bit), dict(bit)
    for action in plan.actions:
        for name in _now(action):
            before[action.id] |= before[name]
    for action in reversed(plan.actions):
        for name in _now(action):
            after[name] |= after[action.id]
    return {name: before[name] | after[name] for name in bit}


def _beside(reward: Action, beside: list[Action]) -> str:
    """The uses of models that some run of a reward neither waits for nor holds up in its turn."""
    seconds: dict[str, float] = {}
    for action in beside:
        longest = max(seconds.get(str(action.node), 0.0), action.cost.seconds or 0.0)
        seconds[str(action.node)] = longest
    named = sorted(seconds, key=lambda name: -seconds[name])[:MOST_NAMED]
    where = "the host" if reward.on_host else reward.pool
    if not named:
        return f"runs on {where} with no use of a model beside it"
    *more, last = named
    return (
        f"runs on {where} beside {', '.join(more)} and {last}"
        if more
        else (f"runs on {where} beside {last}")
    )


def _slack(runs: list[Action], slack: Mapping[str, float]) -> str:
    known = [slack[run.id] for run in runs if run.id in slack]
    if not known:
        return ""
    if min(known) <= 0:
        return "it is on the critical path"
    return f"the period is the same if it ends {duration(min(known))} later"
