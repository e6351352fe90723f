"""The period of a plan in many worlds: its schedule stays, its actions take other seconds.

Each world draws efficiencies, mean and spread of lengths, and imbalance of ranks; what lengths
change of an action is read off its estimate at a few lengths. The period of a world is that of the
slowest cycle of the same order (Baccelli et al. 1992, theorem 3.23).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import correlation

from rlflow.graph.graph import Node
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.rules.nesting import declared_name
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.origins import origins
from rlflow.scheduler.costs.pieces import piece_done
from rlflow.scheduler.costs.rows.uneven import unbalanced
from rlflow.scheduler.observed import work_parts
from rlflow.scheduler.passes.order import periodic_problem
from rlflow.scheduler.periodic.cycles import Arc, slowest_cycle
from rlflow.scheduler.periodic.problem import Kernel, turn_arcs
from rlflow.scheduler.plan.period_range import PeriodRange
from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.simulate import uncertainty
from rlflow.scheduler.simulate.uncertainty import WORLDS, normal_draws, rates

ALMOST = 1 + 1e-9
EFFICIENCY, LENGTHS, IMBALANCE = "efficiency", "lengths", "imbalance"
SPREADS = {
    "rollout": uncertainty.GENERATION,
    "train": uncertainty.TRAINING,
    "forward": uncertainty.FORWARD,
}


@dataclass(frozen=True, slots=True)
class Factors:
    """What worlds multiply an action's seconds by: the product, and each cause's own part of it."""

    of: dict[str, list[float]]

    @property
    def product(self) -> list[float]:
        """Of all causes together."""
        return [math.prod(values) for values in zip(*self.of.values(), strict=True)]


def period_range(plan: Plan, costs: Costs, seed: int = 0) -> PeriodRange | None:
    """The period of a plan in 200 worlds; None where an action's seconds are not known.

    `costs` are those of the plan's graph. Equal plans and seeds have equal ranges.
    """
    if plan.timing is None or plan.timing.period <= 0:
        return None
    known: dict[object, Factors] = {}
    factors = [_factors(action, plan, costs, known, seed) for action in plan.actions]
    problem = periodic_problem(plan, ("data", "weights", "order", "device"))
    count = len(plan.actions)
    arcs = turn_arcs(problem, Kernel(order=tuple(range(count)), ahead=(0,) * count))
    products = [each.product for each in factors]
    differ = plan.timing.seconds / plan.timing.period
    periods = [differ * each for each in _periods(problem.seconds, arcs, products)]
    causes = {
        cause: [
            sum(s * f.of[cause][world] for s, f in zip(problem.seconds, factors, strict=True))
            for world in range(WORLDS)
        ]
        for cause in (EFFICIENCY, LENGTHS, IMBALANCE)
    }
    return PeriodRange(periods=tuple(periods), shares=tuple(_shares(periods, causes)))


def _periods(
    seconds: Sequence[float], arcs: Sequence[Arc], products: Sequence[Sequence[float]]
) -> list[float]:
    """The period of each world. Cycles that were slowest in another are tried first."""
    cycles: dict[tuple[int, ...], float] = {}
    found = []
    for world in range(WORLDS):
        own = [s * factors[world] for s, factors in zip(seconds, products, strict=True)]
        floor = max((sum(own[t] for t in c) / d for c, d in cycles.items()), default=0.0)
        slowest = slowest_cycle(own, arcs, floor=floor * ALMOST)
        if slowest.tasks:
            total = sum(own[task] for task in slowest.tasks)
            cycles[slowest.tasks] = max(round(total / slowest.ratio), 1)
        found.append(slowest.ratio if slowest.tasks else floor)
    return found


def _shares(
    periods: Sequence[float], causes: dict[str, list[float]]
) -> Iterable[tuple[str, float]]:
    """How much of the periods' variance goes with each cause, the largest first."""
    told = [math.log(period) for period in periods]
    squares = {}
    for cause, totals in causes.items():
        varies = max(totals) > min(totals) * ALMOST and max(told) > min(told)
        squares[cause] = correlation(told, [math.log(t) for t in totals]) ** 2 if varies else 0.0
    whole = sum(squares.values()) or 1.0
    ranked = sorted(squares.items(), key=lambda item: (-item[1], item[0]))
    return ((cause, square / whole) for cause, square in ranked if square > 0)


def _factors(
    action: Action, plan: Plan, costs: Costs, known: dict[object, Factors], seed: int
) -> Factors:
    """What worlds multiply an action's seconds by."""
    even = [1.0] * WORLDS
    own = f"{action.kind} {action.transport} {len(action.devices)}"
    if action.on_host:
        return Factors({EFFICIENCY: even, LENGTHS: even, IMBALANCE: even})
    if action.kind != "run" or action.instance is None:
        values = rates(own, *_spreads(action, costs, uncertainty.COPIES), seed)
        return Factors({EFFICIENCY: values, LENGTHS: even, IMBALANCE: even})
    node, instance = plan.graph.node(str(action.node)), plan.instance(action.instance)
    piece, parts = piece_done(action), work_parts(plan, action)
    key = declared_name(node.name), instance, parts, piece, action.cost.source
    if key not in known:
        table = SPREADS.get(str(node.op.use), uncertainty.FORWARD)
        own = f"{node.op.use} {instance.model} {instance.layout()} on {len(instance.devices)}"
        values = rates(own, *_spreads(action, costs, table), seed)
        changed = _by_lengths(action, plan, costs, seed)
        known[key] = Factors(
            {EFFICIENCY: values, LENGTHS: changed, IMBALANCE: _uneven(action, plan, costs, seed)}
        )
    return known[key]


def _spreads(action: Action, costs: Costs, table: float) -> tuple[float, float]:
    """How far the rates behind an action's seconds may be off: with all others, and its kind's."""
    if action.cost.source.startswith(("measured", "profile")):
        return 0.0, uncertainty.MEASURED
    if costs.cluster.is_cpu:
        return uncertainty.CPU_TABLE, 0.0
    return uncertainty.ITERATION, table


def _by_lengths(action: Action, plan: Plan, costs: Costs, seed: int) -> list[float]:
    """What the lengths of each world multiply an action's seconds by."""
    node = plan.graph.node(str(action.node))
    mean, tail = length_spreads(node, costs)
    by_mean = _curve(action, plan, costs, mean, 0.0)
    by_tail = _curve(action, plan, costs, 0.0, tail)
    pairs = zip(normal_draws("mean length", seed), normal_draws("tail", seed), strict=True)
    return [by_mean(one) * by_tail(other) for one, other in pairs]


class _Curve:
    """Seconds by how many standard deviations a length is off: a parabola of their logarithm."""

    def __init__(self, below: float, above: float) -> None:
        self.slope = (above - below) / 2
        self.bend = (above + below) / 2

    def __call__(self, deviations: float) -> float:
        at = max(-2.0, min(2.0, deviations))
        return math.exp(self.slope * at + self.bend * at * at)


def _curve(action: Action, plan: Plan, costs: Costs, mean: float, tail: float) -> _Curve:
    """How the seconds of an action follow from a mean, or a tail, that is off by so much."""
    if not mean and not tail:
        return _Curve(0.0, 0.0)
    middle = _table(action, plan, costs)
    ends = [
        _table(action, plan, replace(costs, off=(math.exp(sign * mean), math.exp(sign * tail))))
        for sign in (-1, 1)
    ]
    if not middle or not all(ends):
        return _Curve(0.0, 0.0)
    return _Curve(*(math.log(end / middle) for end in ends))


def _table(action: Action, plan: Plan, costs: Costs) -> float:
    """Seconds of a run by shapes and tables alone."""
    node, instance = plan.graph.node(str(action.node)), plan.instance(str(action.instance))
    parts, piece = work_parts(plan, action), piece_done(action)
    return Costs.table(costs, node, instance, parts, piece).seconds or 0.0


def length_spreads(node: Node, costs: Costs) -> tuple[float, float]:
    """How far the mean length of a node's rows, and the spread of it, may be off."""
    if costs.cluster.is_cpu or costs.lengths(node).fixed:
        return 0.0, 0.0
    said = None if costs.graph.lengths is None else costs.graph.lengths.responses
    if said is not None:
        known = bool(said.values) or said.seen or said.p95 is not None
        return (0.0, 0.0 if known else uncertainty.ASSUMED_TAIL)
    (origin, *_) = origins(costs.graph, node)
    if origin.role(SamplingOptions) is None:
        return 0.0, 0.0
    if costs.lengths_from(origin) is not None:
        return uncertainty.MEASURED_MEAN, 0.0
    return uncertainty.ASSUMED_MEAN, uncertainty.ASSUMED_TAIL


def _uneven(action: Action, plan: Plan, costs: Costs, seed: int) -> list[float]:
    """What imbalance of tokens over ranks multiplies seconds by: as far off as it is large."""
    node = plan.graph.node(str(action.node))
    if costs.cluster.is_cpu or node.op.use not in ("train", "forward"):
        return [1.0] * WORLDS
    spread = math.log(unbalanced(costs.load(node, work_parts(plan, action), piece_done(action))))
    return [math.exp(spread * value) for value in normal_draws("imbalance", seed)]
