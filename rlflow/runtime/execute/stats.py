"""The metrics of a whole batch from those of its parts.

This file knows neither how rows were shared out nor what a metric means.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

from rlflow.contract.values import Stat
from rlflow.errors import Finding, RunError
from rlflow.graph.rules.nesting import declared_name
from rlflow.scheduler.plan.plan import Action

# Sums of the same numbers may differ from rank to rank in their last digits, not in more.
TOLERANCE = 1e-6
TINY = 1e-12


def join_metrics(parts: Sequence[Mapping[str, float | Stat]]) -> dict[str, float]:
    """The metrics of all parts as those of the whole, by name.

    A `Stat` is joined over the parts that have it, and a single part keeps its value to the
    bit; a plain number is the same for every part. Raises RunError where it is not.
    """
    return {name: _value(found) for name, found in merged(parts).items()}


def merged(parts: Sequence[Mapping[str, float | Stat]]) -> dict[str, float | Stat]:
    """The metrics of some parts, in a form that can be joined with those of others."""
    found: dict[str, list[float | Stat]] = {}
    for part in parts:
        for name, value in part.items():
            found.setdefault(name, []).append(value)
    return {name: _joined(name, values) for name, values in found.items()}


def logged(
    action: Action, parts: Sequence[Mapping[str, float | Stat]]
) -> Mapping[str, float | Stat]:
    """The numbers of an action's parts: its own, or to be joined with those of other pieces."""
    alone = action.chunk is None and action.trip is None
    return join_metrics(parts) if alone else merged(parts)


def logged_as(action: Action) -> str:
    """The node that an action's metrics are logged under; trips of a loop share one name."""
    name = action.node or action.id
    return name if action.trip is None else declared_name(name)


def _value(found: float | Stat) -> float:
    return found.value if isinstance(found, Stat) else found


def _joined(name: str, values: list[float | Stat]) -> float | Stat:
    stats = [value for value in values if isinstance(value, Stat)]
    if stats:
        return functools.reduce(_together, stats)
    plain = [float(value) for value in values if not isinstance(value, Stat)]
    if not all(_agree(plain[0], value) for value in plain):
        raise RunError(
            Finding(
                code="E762",
                what=f"ranks disagree about {name}, which is one number for all of them",
                got=", ".join(map(str, plain)),
                expected="the same number from every rank",
                fix="report it as a bug; a plain number of a body must not depend on its part",
            )
        )
    return plain[0]


def _agree(one: float, two: float) -> bool:
    """Whether two numbers are the same but for the last digits of a sum."""
    both_nan = math.isnan(one) and math.isnan(two)
    return both_nan or math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TINY)


def _together(one: Stat, two: Stat) -> Stat:
    """One statistic over the values of both; a part without values leaves the other as it is.

    Squared deviations are joined by Chan, Golub and LeVeque 1979, equation 2.1.
    """
    if not one.count or not two.count:
        return one if one.count else two
    if one.kind in ("max", "min"):
        if math.isnan(one.total) or math.isnan(two.total):
            return one if math.isnan(one.total) else two
        pick = max if one.kind == "max" else min
        return Stat(kind=one.kind, total=pick(one.total, two.total))
    count = one.count + two.count
    apart = two.total / two.count - one.total / one.count
    squares = one.spread * one.count + two.spread * two.count
    squares += apart * apart * (one.count * two.count / count)
    return Stat(kind=one.kind, total=one.total + two.total, count=count, spread=squares / count)
