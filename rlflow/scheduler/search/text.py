"""The printed forms of what `tune` found: a ranked table, a placement to paste, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlflow.graph.placement import On, Placement, in_shares
from rlflow.graph.roles import Portion
from rlflow.graph.user.engine_options import EngineOptions
from rlflow.graph.user.speculative import Speculative
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.diff import contest_text
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import counted, duration, idle_share, table
from rlflow.scheduler.search.search import Tried
from rlflow.scheduler.search.tune import Tuned

HEADINGS = (
    "#",
    "iteration",
    "samples/s",
    "idle",
    "peak",
    "stale",
    "chunks",
    "devices",
    "limit",
    "placement",
)
LIST_IN_FULL = 2
HARDLY = 1.01


def tuned_text(tuned: Tuned) -> str:
    """The whole answer: heading, table, what did not fit, the best placement to paste."""
    lines = [
        f"{tuned.graph.name}   {counted(len(tuned.graph.nodes), 'node')}, "
        f"{counted(len(tuned.graph.models), 'model')} on {tuned.cluster.describe()}   "
        f"{counted(tuned.samples, 'sample')} an iteration",
        "",
        *table([HEADINGS, *_rows(tuned)]),
        "",
    ]
    lines += [f"  does not fit: {name}: {why}" for name, why in tuned.misfits.items()]
    lines.append(f"  {_effort(tuned)}")
    lines += _not_tried(tuned)
    inputs = tuned.best.plan.inputs
    lines += [f"  inputs: {', '.join(inputs)}"] if inputs else []
    lines += [f"  {text}" for text in told_apart(tuned)]
    lines += [f"  {_compared(tuned)}", "", f"  {placement_source(as_written(tuned, tuned.best))}"]
    return "\n".join([*lines, *_simpler(tuned), *_by_tf32(tuned)])


def _rows(tuned: Tuned) -> Iterator[tuple[str, ...]]:
    """The best placements, then those of the pipeline that are not among them."""
    shown = [(rank, tried) for rank, tried in enumerate(tuned.rows, 1)]
    names = {tried.name for tried in tuned.rows}
    shown += [(rank, tried) for rank, tried in tuned.written if tried.name not in names]
    shown.sort(key=lambda pair: (pair[1].period, pair[0], bool(pair[1].name)))
    for rank, tried in shown:
        found = tried.name and tried.name in names
        yield _row(str(rank) if found or not tried.name else f"({rank})", tried, tuned.samples)


def rate(value: float) -> str:
    """A rate in three digits, and whole ones in full: `0.0123`, `90.5`, `7,540`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(rank: str, tried: Tried, samples: int) -> tuple[str, ...]:
    plan, placement = tried.plan, tried.placement
    idle = idle_share(plan)
    return (
        rank,
        duration(tried.period),
        rate(samples / tried.period),
        "?" if idle is None else f"{100 * idle:.0f} %",
        amount(max((size for d, size in plan.peaks.items() if d >= 0), default=0)),
        str(plan.staleness),
        "flow" if placement.continuous else str(placement.stream),
        str(tried.devices),
        limit_text(plan),
        (f"{tried.name} (hand-written): " if tried.name else "") + placed_text(plan),
    )


def limit_text(plan: Plan) -> str:
    """What binds the period, in a few words."""
    timing = plan.timing
    if timing is None:
        return "?"
    if timing.binding == "resource":
        return f"{timing.busiest} always busy"
    if timing.binding == "recurrence":
        return "update to update"
    above = timing.period / max(timing.resource_bound, timing.recurrence_bound) - 1
    return f"turns, {100 * above:.1f} % above {timing.busiest}"


def placed_text(plan: Plan) -> str:
    """What is on every pool: `train[0:48] actor fsdp=48; gen[48:64] actor.rollout tp=2`."""
    held: dict[str, list[str]] = {}
    for instance in plan.instances:
        only = instance.uses == ("rollout",) and plan.graph.updates(instance.model)
        name = f"{instance.model}.rollout" if only else instance.model
        held.setdefault(instance.pool, []).append(f"{name} {instance.layout()}")
    for part, role in plan.graph.having(Portion):
        if role.helps:
            drawn = f"draws {role.of - role.first} of {role.of} prompts"
            held[plan.action(part.name).pool].append(drawn)
    return "; ".join(
        f"{pool}[{_numbers(plan.pools[pool])}] {', '.join(names)}" for pool, names in held.items()
    )


def _numbers(devices: Sequence[int]) -> str:
    if len(devices) > 1 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"{devices[0]}:{devices[-1] + 1}"
    return ",".join(map(str, devices))


def _effort(tuned: Tuned) -> str:
    """How many placements were looked at, compiled, and did not fit."""
    looked = max(tuned.looked_at, tuned.compiled)
    text = f"looked at {looked} placements, compiled {tuned.compiled}"
    total = sum(tuned.refused.values())
    if not total:
        return text
    reasons = ", ".join(f"{count} {reason}" for reason, count in tuned.refused.items())
    return f"{text}; {total} did not fit: {reasons}"


def _compared(tuned: Tuned) -> str:
    """The best placement beside the best one of the pipeline."""
    if tuned.best.name:
        return f"best: placement {tuned.best.name} of the pipeline; to paste:"
    if not tuned.written:
        return "best, to paste into the pipeline's placements:"
    _, other = min(tuned.written, key=lambda pair: pair[1].rank())
    times = other.period / tuned.best.period
    return f"best, {times:.2f}x as fast as {other.name}; to paste into the pipeline's placements:"


def told_apart(tuned: Tuned) -> list[str]:
    """Whether the best differs from its rival by more than what is uncertain; nothing on a CPU."""
    if tuned.contest is None or tuned.rival is None:
        return []
    own = tuned.best.name or "#1"
    other = tuned.rival.name or "#2"
    return [contest_text(own, other, tuned.contest)]


def _simpler(tuned: Tuned) -> list[str]:
    """The row with the fewest pools that takes hardly longer than the best, if that has more."""
    best = tuned.best
    near = [
        (len(tried.placement.pools), rank)
        for rank, tried in enumerate(tuned.rows, 1)
        if tried.period <= best.period * HARDLY and tried.plan.staleness <= best.plan.staleness
    ]
    pools, rank = min(near)
    if pools >= len(best.placement.pools):
        return []
    simple = tuned.rows[rank - 1]
    longer = 100 * (simple.period / best.period - 1)
    text = f"#{rank} takes {longer:.1f} % longer, with {counted(pools, 'pool')}:"
    return ["", f"  {text}", "", f"  {placement_source(as_written(tuned, simple))}"]


def _not_tried(tuned: Tuned) -> list[str]:
    """What could make a placement faster that the search leaves to the user, where that applies."""
    said = any(where.compile is not None for where in tuned.best.placement.assign.values())
    if said or tuned.cluster.is_cpu:
        return []
    what = "compile=True, torch.compile of the layers that train and score"
    return [f"  not tried: {what}: no estimate knows its gain, a run does"]


def _by_tf32(tuned: Tuned) -> list[str]:
    """The best with TF32, which is no row: it computes other numbers."""
    if tuned.tf32 is None:
        return []
    times = tuned.best.period / tuned.tf32.period
    text = f"with tf32=True {duration(tuned.tf32.period)}, {times:.2f}x as fast as the best; "
    text += "products of float32 numbers then take 10 of 23 bits of their factors' fractions:"
    return ["", f"  {text}", "", f"  {placement_source(as_written(tuned, tuned.tf32))}"]


def as_written(tuned: Tuned, tried: Tried) -> Placement:
    """A placement as it is written down: in shares where it has all devices, and all are alike.

    Those of the pipeline stay as they are written there.
    """
    if tried.name or tuned.cluster.groups:
        return tried.placement
    return in_shares(tried.placement, tuned.cluster.count)


def placement_source(placement: Placement) -> str:
    """A placement as one line of Python that makes it, `rf` being rlflow; it says what was said."""
    pools = ", ".join(
        f'"{name}": {_pool_source(wanted)}' for name, wanted in placement.pools.items()
    )
    assign = ", ".join(f'"{key}": {on_source(where)}' for key, where in placement.assign.items())
    said = ("staleness", "stream", *(["continuous"] if placement.continuous else []))
    rest = "".join(
        f", {name}={getattr(placement, name)!r}"
        for name in said
        if name in placement.model_fields_set
    )
    return f"rf.Placement(pools={{{pools}}}, assign={{{assign}}}{rest})"


def _pool_source(wanted: int | str | list[int]) -> str:
    if not isinstance(wanted, list):
        return f'"{wanted}"' if isinstance(wanted, str) else str(wanted)
    if len(wanted) > LIST_IN_FULL and wanted == list(range(wanted[0], wanted[-1] + 1)):
        return f"list(range({wanted[0]}, {wanted[-1] + 1}))"
    return repr(wanted)


def on_source(where: On) -> str:
    """An assignment as Python that makes it; it says what was said."""
    said = where.model_dump(exclude_none=True, exclude={"pool", "also"})
    if isinstance(where.engine, EngineOptions):
        said["engine"] = where.engine
    words = [f'"{where.pool}"', *(f"{key}={_literal(value)}" for key, value in said.items())]
    if (also := where.also) is not None:
        alike = also == On(pool=also.pool, engine=where.engine)
        words.insert(-1 if where.share else len(words), f"also={_also_source(also, alike=alike)}")
    return f"rf.on({', '.join(words)})"


def _also_source(also: On, *, alike: bool) -> str:
    """A pool beside by its name where it has the engine of the first and nothing else is said."""
    return f'"{also.pool}"' if alike else on_source(also)


def _literal(value: object) -> str:
    if isinstance(value, EngineOptions):
        options = ", ".join(f"{name}={_option(getattr(value, name))}" for name in value.said())
        return f"{value.spelled()}({options})"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _option(value: object) -> str:
    """An engine's option as Python that makes it."""
    if not isinstance(value, Speculative):
        return repr(value)
    said = value.model_dump(exclude_defaults=True).items()
    return f"rf.Speculative({', '.join(f'{name}={each!r}' for name, each in said)})"


def placement_file(tuned: Tuned) -> str:
    """A Python file that holds the best placement under the name `placement`."""
    best = tuned.best
    return (
        f'"""The placement that `rlflow tune` found for {tuned.graph.name} on '
        f"{tuned.cluster.describe()}:\n\n{duration(best.period)} an iteration, estimated.\n"
        f'"""\n\nimport rlflow as rf\n\nplacement = {placement_source(as_written(tuned, best))}\n'
    )


def tuned_json(tuned: Tuned) -> dict[str, Any]:
    """What was found, as plain data."""
    rows = [_row_json(rank, tried, tuned.samples) for rank, tried in enumerate(tuned.rows, 1)]
    return {
        "pipeline": tuned.graph.name,
        "cluster": tuned.cluster.describe(),
        "samples": tuned.samples,
        "rows": rows,
        "hand_written": [_row_json(rank, t, tuned.samples) for rank, t in tuned.written],
        "misfits": dict(tuned.misfits),
        "refused": dict(tuned.refused),
        "looked_at": tuned.looked_at,
        "compiled": tuned.compiled,
        "contest": None if tuned.contest is None else tuned.contest.as_json(),
        "inputs": list(tuned.best.plan.inputs),
        "best": placement_source(as_written(tuned, tuned.best)),
        "tf32": None if tuned.tf32 is None else _row_json(0, tuned.tf32, tuned.samples),
    }


def _row_json(rank: int, tried: Tried, samples: int) -> dict[str, Any]:
    plan, timing = tried.plan, tried.plan.timing
    return {
        "rank": rank,
        "name": tried.name or None,
        "period": tried.period,
        "samples_per_second": samples / tried.period,
        "idle": idle_share(plan),
        "peak": max((size for d, size in plan.peaks.items() if d >= 0), default=0),
        "staleness": plan.staleness,
        "stream": tried.placement.stream,
        **({"continuous": True} if tried.placement.continuous else {}),
        "devices": tried.devices,
        "binding": timing.binding if timing else None,
        "busiest": timing.busiest if timing else None,
        "placement": placement_source(tried.placement),
    }
