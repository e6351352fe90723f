"""From what happened in a run to what is kept of it: medians per kind of work.

Reads spans by their plan: which instance waited for which, and from when on it could have been
started. Knows neither files nor how spans were written.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Protocol

from rlflow.graph.roles import LoopEnd, Portion
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.pieces import piece_done
from rlflow.scheduler.costs.ranks.draft_turns import acceptance_of, drafts_of
from rlflow.scheduler.costs.serving import pool_key
from rlflow.scheduler.devices.measured import Origin, Sample, Setting
from rlflow.scheduler.engines.engines import asleep_key, kept_of, start_key
from rlflow.scheduler.engines.moving import engine_moved, move_key, moving
from rlflow.scheduler.engines.updates import update_cost
from rlflow.scheduler.plan.instance import ASLEEP, POOLED, STARTED
from rlflow.scheduler.plan.plan import Action, Cost, Plan
from rlflow.scheduler.plan.row_layout import Place, num_parts

LEAST_ITERATIONS = 3

Found = tuple[str, Setting, Sample]


class Seen(Protocol):
    """A measured action instance; seconds on one clock."""

    @property
    def action(self) -> str:
        """The id of the action."""

    @property
    def iteration(self) -> int:
        """Which iteration it worked on."""

    @property
    def start(self) -> float:
        """When it began."""

    @property
    def end(self) -> float:
        """When it ended."""

    @property
    def ok(self) -> bool:
        """Whether it ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The iterations of a run that count: from `first` on, before `end`; `begun` is its first."""

    begun: int
    first: int
    end: int


@dataclass(slots=True)
class Times:
    """Seconds that instances of one kind of work took, and waited although they could start."""

    seconds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def window(spans: Sequence[Seen], begun: int) -> Window:
    """The iterations of the session that began with `begun`, the first left out as warm-up.

    Where there is no other, it is taken. The iteration past the last, in which closing actions
    run, is none of them.
    """
    present = Counter(span.iteration for span in spans if span.iteration >= begun)
    usual = max(present.values(), default=0)
    full = (number for number, count in present.items() if 2 * count > usual)
    end = max(full, default=begun - 1) + 1
    return Window(begun=begun, first=min(begun + 1, max(end - 1, begun)), end=end)


def samples(
    plan: Plan,
    costs: Costs,
    spans: Sequence[Seen],
    figures: Iterable[tuple[int, Mapping[str, float]]],
    *,
    begun: int,
    origin: Origin,
) -> list[Found]:
    """What is kept of a run: seconds and waits of all kinds of work; lengths, trips, what sleeps.

    `figures` are the metrics by iteration. Spans of other plans, which an earlier session of the
    run may have left, do not count. A run of fewer than three iterations counts as a short one.
    """
    known = {action.id for action in plan.actions}
    spans = [span for span in spans if span.action in known]
    seen = window(spans, begun)
    if seen.end - seen.begun < LEAST_ITERATIONS:
        origin = "short"
    by_key: dict[str, Times] = {}
    by_action: dict[str, list[Seen]] = defaultdict(list)
    for span in spans:
        if span.ok and span.iteration >= seen.first:
            by_action[span.action].append(span)
    waited = start_waits(plan, spans, seen)
    for action in plan.actions:
        key = key_of(plan, costs, action)
        if key is None:
            continue
        times = by_key.setdefault(key, Times())
        for span in by_action[action.id]:
            times.seconds.append(span.end - span.start)
            wait = waited.get((span.action, span.iteration))
            times.waits += [] if wait is None else [wait]
    every = list(waited.values())
    setting, dispatch = costs.setting, median(every) if every else 0.0
    found = [
        (
            key,
            setting,
            Sample(
                origin,
                len(times.seconds),
                median(times.seconds),
                median(times.waits) if times.waits else dispatch,
            ),
        )
        for key, times in by_key.items()
        if times.seconds
    ]
    if every:
        found.append((costs.dispatch_key(), setting, Sample(origin, len(every), 0.0, dispatch)))
    lines = list(figures)
    for more in (_lengths, _trips, _accepted, _engines):
        found += more(plan, costs, lines, seen, origin)
    return found + _corrections(plan, costs, by_action, origin)


def _corrections(
    plan: Plan, costs: Costs, spans: Mapping[str, Sequence[Seen]], origin: Origin
) -> list[Found]:
    """By how much estimates by measured curves were off, of each kind of work: median ratios."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for action in plan.actions:
        if action.kind != "run" or action.instance is None or not spans[action.id]:
            continue
        node, instance = plan.graph.node(str(action.node)), plan.instance(action.instance)
        parts = work_parts(plan, action)
        estimated = costs.table(node, instance, parts, piece_done(action)).seconds
        if costs.curves_of(instance) and estimated:
            key = costs.correction_key(instance, node.op.use or "forward")
            ratios[key] += [(span.end - span.start) / estimated for span in spans[action.id]]
    return [
        (key, costs.setting, Sample(origin, len(of), median(of), 0.0)) for key, of in ratios.items()
    ]


def key_of(plan: Plan, costs: Costs, action: Action) -> str | None:
    """Under what an action is measured; None for a copy of an unknown size."""
    if action.kind == "run":
        node = plan.graph.node(str(action.node))
        instance = plan.instance(action.instance) if action.instance else None
        return costs.run_key(node, instance, work_parts(plan, action), piece_done(action))
    if action.cost.moved is None:
        return None
    engine = engine_moved(plan, action)
    if engine is not None:
        return move_key(costs, engine[0], action.kind, engine[1])
    to_host = action.kind in ("sleep", "wake")
    return costs.copy_key(action.cost.moved, _lanes(plan, action), to_host=to_host)


def estimate(plan: Plan, costs: Costs, action: Action) -> Cost:
    """What an action would be estimated at by other costs than those of its plan."""
    if action.kind == "run":
        node = plan.graph.node(str(action.node))
        instance = plan.instance(action.instance) if action.instance else None
        return costs.run(node, instance, work_parts(plan, action), piece_done(action))
    lanes = _lanes(plan, action)
    copied = costs.copy(action.cost.moved, lanes, devices=action.devices, kind=action.kind)
    if action.kind == "reshard":
        ends = [plan.instance(name) for name in (str(action.instance), *action.targets)]
        return update_cost(copied, ends[0], ends[1:], action.transport, costs)[0]
    engine = engine_moved(plan, action)
    if engine is None:
        return copied
    return moving(copied, engine[0], action.kind, engine[1], costs)


def work_parts(plan: Plan, action: Action) -> int:
    """In how many parts the work of a run is done."""
    instance = plan.instance(action.instance) if action.instance else None
    place = Place(pool=action.pool, devices=action.devices, instance=instance)
    return num_parts(plan.graph.node(str(action.node)), place, action.takes, action.makes)


def _lanes(plan: Plan, action: Action) -> int:
    """The devices that copy side by side, as the passes count them."""
    if action.kind == "transfer":
        return 1
    if action.kind == "reshard":
        return len({device for name in action.targets for device in plan.instance(name).devices})
    return len(action.devices)


def start_waits(plan: Plan, spans: Sequence[Seen], seen: Window) -> dict[tuple[str, int], float]:
    """Seconds from when an instance could start to when it did, by action and iteration.

    It can start when all that it comes after is over; what is not due is over when what that
    comes after is.
    """
    ends = {(span.action, span.iteration): span.end for span in spans if span.ok}
    known = _Ends(plan, ends, seen.begun)
    found = {}
    for span in spans:
        if not span.ok or not seen.first <= span.iteration < seen.end:
            continue
        ready = known.ready(plan.action(span.action), span.iteration)
        if ready is not None:
            found[span.action, span.iteration] = max(span.start - ready, 0.0)
    return found


class _Ends:
    """When the instances of a run were over, from the iteration `begun` on."""

    def __init__(self, plan: Plan, ends: Mapping[tuple[str, int], float], begun: int) -> None:
        self.plan = plan
        self.begun = begun
        self.over: dict[tuple[str, int], float | None] = dict(ends)

    def ready(self, action: Action, iteration: int) -> float | None:
        """When all that an instance comes after was over; None where that is not known."""
        ends = [
            self.end(before, iteration - action.ahead - dep.distance + before.ahead)
            for dep in action.after
            for before in (self.plan.action(dep.action),)
        ]
        return max((end for end in ends if end is not None), default=None)

    def end(self, action: Action, iteration: int) -> float | None:
        """When an instance was over; one that was not due, when what it comes after was."""
        key = (action.id, iteration)
        if key not in self.over and iteration < self.begun:
            return None
        if key not in self.over:
            self.over[key] = None
            self.over[key] = self.ready(action, iteration)
        return self.over[key]


def _lengths(
    plan: Plan,
    costs: Costs,
    figures: Sequence[tuple[int, Mapping[str, float]]],
    seen: Window,
    origin: Origin,
) -> list[Found]:
    """The mean length of each rollout's responses, and that of the longest of an iteration."""
    found = []
    for node in plan.graph.nodes:
        if node.op.name != "rollout" or (node.trip is not None and node.trip[0]):
            continue
        portion = node.role(Portion)
        if portion is not None and portion.helps:
            continue
        ended = next((n.name for n in plan.graph.nodes if n.resumes == node.name), node.drawn_as)
        rows = [
            (values[f"{ended}/length"], values[f"{ended}/length_max"])
            for iteration, values in figures
            if iteration >= seen.first
            and {f"{ended}/length", f"{ended}/length_max"} <= values.keys()
        ]
        if rows:
            _, longest = costs.tokens(node)
            mean, most = fmean(row[0] for row in rows), fmean(row[1] for row in rows)
            sample = Sample(origin, len(rows), 0.0, 0.0, mean, most)
            found.append((keys.lengths_key(costs.graph, node, longest), costs.setting, sample))
    return found


def _said(
    name: str, figures: Sequence[tuple[int, Mapping[str, float]]], seen: Window
) -> list[float]:
    """A metric in the iterations of a window that have it."""
    return [v[name] for iteration, v in figures if iteration >= seen.first and name in v]


def _trips(
    plan: Plan,
    costs: Costs,
    figures: Sequence[tuple[int, Mapping[str, float]]],
    seen: Window,
    origin: Origin,
) -> list[Found]:
    """The mean number of trips of every loop that may take more than one."""
    found = []
    for end, loop in plan.graph.having(LoopEnd):
        if loop.at_most == 1:
            continue
        counts = _said(f"{end.name}/trips", figures, seen)
        if counts:
            sample = Sample(origin, len(counts), 0.0, 0.0, trips=fmean(counts))
            found.append((keys.trips(plan.graph, end), costs.setting, sample))
    return found


def _accepted(
    plan: Plan,
    costs: Costs,
    figures: Sequence[tuple[int, Mapping[str, float]]],
    seen: Window,
    origin: Origin,
) -> list[Found]:
    """How often drafted tokens were accepted, of rollouts that draft one at each place."""
    found = []
    runs = {a.node: a for a in plan.actions if a.kind == "run" and a.instance}
    for node in (each for each in plan.graph.nodes if each.name in runs):
        shares = _said(f"{node.name}/acceptance", figures, seen)
        instance = plan.instance(str(runs[node.name].instance))
        drafted, beams = drafts_of(node, instance)
        if shares and drafted and beams == 1:
            each = acceptance_of(fmean(shares), drafted)
            key = keys.accepted(plan.graph, node, instance, drafted)
            sample = Sample(origin, len(shares), 0.0, 0.0, accepted=each)
            found.append((key, costs.setting, sample))
    return found


def _engines(
    plan: Plan,
    costs: Costs,
    figures: Sequence[tuple[int, Mapping[str, float]]],
    seen: Window,
    origin: Origin,
) -> list[Found]:
    """What every engine has kept of a device asleep, at the most, its pool, and its start."""
    found: list[Found] = []
    for instance in plan.engines if figures else ():
        nodes = sorted({str(a.node) for a in plan.actions if a.instance == instance.name})

        def told(metric: str, nodes: Sequence[str] = nodes) -> list[float]:
            rows = [v for iteration, v in figures if iteration >= seen.first]
            names = [f"{node}/{metric}" for node in nodes]
            return [row[name] for row in rows for name in names if name in row]

        setting = costs.setting
        held = told(ASLEEP)
        kept = kept_of(max(held), instance, costs) if held else 0.0
        if kept > 0:
            sample = Sample(origin, len(held), 0.0, 0.0, held=kept)
            found.append((asleep_key(costs, instance), setting, sample))
        if instance.engine_plan.share_decides and (pool := told(POOLED)):
            sample = Sample(origin, len(pool), 0.0, 0.0, held=min(pool))
            found.append((pool_key(costs, instance), setting, sample))
        if took := told(STARTED):
            sample = Sample(origin, len(took), max(took), 0.0)
            found.append((start_key(costs, instance), setting, sample))
    return found


def period_of(spans: Sequence[Seen], begun: int) -> float | None:
    """The median seconds from the end of one iteration to that of the next; None for too few."""
    seen = window(spans, begun)
    ends: dict[int, float] = {}
    for span in spans:
        if seen.first - 1 <= span.iteration < seen.end:
            ends[span.iteration] = max(span.end, ends.get(span.iteration, 0.0))
    ordered = [ends[number] for number in sorted(ends)]
    between = [after - before for before, after in itertools.pairwise(ordered)]
    return median(between) if between else None
