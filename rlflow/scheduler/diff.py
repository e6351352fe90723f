"""Two plans side by side: devices, time, memory, bytes moved, actions only in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.scheduler.cluster import amount
from rlflow.scheduler.order import seconds_of
from rlflow.scheduler.plan import HOST, Plan
from rlflow.scheduler.text import action_what, duration, table


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What two plans of one graph have in common and what not."""

    names: tuple[str, str]
    rows: tuple[tuple[str, str, str], ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    moved: tuple[tuple[str, str, str], ...]
    same: bool

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        first, second = self.names
        return {
            "placements": list(self.names),
            "same": self.same,
            "figures": {label: {first: a, second: b} for label, a, b in self.rows},
            "only": {first: list(self.only[0]), second: list(self.only[1])},
            "moved": [{"node": node, first: a, second: b} for node, a, b in self.moved],
        }


def compare(first: Plan, second: Plan) -> PlanDiff:
    """Compare two plans."""
    names = ({a.id for a in first.actions}, {a.id for a in second.actions})
    labels = [(a.id, f"{a.kind} {action_what(a)}") for a in first.actions if a.id not in names[1]]
    others = [(a.id, f"{a.kind} {action_what(a)}") for a in second.actions if a.id not in names[0]]
    moved = []
    for action in first.actions:
        if action.id in names[1]:
            other = second.action(action.id)
            here, there = (
                f"{action.pool}{list(action.devices)}",
                f"{other.pool}{list(other.devices)}",
            )
            if here != there and not action.on_host:
                moved.append((action.id, here, there))
    figures = [(label, read(first), read(second)) for label, read in FIGURES]
    return PlanDiff(
        names=(first.placement, second.placement),
        rows=tuple(figures),
        only=(tuple(text for _, text in labels), tuple(text for _, text in others)),
        moved=tuple(moved),
        same=first.hash == second.hash,
    )


def _devices(plan: Plan) -> str:
    used = {d for devices in plan.pools.values() for d in devices}
    sizes = " + ".join(str(len(devices)) for devices in plan.pools.values())
    return f"{len(used)} ({sizes})" if len(plan.pools) > 1 else str(len(used))


def _period(plan: Plan) -> str:
    return duration(plan.timing.period if plan.timing else None)


def _bounds(plan: Plan) -> str:
    timing = plan.timing
    if timing is None:
        return "?"
    return f"{duration(timing.resource_bound)} / {duration(timing.recurrence_bound)}"


def _idle(plan: Plan) -> str:
    """Share of device time in which no action runs."""
    if plan.timing is None or not plan.timing.period:
        return "?"
    devices = {d for pool in plan.pools.values() for d in pool}
    busy = sum(seconds_of(a) for a in plan.actions for d in a.devices if d != HOST)
    return f"{100 * (1 - busy / (plan.timing.period * len(devices))):.0f} %"


def _peak(plan: Plan) -> str:
    if any(part.size is None for part in plan.parts):
        return "?"
    return amount(max(plan.peaks.values(), default=0))


def _inserted(plan: Plan) -> str:
    kinds = [action.kind for action in plan.actions]
    return f"{kinds.count('reshard')} / {kinds.count('sleep') + kinds.count('wake')}"


def _moved(plan: Plan) -> str:
    moved = [action.cost.moved for action in plan.actions if action.kind != "run"]
    return "?" if None in moved else amount(sum(size or 0 for size in moved))


FIGURES = (
    ("devices", _devices),
    ("iteration, estimated", _period),
    ("bounds: devices / chain", _bounds),
    ("idle device time", _idle),
    ("peak memory", _peak),
    ("reshard / sleep+wake", _inserted),
    ("bytes moved", _moved),
)


def diff_text(diff: PlanDiff) -> str:
    """The comparison as it is printed."""
    first, second = diff.names
    lines = table([("", first, second), *diff.rows])
    for name, only in zip(diff.names, diff.only, strict=True):
        if only:
            lines += table([(f"only in {name}", ", ".join(only))])
    lines += (
        table([("moved", node, f"{a} -> {b}") for node, a, b in diff.moved]) if diff.moved else []
    )
    if diff.same:
        lines.append("  the plans are equal")
    return "\n".join(lines)
