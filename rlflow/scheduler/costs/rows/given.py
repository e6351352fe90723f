"""Lengths that a user has said, as estimates take them: log-normal, cut off, or as seen."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.user.lengths import NINETY_FIFTH, Length
from rlflow.scheduler.costs.lengths import (
    ASSUMED_SPREAD,
    ResponseLengths,
    as_seen,
    fitted_lengths,
    location,
)

# Beyond this spread a log-normal variable's 95th percentile falls again at an equal mean.
WIDEST = NormalDist().inv_cdf(NINETY_FIFTH)
HALVINGS = 20
# Standard deviations that fewer than one normal number in ten million exceeds.
RARELY = NormalDist().inv_cdf(1 - 1e-7)


@lru_cache(maxsize=64)
def given_lengths(said: Length, longest: int, rows: int) -> ResponseLengths:
    """Lengths of `rows` responses of at most `longest` tokens, as they are said.

    The spread is the one at which cut-off lengths of that mean have that 95th percentile, or that
    longest of an iteration's rows where it was seen; without either it is assumed.
    """
    if said.values:
        return as_seen(longest, said.values)
    mean = min(max(said.mean, 1.0), float(longest))
    if said.seen and said.max is not None:
        return fitted_lengths(longest, mean, min(said.max, longest), rows)
    most = min(said.max or longest, longest)
    if said.p95 is None:
        return _log_normal(longest, mean, ASSUMED_SPREAD, most)
    low, high = 0.0, WIDEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        tail = ninety_fifth(_log_normal(longest, mean, middle, most))
        low, high = (middle, high) if tail < min(said.p95, most) else (low, middle)
    return _log_normal(longest, mean, high, most)


def _log_normal(longest: int, mean: float, spread: float, most: int) -> ResponseLengths:
    """Lengths of at most `most` tokens, or where fewer than one in ten million goes on before."""
    rare = math.log(mean) - spread**2 / 2 + RARELY * spread
    most = min(most, math.ceil(math.exp(rare)) if rare < math.log(most) else most)
    return ResponseLengths(longest, mean, spread, most)


def ninety_fifth(lengths: ResponseLengths) -> float:
    """The tokens that 95 % of responses have at the most."""
    if lengths.fixed:
        return lengths.mean
    if lengths.sample:
        return lengths.sample[math.ceil(NINETY_FIFTH * len(lengths.sample)) - 1]
    return min(math.exp(location(lengths) + WIDEST * lengths.spread), float(lengths.end))


def check_lengths(graph: Graph) -> None:
    """Raise PlanError E358 for rollouts that stop before the mean that is said."""
    said = None if graph.lengths is None else graph.lengths.responses
    findings = []
    for node in graph.nodes if said is not None else ():
        sampling = node.role(SamplingOptions)
        if sampling is None or node.op.name != "rollout" or not sampling.max_new_tokens:
            continue
        most = int(sampling.max_new_tokens)
        if said is not None and said.mean > most:
            findings.append(
                Finding(
                    code="E358",
                    what=f"responses of {said.mean:g} tokens in the mean, and {node.name} stops"
                    f" at {most}",
                    where=node.where,
                    expected=f"a mean of at most max_new_tokens, {most}",
                    fix=f"--lengths response=mean:{most // 2},max:{most}",
                )
            )
    if findings:
        raise PlanError(*findings)
