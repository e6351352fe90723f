"""Two plans side by side: devices, time, memory, bytes moved, age of samples, actions only in one.

Figures that one of the plans does not know are `?`, those it does not have are `-`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.period_range import Contest, contest
from rlflow.scheduler.plan.plan import HOST, Action, Plan
from rlflow.scheduler.plan.text import (
    action_what,
    counted,
    duration,
    idle_share,
    sampling,
    table,
    where,
)

Read = Callable[[Plan], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """What two plans of one graph have in common and what not."""

    names: tuple[str, str]
    rows: tuple[tuple[str, str, str], ...]
    only: tuple[tuple[str, ...], tuple[str, ...]]
    moved: tuple[tuple[str, str, str], ...]
    same: bool
    contest: Contest | None = None

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain data; of each figure the first plan's and the second's."""
        return {
            "placements": list(self.names),
            "same": self.same,
            "figures": {label: [first, second] for label, first, second in self.rows},
            "range": None if self.contest is None else self.contest.as_json(),
            "only": [list(only) for only in self.only],
            "moved": [
                {"node": node, "from": here, "to": there} for node, here, there in self.moved
            ],
        }


def compare(first: Plan, second: Plan, names: tuple[str, str] | None = None) -> PlanDiff:
    """Compare two plans, called by their placements or by `names`."""
    plans = (first, second)
    return PlanDiff(
        names=names or (first.placement, second.placement),
        rows=tuple((label, read(first), read(second)) for label, read in _figures(plans)),
        only=(_only(first, second), _only(second, first)),
        moved=tuple(_moved_nodes(first, second)),
        same=first.hash == second.hash,
        contest=_contest(first, second),
    )


def _contest(first: Plan, second: Plan) -> Contest | None:
    """The plans world by world; None where one has no range."""
    if first.range is None or second.range is None:
        return None
    return contest(first.range, second.range)


def _only(plan: Plan, other: Plan) -> tuple[str, ...]:
    """The actions that the other plan lacks; pieces of a node that it does not cut are joined."""
    there = {action.id for action in other.actions}
    found = [_named(action) for action in plan.actions if action.id not in there]
    return tuple(dict.fromkeys(found))


def _named(action: Action) -> str:
    if action.kind == "run" and action.chunk is not None:
        return f"run {action.node} in {counted(action.chunk.count, 'chunk')}"
    return f"{action.kind} {action_what(action)}"


def _moved_nodes(first: Plan, second: Plan) -> list[tuple[str, str, str]]:
    """The nodes that run on other devices in the second plan: name, from where, to where."""
    here, there = _places(first), _places(second)
    both = [node for node in here if node in there]
    return [(node, here[node], there[node]) for node in both if here[node] != there[node]]


def _places(plan: Plan) -> dict[str, str]:
    return {str(a.node): where(a, plan) for a in plan.actions if a.kind == "run"}


def _figures(plans: tuple[Plan, Plan]) -> list[tuple[str, Read]]:
    """The rows of the comparison: what they are called, and how they are read off a plan."""
    rows: list[tuple[str, Read]] = [
        ("devices", _devices),
        ("iteration, estimated", lambda plan: _timed(plan, "period")),
        *([("range, 90 %", _range)] if any(plan.range for plan in plans) else []),
        ("bound by devices", lambda plan: _timed(plan, "resource_bound")),
        ("bound by chain", lambda plan: _timed(plan, "recurrence_bound")),
        ("what binds", _binding),
        ("idle device time", _idle),
    ]
    pools = dict.fromkeys(name for plan in plans for name in plan.pools)
    rows += [(f"peak memory, {pool}", _peak_of(pool)) for pool in pools]
    if any(plan.peaks.get(HOST) for plan in plans):
        rows.append(("peak memory, host", lambda plan: amount(plan.peaks.get(HOST, 0))))
    rows += [
        ("bytes moved an iteration", _moved),
        ("reshard / transfer", lambda plan: _count(plan, ("reshard",), ("transfer",))),
        ("sleep / wake", lambda plan: _count(plan, ("sleep",), ("wake",))),
    ]
    if any(action.chunk for plan in plans for action in plan.actions):
        rows.append(("chunks", _chunks))
    rows.append(("rollout weights", _age))
    return rows


def _devices(plan: Plan) -> str:
    used = {d for devices in plan.pools.values() for d in devices}
    sizes = " + ".join(str(len(devices)) for devices in plan.pools.values())
    return f"{len(used)} ({sizes})" if len(plan.pools) > 1 else str(len(used))


def _timed(plan: Plan, field: str) -> str:
    return duration(getattr(plan.timing, field) if plan.timing else None)


def _range(plan: Plan) -> str:
    """The 90 % of worlds of a plan that has been played in many."""
    if plan.range is None:
        return "?"
    return f"{duration(plan.range.low)} to {duration(plan.range.high)}"


def _binding(plan: Plan) -> str:
    if plan.timing is None:
        return "?"
    words = {"resource": plan.timing.busiest, "recurrence": "chain", "order": "order on devices"}
    return words[plan.timing.binding]


def _idle(plan: Plan) -> str:
    idle = idle_share(plan)
    return "?" if idle is None else f"{100 * idle:.0f} %"


def _peak_of(pool: str) -> Read:
    """Reads the largest peak of a pool's devices."""

    def read(plan: Plan) -> str:
        devices = plan.pools.get(pool)
        if devices is None:
            return "-"
        if any(part.size is None and set(part.devices) & set(devices) for part in plan.parts):
            return "?"
        return amount(max((plan.peaks.get(device, 0) for device in devices), default=0))

    return read


def _moved(plan: Plan) -> str:
    """Bytes that reshards, transfers, sleeps and wakes move, those due every n-th by an nth."""
    moved = [(a.cost.moved, a.every) for a in plan.actions if a.kind != "run"]
    if any(size is None for size, _ in moved):
        return "?"
    return amount(sum((size or 0) / every for size, every in moved))


def _count(plan: Plan, *kinds: tuple[str, ...]) -> str:
    return " / ".join(str(sum(a.kind in group for a in plan.actions)) for group in kinds)


def _chunks(plan: Plan) -> str:
    counts = sorted({action.chunk.count for action in plan.actions if action.chunk})
    return ", ".join(map(str, counts)) or "1"


def _age(plan: Plan) -> str:
    lags = [plan.graph.lag(node) for node in sampling(plan)]
    if not lags:
        return "-"
    return f"<= {counted(max(lags), 'update')} old" if max(lags) else "newest (on-policy)"


def diff_text(diff: PlanDiff) -> str:
    """The comparison as it is printed."""
    first, second = diff.names
    lines = table([("", first, second), *diff.rows])
    for name, only in zip(diff.names, diff.only, strict=True):
        if only:
            lines += ["", f"  only in {name}", *(f"    {text}" for text in only)]
    if diff.moved:
        rows = [(node, f"{a} -> {b}") for node, a, b in diff.moved]
        lines += ["", "  moved", *table(rows, "    ")]
    if diff.contest is not None and not diff.same:
        lines += ["", f"  {contest_text(*diff.names, diff.contest)}"]
    if diff.same:
        lines.append("  the plans are equal")
    return "\n".join(lines)


def contest_text(first: str, second: str, found: Contest) -> str:
    """Whether one plan is faster than another by more than what is uncertain, in words."""
    if found.times < 1:
        turned = Contest(
            times=1 / found.times, low=1 / found.high, high=1 / found.low, wins=1 - found.wins
        )
        return contest_text(second, first, turned)
    span = f"{found.low:.2f}x to {found.high:.2f}x in 90 % of the worlds"
    told = f"{first} is {found.times:.2f}x as fast as {second}, {span}"
    if found.told:
        return f"{told}: more than what is uncertain"
    return f"{told}: not told apart (faster in {100 * found.wins:.0f} %)"
