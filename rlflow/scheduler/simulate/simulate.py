"""What a plan costs once it is in its stride: period, idle time and its causes, latency, lag.

Everything is read off instances that were played on a virtual clock, so actions that run
every n-th iteration count where they fall. This file knows no format and no picture.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlflow.scheduler.plan.plan import HOST, Action, Plan
from rlflow.scheduler.plan.turns import Seconds, estimated
from rlflow.scheduler.simulate.blame import waited_for
from rlflow.scheduler.simulate.play import TURNS_UNDER_WAY, Played, play

WARM_UP = 6
TAIL = 2
SHORTEST_WINDOW = 12
LONGEST_WINDOW = 120
MOST_INSTANCES = 200_000
ATTEMPTS = 3
CLOSE = 1e-9
THE_END = "the end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What devices with one and the same schedule did, as shares of the time looked at.

    `busy` is running actions, `copying` bringing memory in and out beside them. `waits` says
    what they waited for when idle: (action, share), largest first; they add up to `idle`.
    """

    label: str
    devices: tuple[int, ...]
    busy: float
    copying: float
    waits: tuple[tuple[str, float], ...]

    @property
    def idle(self) -> float:
        """The share in which nothing runs."""
        return max(0.0, 1.0 - self.busy)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A plan that was played for some iterations.

    `period` is the mean seconds an iteration adds in the turns `steady` (first, end), which
    last from `window[0]` to `window[1]`; `exact` says that they repeat to the digit.
    `latency` is the median seconds from the start of an iteration's first action to the end
    of its last; `lags` counts samples' iterations by node and by how many updates old the
    weights were that made them.
    """

    plan: Plan
    iterations: int
    spans: tuple[Played, ...]
    period: float
    exact: bool
    steady: tuple[int, int]
    window: tuple[float, float]
    uses: tuple[Use, ...]
    latency: float
    lags: Mapping[str, Mapping[int, int]]

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of all iterations."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def idle(self) -> float:
        """The share of device time in which nothing runs, the host's left out."""
        uses = [use for use in self.uses if use.devices != (HOST,)]
        count = sum(len(use.devices) for use in uses)
        return sum(use.idle * len(use.devices) for use in uses) / count if count else 0.0

    def as_json(self) -> dict[str, Any]:
        """The simulation as plain data, stable to the byte when dumped with sorted keys."""
        timing = self.plan.timing
        return {
            "pipeline": self.plan.graph.name,
            "placement": self.plan.placement,
            "cluster": self.plan.cluster,
            "plan": self.plan.hash,
            "iterations": self.iterations,
            "period": self.period,
            "exact": self.exact,
            "makespan": self.makespan,
            "latency": self.latency,
            "idle": self.idle,
            "resource_bound": timing.resource_bound if timing else None,
            "recurrence_bound": timing.recurrence_bound if timing else None,
            "devices": [
                {
                    "label": use.label,
                    "devices": list(use.devices),
                    "busy": use.busy,
                    "copying": use.copying,
                    "idle": use.idle,
                    "waits": dict(use.waits),
                }
                for use in self.uses
            ],
            "lags": {
                node: {str(k): n for k, n in lags.items()} for node, lags in self.lags.items()
            },
            "sources": sources(self.plan),
            "spans": [_span_json(span) for span in self.spans],
        }


def _span_json(span: Played) -> dict[str, Any]:
    return {
        "action": span.action.id,
        "kind": span.action.kind,
        "iteration": span.iteration,
        "devices": list(span.action.devices),
        "lane": span.action.lane,
        "start": span.start,
        "end": span.end,
    }


def sources(plan: Plan) -> list[str]:
    """Where the plan's figures come from, each once."""
    return sorted({action.cost.source for action in plan.actions if action.cost.source})


def play_plan(
    plan: Plan,
    *,
    iterations: int | None = None,
    seconds: Seconds = estimated,
    barrier: int | None = None,
    window: int = TURNS_UNDER_WAY,
) -> Simulation:
    """Play a plan and add up what its devices did.

    Without `iterations` it is played until its turns repeat, or for as long as is worth it.
    `seconds` tells how long an instance takes; by default the plan's estimates are taken.
    With a `barrier` the pipeline drains after so many iterations, as it does to save.
    """
    tried = iterations or _enough(plan)
    for attempt in range(ATTEMPTS):
        spans = play(plan, tried, seconds=seconds, barrier=barrier, window=window)
        found = _added_up(plan, spans, tried, barrier)
        last = attempt == ATTEMPTS - 1 or iterations is not None or seconds is not estimated
        if found.exact or last or 2 * tried * len(plan.actions) > MOST_INSTANCES:
            break
        tried *= 2
    return found


def hyperperiod(plan: Plan) -> int:
    """Iterations after which all that is due every n of them, or differs, falls as before."""
    differ = (len(action.cost.swings) or 1 for action in plan.actions)
    return math.lcm(*(action.every for action in plan.actions), *differ)


def _enough(plan: Plan) -> int:
    """Iterations that show a plan in its stride: a warm-up, and whole hyperperiods."""
    most = max((action.ahead for action in plan.actions), default=0)
    wanted = 2 * (WARM_UP + most) + _looked_at(plan)
    return max(2, min(wanted, MOST_INSTANCES // max(1, len(plan.actions))))


def _looked_at(plan: Plan) -> int:
    """Turns that are added up: a multiple of the hyperperiod, where that is not very long."""
    whole = hyperperiod(plan)
    return min(-(-SHORTEST_WINDOW // whole) * whole, LONGEST_WINDOW)


def _added_up(plan: Plan, spans: list[Played], iterations: int, barrier: int | None) -> Simulation:
    turns = _turn_ends(spans)
    most = max((action.ahead for action in plan.actions), default=0)
    end = max(1, iterations - most - (TAIL if iterations > 2 * (TAIL + most) else 0))
    repeat = None if barrier else _repeat(plan, spans, end)
    if barrier:
        first, end = 0, iterations
    elif repeat:
        first = end - max(1, _looked_at(plan) // repeat) * repeat
    else:
        first = end - min(_looked_at(plan), max(1, end - min(WARM_UP + most, end // 2)))
    window = (turns[first - 1] if first > 0 else 0.0, turns[end - 1])
    return Simulation(
        plan=plan,
        iterations=iterations,
        spans=tuple(spans),
        period=(window[1] - window[0]) / (end - first),
        exact=repeat is not None,
        steady=(first, end),
        window=window,
        uses=_uses(plan, spans, window),
        latency=_latency(spans, first, end),
        lags=_lags(plan, spans, range(0, iterations, barrier or iterations)),
    )


def _turn_ends(spans: Sequence[Played]) -> list[float]:
    """When each turn from 0 on is over, with all before it; turns ahead of them are not counted."""
    last = max((span.turn for span in spans), default=0)
    ends = [0.0] * (last + 1)
    for span in spans:
        turn = max(span.turn, 0)
        ends[turn] = max(ends[turn], span.end)
    for turn in range(1, last + 1):
        ends[turn] = max(ends[turn], ends[turn - 1])
    return ends


def _repeat(plan: Plan, spans: Sequence[Played], end: int) -> int | None:
    """After how many turns everything ends as it did, all as much later; None if it does not.

    Told from the turns before `end`, as many of them as have twice that number.
    """
    finish = {(span.action.id, span.turn): span.end for span in spans}
    whole = hyperperiod(plan)
    for shift in range(whole, min(end // 2, 2 * _looked_at(plan)) + 1, whole):
        grown = [
            finish[action.id, turn] - finish[action.id, turn - shift]
            for turn in range(end - shift, end)
            for action in plan.actions
            if (action.id, turn) in finish and (action.id, turn - shift) in finish
        ]
        if grown and max(grown) - min(grown) <= CLOSE * max(1.0, *grown):
            return shift
    return None


def _uses(plan: Plan, spans: Sequence[Played], window: tuple[float, float]) -> tuple[Use, ...]:
    """Devices joined where they run the same actions, in the order of their numbers; host last."""
    whole = window[1] - window[0]
    found = []
    for devices, ids in device_groups(plan):
        own = [(n, span) for n, span in enumerate(spans) if span.action.id in ids]
        computing = [(n, span) for n, span in own if span.action.lane == "compute"]
        copying = [span for _, span in own if span.action.lane == "copy"]
        waits = _waits(spans, computing, window) if whole > 0 else {}
        ranked = sorted(waits.items(), key=lambda item: (-item[1], item[0]))
        found.append(
            Use(
                label=group_label(plan, devices),
                devices=devices,
                busy=_share([span for _, span in computing], window),
                copying=_share(copying, window),
                waits=tuple((name, seconds / whole) for name, seconds in ranked),
            )
        )
    return tuple(found)


def device_groups(plan: Plan) -> list[tuple[tuple[int, ...], frozenset[str]]]:
    """Devices of the same pools that run the same actions, with those; the host, if any, last."""
    used: dict[int, list[str]] = {d: [] for pool in plan.pools.values() for d in pool}
    for action in plan.actions:
        for device in action.devices:
            used.setdefault(device, []).append(action.id)
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for device in sorted(used, key=lambda d: (d == HOST, d)):
        groups.setdefault((pool_label(plan, device), tuple(used[device])), []).append(device)
    return [(tuple(devices), frozenset(ids)) for (_, ids), devices in groups.items()]


def pool_label(plan: Plan, device: int) -> str:
    """The pools that a device is in: `train`, `train/gen`, `host`."""
    if device == HOST:
        return "host"
    return "/".join(name for name, devices in plan.pools.items() if device in devices) or "device"


def group_label(plan: Plan, devices: tuple[int, ...]) -> str:
    """Devices of the same pools as they are printed: `train[0:4]`, `gen[1,3]`, `host`."""
    if devices == (HOST,):
        return "host"
    first, last = devices[0], devices[-1]
    whole = len(devices) > 1 and devices == tuple(range(first, last + 1))
    numbers = f"{first}:{last + 1}" if whole else ",".join(map(str, devices))
    return f"{pool_label(plan, first)}[{numbers}]"


def _share(spans: Sequence[Played], window: tuple[float, float]) -> float:
    """The share of a window in which the spans, which do not overlap, run."""
    whole = window[1] - window[0]
    inside = sum(max(0.0, min(s.end, window[1]) - max(s.start, window[0])) for s in spans)
    return inside / whole if whole > 0 else 0.0


def _waits(
    spans: Sequence[Played], own: Sequence[tuple[int, Played]], window: tuple[float, float]
) -> dict[str, float]:
    """Seconds of a window that a device was idle, by the action that it waited for.

    What held it up is followed back from the end of each gap: the action that released the
    next one, what released that, and so on to the start of the gap.
    """
    seconds: dict[str, float] = defaultdict(float)
    released = [span.released for span in spans]

    def add(name: str, start: float, end: float) -> None:
        inside = min(end, window[1]) - max(start, window[0])
        if inside > 0:
            seconds[name] += inside

    def blame(place: int, free: float) -> None:
        for cause, start, end in waited_for(spans, released, place, free):
            add("the start" if cause is None else spans[cause].action.id, start, end)

    free = window[0]
    for place, span in own:
        if span.start >= window[1]:
            break
        if span.start > free:
            blame(place, free)
        free = max(free, span.end)
    following = next((n for n, span in own if span.start >= max(free, window[1])), None)
    if following is not None:
        blame(following, free)
    else:
        add(THE_END, free, window[1])
    return dict(seconds)


def _latency(spans: Sequence[Played], first: int, end: int) -> float:
    """The median seconds from the first to the last of an iteration's actions on devices."""
    turns: dict[int, list[Played]] = defaultdict(list)
    for span in spans:
        if span.action.part is None and first <= span.iteration < end:
            turns[span.iteration].append(span)
    lengths = []
    for turn in turns.values():
        counted = [span for span in turn if not span.action.on_host] or turn
        lengths.append(max(span.end for span in counted) - min(span.start for span in counted))
    return median(lengths) if lengths else 0.0


def _lags(plan: Plan, spans: Sequence[Played], starts: range) -> dict[str, dict[int, int]]:
    """How many updates behind the weights were that made each iteration's samples, by node.

    A rollout that may be k behind reads no version before that with which its segment starts.
    """
    trained = {instance.model for instance in plan.instances if instance.trained}
    models = {instance.name: instance.model for instance in plan.instances}
    seen: dict[str, set[int]] = defaultdict(set)
    counts: dict[str, Counter[int]] = {}
    for span in spans:
        action = span.action
        if not is_rollout(plan, action) or models.get(str(action.instance)) not in trained:
            continue
        node, i = str(action.node), span.iteration
        lag = dict(action.reads).get(str(action.instance), 0)
        if i not in seen[node]:
            seen[node].add(i)
            begun = starts[bisect_right(starts, i) - 1]
            counts.setdefault(node, Counter())[i - max(i - lag, begun)] += 1
    return {node: dict(sorted(count.items())) for node, count in counts.items()}


def is_rollout(plan: Plan, action: Action) -> bool:
    """Whether an action makes samples that are trained on, as evaluations do not."""
    if action.kind != "run" or action.node is None or not plan.graph.has_node(action.node):
        return False
    node = plan.graph.node(action.node)
    return node.op.use == "rollout" and node.op.rows == "expand"
