"""Everything that a plan knows about one action."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.graph.schedule import due_text
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.plan import Action, Dep, Plan
from rlflow.scheduler.plan.text import (
    action_kind,
    counted,
    duration,
    parts_text,
    peak_text,
    table,
    where,
)

Rows = list[tuple[str, str]]
# Notes on what a plan chose of an instance, so that it fits or takes less.
LAYOUT = {"offload", "recompute", "reshard", "gradients"}
CUT = {
    "prompts": "groups",
    "finish": "rows, by who ends first",
    "groups": "groups, by which are complete first",
}
ROWS = "rows at once"
SEQUENCE = "sequence"


def explain(plan: Plan, action: Action, overlap: Sequence[str] = ()) -> str:
    """Everything the plan knows about one action, a line each.

    `overlap` are the actions that run beside it on its devices, as somebody has played the plan.
    """
    rows: Rows = [
        ("kind", action_kind(action)),
        ("because", f"{action.reason.text}   (rule: {action.reason.rule})"),
        ("runs on", f"{where(action, plan)}   {action.lane} lane"),
    ]
    if action.node and plan.graph.has_node(action.node):
        declared = plan.graph.node(action.node).where
        rows += [("declared", str(declared))] if declared else []
    rows += [("layout", text) for text in _chosen(plan, action)]
    rows += [*_when(action), *_versions(plan, action), *_waits(plan, action)]
    rows.append(("needs", ", ".join(action.needs) or "no weights"))
    rows += [*_memory(plan, action), *_time(plan, action, overlap)]
    return "\n".join([action.id, *table(rows)])


def _chosen(plan: Plan, action: Action) -> list[str]:
    """Why the instance that an action trains, or generates with, lies otherwise than was said."""
    trained = {i.name for i in plan.instances if i.optimizer in action.needs}
    name = action.node or ""
    use = plan.graph.node(name).op.use if plan.graph.has_node(name) else None
    rolls = {action.instance} if use == "rollout" else set()
    passes = {action.instance} if use == "forward" else trained
    found = []
    for note in plan.notes:
        named = {word.removesuffix(",") for word in note.text.split()}
        parts = {word.split("/")[0] for word in named}
        of_rule = {**dict.fromkeys(LAYOUT, trained & parts), SEQUENCE: passes & named}
        if of_rule.get(note.rule) or (note.rule == ROWS and rolls & named):
            found.append(note.text)
    return found


def _when(action: Action) -> Rows:
    """In which iterations it is due, how far it runs ahead, which piece of them it works on."""
    rows: Rows = []
    if not action.always and action.part is None:
        remainder = f", where i mod {action.every} = {action.phase}" if action.every > 1 else ""
        when = due_text(action.every, action.within).removeprefix(", ")
        rows.append(("due", f"{when}{remainder}"))
    if action.part is not None:
        rows.append(("due", "in every turn"))
    if action.closing:
        rows.append(("closing", "once more after the last iteration, on the final weights"))
    if action.ahead:
        ahead = f"runs {counted(action.ahead, 'iteration')} ahead of the last actions of a turn"
        rows.append(("ahead", ahead))
    if action.chunk is not None:
        cut = CUT[action.chunk.by]
        chunk = f"piece {action.chunk.index + 1} of {action.chunk.count} of an iteration's {cut}"
        rows.append(("chunk", chunk))
    return rows


def _versions(plan: Plan, action: Action) -> Rows:
    """The weights that it reads and writes by version, and how its rows lie."""
    trained = {instance.model for instance in plan.instances if instance.trained}
    rows: Rows = []
    for name, lag in action.reads:
        if plan.instance(name).model in trained:
            rows.append(("reads", f"{name} {_version(lag)}"))
        else:
            rows.append(("reads", f"{name}, which is frozen"))
    for name, lag in action.writes:
        made = "   (what the update of this iteration makes)" if lag == -1 else ""
        rows.append(("writes", f"{name} version {_relative(lag)}{made}"))
    if action.kind == "reshard":
        rows.append(("in flight", "what reads the old weights finishes first; nothing is paused"))
    for label, spread in (("rows in", action.takes), ("rows out", action.makes)):
        if spread is not None:
            rows.append((label, f"{spread.describe()}   {parts_text(spread)}"))
    return rows


def _relative(lag: int) -> str:
    return "i" if lag == 0 else f"i-{lag}" if lag > 0 else f"i+{-lag}"


def _version(lag: int) -> str:
    """A version that is read, relative to the iteration, and what that means."""
    if lag > 0:
        return f"version {_relative(lag)}   (at most {counted(lag, 'update')} old)"
    meaning = "before this iteration's update" if lag == 0 else "after this iteration's update"
    return f"version {_relative(lag)}   ({meaning})"


def _waits(plan: Plan, action: Action) -> Rows:
    rows: Rows = []
    for dep in action.after:
        rows.append(("waits for", f"{dep.action}{_when_was(plan, action, dep)}   ({dep.kind})"))
    return rows


def _when_was(plan: Plan, action: Action, dep: Dep) -> str:
    """Of which iteration an action is that another waits for, seen from the other's iteration."""
    distance = dep.distance + action.ahead - plan.action(dep.action).ahead
    if distance == 0:
        return ""
    return f" of {counted(abs(distance), 'iteration')} {'before' if distance > 0 else 'later'}"


def _memory(plan: Plan, action: Action) -> Rows:
    """What it holds only while it runs, piece by piece, and the peak with all that is resident."""
    peak = peak_text(action, plan)
    transient = action.cost.transient
    if transient is None:
        return [("memory", f"not known while it runs, {peak} in all")]
    pieces = ", ".join(f"{amount(size)} {name}" for name, size in action.cost.holds)
    rows = [("memory", f"{amount(transient)} while it runs, {peak} in all")]
    if pieces:
        rows.append(("of which", pieces))
    if action.part is not None:
        part = plan.part(action.part)
        size = "?" if part.size is None else amount(part.size)
        left = f", {amount(part.residual)} stay on it asleep" if part.residual else ""
        rows.append(("part", f"{part.kind} of {part.instance}, {size} on each device{left}"))
    for part in plan.parts:
        if part.holds and part.name in (*action.needs, action.part):
            held = ", ".join(f"{amount(size)} {name}" for name, size in part.holds)
            rows.append(("holds", f"{part.name}: {held}"))
    return rows


def _time(plan: Plan, action: Action, overlap: Sequence[str]) -> Rows:
    """Its estimate, its slack, and what runs beside it on its devices."""
    cost = action.cost
    moved = f"   {amount(cost.moved)} moved" if cost.moved else ""
    rows: Rows = [("estimate", f"{duration(cost.seconds)}{moved}   from {cost.source}")]
    if plan.timing is None:
        return rows
    slack = dict(plan.timing.slack).get(action.id)
    if action.id in plan.timing.critical:
        rows.append(("slack", "none: it is on the critical cycle"))
    elif slack is not None:
        rows.append(("slack", f"{duration(slack)} later makes no iteration longer"))
    if overlap:
        rows.append(("beside", f"{', '.join(overlap)}   (as simulated)"))
    return rows
