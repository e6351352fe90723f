"""The printed form of a plan: one line per action, aligned, stable to the byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rlflow.graph.graph import Node
from rlflow.graph.model import Muon
from rlflow.graph.roles import LoopEnd, Recalling
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.devices.hardware import CPU_PROCESS
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.period_range import PeriodRange
from rlflow.scheduler.plan.plan import HOST, Action, Instance, Plan, Spread, Timing

TRANSPORTS = {
    "copy": "same process",
    "shared memory": "other processes of one host",
    "collective": "across hosts or GPUs",
    "ipc": "buckets that engines open in place",
    "broadcast": "from device to device in buckets that engines open in place",
    "object store": "shared memory of each node",
}
HEADINGS = ("#", "action", "what", "on", "est", "peak", "because")
BINDS = {
    "resource": "the device is never idle; more devices or less work on it help",
    "recurrence": "the chain is the limit; shorter actions on it or more staleness help",
}
MOST_NAMES = 14


def duration(seconds: float | None) -> str:
    """Seconds as they are printed: `41.0 s`, `1.25 s`, `3.2 ms`, `?` where unknown."""
    if seconds is None or not seconds >= 0:
        return "?"
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"


def action_kind(action: Action) -> str:
    """The kind of an action, with the mode of a sleep or wake: what becomes of its memory."""
    if action.kind == "sleep":
        return f"sleep ({action.mode})"
    return "wake (empty)" if action.kind == "wake" and action.mode == "discard" else action.kind


def action_what(action: Action) -> str:
    """What an action works on, and how many iterations it runs ahead of the others."""
    ahead = f"  ({action.ahead} ahead)" if action.ahead else ""
    if action.kind == "run":
        return action.id + ahead
    if action.kind == "reshard":
        return f"{action.instance} -> {' + '.join(action.targets)}{ahead}"
    if action.kind == "transfer":
        piece = f"{action.node}{action.chunk or ''}"
        return f"{piece}: {', '.join(action.fields)}{ahead}"
    return f"{action.part}{ahead}"


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
        where(action, plan) + _in_parts(action),
        duration(action.cost.seconds),
        peak_text(action, plan),
        because,
    )


def _in_parts(action: Action) -> str:
    """How the rows of an action lie, where they lie in parts: of a transfer, those it brings."""
    spread = action.makes if action.kind == "transfer" else action.takes or action.makes
    return f"  {spread.describe()}" if spread is not None and len(spread.parts) > 1 else ""


def peak_text(action: Action, plan: Plan) -> str:
    """The peak memory of an action; unknown where a model on its devices has no known size."""
    if action.peak is None:
        return "-"
    return "?" if _unknown(plan) & set(action.devices) else amount(action.peak)


def _unknown(plan: Plan) -> set[int]:
    """The devices that hold something of unknown size."""
    return {device for part in plan.parts if part.size is None for device in part.devices}


def parts_text(spread: Spread) -> str:
    """The devices of every part: `[0] [1]`, `host`."""
    if spread.devices == (HOST,):
        return "host"
    return " ".join(f"[{', '.join(str(d) for d in part)}]" for part in spread.parts)


def where(action: Action, plan: Plan) -> str:
    """The pool and the devices that an action runs on: `train[0:4]`, `host`."""
    if action.on_host:
        return "host"
    return f"{action.pool}[{numbers(action.devices)}]"


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
    pools = ", ".join(f"{name} [{numbers(devices)}]" for name, devices in plan.pools.items())
    sizes = f"{counted(len(plan.graph.nodes), 'node')}, {counted(len(plan.graph.models), 'model')}"
    lines = [
        f"{plan.graph.name}   {sizes}   placement {plan.placement} on {plan.cluster}"
        f"   plan {plan.hash[:8]}",
        f"  pools      {pools}   backend {plan.backend}",
    ]
    if plan.instances:
        named = [
            (i.name, _weights_are(plan, i), i.layout(), ", ".join(i.uses)) for i in plan.instances
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
        lines.append(f"  peak memory: {_peaks(plan)}")
        lines += _not_counted(plan)
    lines.append(f"  {inserted(plan)}")
    unknown = sum(action.cost.seconds is None for action in plan.actions)
    if unknown and plan.peaks:
        lines.append(f"  iteration: not estimated, {counted(unknown, 'action')} of unknown cost")
    if plan.timing:
        lines += _timing_lines(plan, plan.timing)
    samples = samples_text(plan)
    if samples and plan.peaks:
        lines.append(f"  samples: {samples}")
    return lines


def _timing_lines(plan: Plan, timing: Timing) -> list[str]:
    """Period, latency and idle share, the bounds, the critical cycle, where figures come from."""
    latency = f"   latency {duration(timing.latency)}" if timing.latency else ""
    of_means = f" (iterations differ; of their means {duration(timing.period)})"
    differ, idle = of_means if timing.played else "", idle_share(plan)
    idle_text = "" if idle is None else f"   idle {100 * idle:.0f} % of device time"
    lines = [
        f"  iteration, estimated: {duration(timing.seconds)}{differ}{latency}{idle_text}",
        *([] if plan.range is None else [f"  range: {range_text(plan.range)}"]),
        f"  bounds: {bound_text(plan, timing)}",
    ]
    if timing.critical:
        lines.append(f"  critical cycle: {cycle_text(timing.critical)}")
    lines.append(f"  estimates from: {sources_text(plan)}")
    return [*lines, f"  inputs: {', '.join(plan.inputs)}"] if plan.inputs else lines


def range_text(found: PeriodRange) -> str:
    """A period as a range: its median, 90 % of the worlds, and what they differ in."""
    causes = ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in found.shares)
    within = f"{duration(found.low)} to {duration(found.high)}"
    told = f"{within} in 90 % of {len(found.periods)} worlds, median {duration(found.median)}"
    return f"{told}   (varies by {causes})" if causes else told


def sources_text(plan: Plan) -> str:
    """Where the seconds come from, and of how many actions; the source of most of them first."""
    counts = Counter(action.cost.source for action in plan.actions)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{source} ({counted(count, 'action')})" for source, count in ranked)


def bound_text(plan: Plan, timing: Timing) -> str:
    """Both bounds on an iteration, and which one it meets, in words."""
    busy = f"{timing.busiest} busy {duration(timing.resource_bound)}"
    chain = f"chain {duration(timing.recurrence_bound)}"
    if timing.binding == "order":
        above = timing.period / max(timing.resource_bound, timing.recurrence_bound) - 1
        why = f"{100 * above:.1f} % above the larger: actions on devices wait for each other"
    else:
        why = BINDS[timing.binding]
    return f"{busy}, {chain}   ({why})"


def cycle_text(names: Sequence[str]) -> str:
    """A cycle of actions, back to its first one; the middle of a long one is left out."""
    shown = list(names)
    if len(shown) > MOST_NAMES:
        half = MOST_NAMES // 2
        shown = [*shown[:half], f"({len(shown) - 2 * half} more)", *shown[-half:]]
    return " -> ".join([*shown, f"{names[0]} again"])


def idle_share(plan: Plan) -> float | None:
    """The share of device time in which no action computes; None where the period is unknown."""
    devices = {device for pool in plan.pools.values() for device in pool}
    if plan.timing is None or plan.timing.seconds <= 0 or not devices:
        return None
    busy = sum(
        (action.cost.seconds or 0.0)
        * (action.chance / action.every)
        * len(devices.intersection(action.devices))
        for action in plan.actions
        if action.lane == "compute"
    )
    return max(0.0, 1 - busy / (plan.timing.seconds * len(devices)))


def _weights_are(plan: Plan, instance: Instance) -> str:
    """What becomes of an instance's weights, and by which optimizer where that is not AdamW."""
    model = plan.graph.model(instance.model)
    if instance.trained:
        by_muon = "trained by muon" if isinstance(model.optimizer, Muon) else "trained"
        return "averaged" if model.averaged else by_muon
    return "resharded" if _resharded(plan, instance.name) else "frozen"


def samples_text(plan: Plan) -> str:
    """How many updates old the weights of trained samples may be; empty without such samples.

    Before the passes have ordered the actions nothing is proven, and nothing is said.
    """
    if not plan.peaks:
        return ""
    proven = largest_lag(plan)
    lags = {node.name: proven.get(node.name, 0) for node in sampling(plan)}
    if not lags:
        return ""
    most = max(lags.values())
    kept = [node.name for node, end in plan.graph.having(LoopEnd) if end.keeps_surplus]
    left = f"; what {' and '.join(kept)} leaves over is one update older" if kept else ""
    for node, recalling in plan.graph.having(Recalling):
        left += f"; rows of {node.name} at most {counted(recalling.keep, 'update')} older"
    if most == 0:
        proven_by = "rollout weights are the newest"
        return proven_by + (left or ": proven on-policy")
    told = f"rollout weights at most {counted(most, 'update')} old"
    fresh = [name for name, lag in lags.items() if lag == 0]
    return f"{told}; {', '.join(fresh)} on-policy{left}" if fresh else told + left


def sampling(plan: Plan) -> list[Node]:
    """The nodes that sample from a trained model."""
    trained = {instance.model for instance in plan.instances if instance.trained}
    return [
        node
        for node in plan.graph.nodes
        if node.op.use == "rollout" and node.op.rows == "expand" and node.model in trained
    ]


def _not_counted(plan: Plan) -> list[str]:
    """What of a process's memory is not among the peaks, where devices are the machine's own."""
    if not plan.cluster.startswith("cpu"):
        return []
    own = f"about {amount(CPU_PROCESS)} a process for torch and other libraries"
    return [f"  not counted: {own}, and what the allocator keeps of freed memory"]


def _peaks(plan: Plan) -> str:
    """The peak of every device, and of the hosts where something sleeps there, with budgets.

    Neighbours of one pool with equal peaks are joined.
    """
    unknown = _unknown(plan)
    shown: dict[tuple[str, str, int], list[int]] = {}
    for device, peak in plan.peaks.items():
        if device != HOST:
            pool = device_name(plan, device).partition("[")[0]
            figure = "?" if device in unknown else amount(peak)
            shown.setdefault((pool, figure, plan.budget(device)), []).append(device)
    budgets = {budget for _, _, budget in shown}
    told = []
    for (pool, figure, budget), devices in shown.items():
        own = f" of {amount(budget)}" if len(budgets) > 1 else ""
        told.append(f"{pool}[{numbers(devices)}] {figure}{own}")
    line = ", ".join(told)
    if len(budgets) == 1:
        line += f"   of {amount(budgets.pop())} each"
    if plan.peaks.get(HOST):
        of = f" of {amount(plan.budget(HOST))}" if plan.budget(HOST) else ""
        line += f"; host {amount(plan.peaks[HOST])}{of}"
    return line


def numbers(devices: Sequence[int]) -> str:
    """Device numbers as they are printed, as Python slices: `0:4`, `0:8:2`, `0,2`, `0:4,8:12`."""
    runs: list[range] = []
    for device in devices:
        last = runs[-1] if runs else range(0)
        step = device - last[-1] if last else 0
        if last and step > 0 and (len(last) == 1 or step == last.step):
            runs[-1] = range(last.start, device + 1, step)
        else:
            runs.append(range(device, device + 1))
    return ",".join(_slice(run) for run in runs)


def _slice(run: range) -> str:
    if len(run) < (2 if run.step == 1 else 3):
        return ",".join(map(str, run))
    return f"{run.start}:{run[-1] + 1}" + (f":{run.step}" if run.step > 1 else "")


def inserted(plan: Plan) -> str:
    """How many actions of each kind the compiler inserted."""
    counts = [
        f"{sum(action.kind == kind for action in plan.actions)} {kind}"
        for kind in ("reshard", "transfer", "sleep", "wake")
    ]
    return "inserted: " + ", ".join(counts)


def device_name(plan: Plan, device: int) -> str:
    """A device as it is printed: its pools and number."""
    if device < 0:
        return "host"
    pools = [name for name, devices in plan.pools.items() if device in devices]
    return f"{'/'.join(pools) or 'device'}[{device}]"
