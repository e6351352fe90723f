"""The printed form of a plan: one line per action, aligned, stable to the byte."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.scheduler.cluster import amount
from rlflow.scheduler.order import device_name
from rlflow.scheduler.plan import HOST, Action, Plan, Spread

TRANSPORTS = {
    "copy": "same process",
    "shared memory": "other processes of one host",
    "collective": "across hosts or GPUs",
    "ipc": "other processes of one GPU",
    "object store": "shared memory of each node",
}
HEADINGS = ("#", "action", "what", "on", "est", "peak", "because")


def duration(seconds: float | None) -> str:
    """Seconds as they are printed: `41.0 s`, `3.2 ms`, `?` where unknown."""
    if seconds is None:
        return "?"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def action_kind(action: Action) -> str:
    """The kind of an action, and what becomes of the memory it moves."""
    if action.kind == "sleep":
        return f"sleep ({action.mode})"
    return "wake (empty)" if action.kind == "wake" and action.mode == "discard" else action.kind


def action_what(action: Action) -> str:
    """What an action does, without its kind."""
    if action.kind == "run":
        return action.id
    if action.kind == "reshard":
        return f"{action.instance} -> {' + '.join(action.targets)}"
    if action.kind == "transfer":
        return f"{action.node}: {', '.join(action.fields)}"
    return f"{action.part}"


def action_row(number: int, action: Action, plan: Plan) -> tuple[str, ...]:
    """The cells of one action's line."""
    moved = action.cost.moved
    because = action.reason.text
    if action.kind != "run" and moved:
        because += f"; {amount(moved)}"
    if action.transport:
        because += f" by {action.transport} ({TRANSPORTS[action.transport]})"
    return (
        str(number),
        action_kind(action),
        action_what(action),
        _where(action, plan) + _in_parts(action),
        duration(action.cost.seconds),
        _peak(action, plan),
        because,
    )


def _in_parts(action: Action) -> str:
    """How the rows of an action lie, where they lie in parts: of a transfer, those it brings."""
    spread = action.makes if action.kind == "transfer" else action.takes or action.makes
    return f"  {spread.describe()}" if spread is not None and len(spread.parts) > 1 else ""


def _peak(action: Action, plan: Plan) -> str:
    """The peak memory of an action; unknown where a model on its devices has no known size."""
    if action.peak is None:
        return "-"
    return "?" if _unknown(plan) & set(action.devices) else amount(action.peak)


def _unknown(plan: Plan) -> set[int]:
    """The devices that hold something of unknown size."""
    return {device for part in plan.parts if part.size is None for device in part.devices}


def _parts(spread: Spread) -> str:
    """The devices of every part: `[0] [1]`, `host`."""
    if spread.devices == (HOST,):
        return "host"
    return " ".join(f"[{', '.join(str(d) for d in part)}]" for part in spread.parts)


def _where(action: Action, plan: Plan) -> str:
    if action.on_host:
        return "host"
    first, last = action.devices[0], action.devices[-1]
    whole = len(action.devices) > 1 and action.devices == tuple(range(first, last + 1))
    numbers = f"{first}:{last + 1}" if whole else ",".join(str(d) for d in action.devices)
    return f"{action.pool}[{numbers}]"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows of cells as aligned lines; the last cell is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append((indent + "  ".join([*cells, row[-1]])).rstrip())
    return lines


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 model`, `2 models`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def plan_text(plan: Plan) -> str:
    """The whole plan: heading, instances, actions, what passes noted, memory and time."""
    pools = ", ".join(
        f"{name} [{', '.join(str(d) for d in devices)}]" for name, devices in plan.pools.items()
    )
    sizes = f"{counted(len(plan.graph.nodes), 'node')}, {counted(len(plan.graph.models), 'model')}"
    lines = [
        f"{plan.graph.name}   {sizes}   placement {plan.placement} on {plan.cluster}"
        f"   plan {plan.hash[:8]}",
        f"  pools      {pools}   backend {plan.backend}",
    ]
    if plan.instances:
        named = [
            (
                i.name,
                "trained"
                if i.trained
                else "frozen"
                if not _resharded(plan, i.name)
                else "resharded",
                i.layout(),
                ", ".join(i.uses),
            )
            for i in plan.instances
        ]
        lines += ["", "  weights", *table(named, "    ")]
    if plan.actions:
        rows = [action_row(n, action, plan) for n, action in enumerate(plan.actions, 1)]
        lines += ["", *table([HEADINGS, *rows])]
    lines += ["", *_footer(plan)]
    return "\n".join(lines).rstrip()


def _resharded(plan: Plan, instance: str) -> bool:
    return any(instance in action.targets for action in plan.actions)


def _footer(plan: Plan) -> list[str]:
    lines = [f"  {note.rule}: {note.text}" for note in plan.notes]
    if plan.peaks:
        lines.append(f"  peak memory: {_peaks(plan)}   of {amount(plan.budget(0))} each")
    lines.append(f"  {inserted(plan)}")
    unknown = sum(action.cost.seconds is None for action in plan.actions)
    if unknown and plan.peaks:
        lines.append(f"  iteration: not estimated, {counted(unknown, 'action')} of unknown cost")
    if plan.timing:
        t = plan.timing
        bound = {
            "resource": f"device {t.busiest} is never idle",
            "recurrence": "the longest chain from one update to the next is the limit",
            "order": "neither bound is reached: devices wait for each other",
        }[t.binding]
        lines.append(
            f"  iteration, estimated: {duration(t.period)}   bounds: {t.busiest} busy "
            f"{duration(t.resource_bound)}, chain {duration(t.recurrence_bound)}   ({bound})"
        )
        sources = sorted({a.cost.source for a in plan.actions if a.cost.source})
        lines.append(f"  estimates from: {'; '.join(sources)}")
    return lines


def _peaks(plan: Plan) -> str:
    """The peak of every device; neighbours of one pool with equal peaks are joined."""
    unknown = _unknown(plan)
    shown: dict[tuple[str, str], list[int]] = {}
    for device, peak in plan.peaks.items():
        pool = device_name(plan, device).partition("[")[0]
        shown.setdefault((pool, "?" if device in unknown else amount(peak)), []).append(device)
    return ", ".join(
        f"{pool}[{','.join(str(device) for device in devices)}] {peak}"
        for (pool, peak), devices in shown.items()
    )


def inserted(plan: Plan) -> str:
    """How many actions of each kind the compiler inserted."""
    counts = [
        f"{sum(action.kind == kind for action in plan.actions)} {kind}"
        for kind in ("reshard", "transfer", "sleep", "wake")
    ]
    return "inserted: " + ", ".join(counts)


def explain(plan: Plan, action: Action) -> str:
    """Everything the plan knows about one action."""
    rows = [
        ("kind", action_kind(action)),
        ("because", f"{action.reason.text}   (rule: {action.reason.rule})"),
        ("runs on", _where(action, plan)),
    ]
    if action.node and plan.graph.has_node(action.node):
        rows.append(("declared", str(plan.graph.node(action.node).where)))
    for instance, lag in action.reads:
        rows.append(("reads", f"{instance} version {'i' if lag == 0 else f'i-{lag}'}"))
    for instance, lag in action.writes:
        rows.append(("writes", f"{instance} version {'i' if lag == 0 else f'i+{-lag}'}"))
    for label, spread in (("rows in", action.takes), ("rows out", action.makes)):
        if spread is not None:
            rows.append((label, f"{spread.describe()}   {_parts(spread)}"))
    for dep in action.after:
        turn = "" if dep.distance == 0 else f" of {dep.distance} iteration before"
        rows.append(("waits for", f"{dep.action}{turn}   ({dep.kind})"))
    rows.append(("needs", ", ".join(action.needs) or "no weights"))
    transient = action.cost.transient
    rows.append(
        (
            "memory",
            f"{amount(transient or 0)} while it runs, {_peak(action, plan)} in all",
        )
    )
    rows.append(("estimate", f"{duration(action.cost.seconds)}   from {action.cost.source}"))
    return "\n".join([action.id, *table(rows)])
