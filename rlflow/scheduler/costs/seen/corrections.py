"""How spans of runs correct what measured curves say of a machine: as far as they weigh.

Bayesian shrinkage of logarithms: an estimate by curves is a prior, a span is a normal observation
of it, and the mean of n spans weighs n / (n + SPANS) (Gelman et al., "Bayesian data analysis",
section 2.5). So three spans do not overturn a curve, and a hundred do. Where there is no curve, the
estimate is by a table of other machines, and what was measured stands as it is. Knows records;
neither graphs nor plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rlflow.scheduler.costs.measurement_keys import key_of_parts
from rlflow.scheduler.costs.pieces import as_measured
from rlflow.scheduler.devices.measured import Record, Setting
from rlflow.scheduler.plan.plan import Cost

# So many spans weigh what a curve does: the square of a span's spread over that of an estimate. Of
# a span 0.5: lengths, warming up, and other work; of an estimate 0.16 (`simulate/uncertainty.py`).
SPANS = 10
# Of the estimates that are corrected; another where they are computed in another way.
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """By what an estimate is multiplied, and of how many spans that is."""

    factor: float
    spans: int


def weight(spans: int) -> float:
    """What so many spans weigh, 0 to 1, where a curve has the rest."""
    return spans / (spans + SPANS)


def spans_of(record: Record) -> int:
    """How many spans are behind a record."""
    return sum(sample.count for sample in record.chosen)


def correction_key(hardware: str, backend: str, use: str, curves: str) -> str:
    """What is measured of a kind of work beside the curves of that version, in words of a key."""
    return key_of_parts(hardware, backend, f"times the estimate of {use}", f"{curves}.{VERSION}")


def correction_of(records: Iterable[Record]) -> Correction | None:
    """What the records of a kind of work say of its estimates together; None without any."""
    found = [(math.log(r.seconds), spans_of(r)) for r in records if r.seconds > 0]
    spans = sum(count for _, count in found)
    if not spans:
        return None
    mean = sum(ratio * count for ratio, count in found) / spans
    return Correction(factor=math.exp(weight(spans) * mean), spans=spans)


def corrected_by(estimate: Cost, by: Correction | None, curves: str) -> Cost:
    """An estimate by curves, times what spans of the same kind of work say."""
    if by is None or estimate.seconds is None:
        return estimate
    source = f"{estimate.source}, curves {curves} times {by.factor:.2f} by {by.spans} spans"
    return replace(estimate, seconds=estimate.seconds * by.factor, source=source)


def beside_curves(estimate: Cost, record: Record, setting: Setting, curves: str) -> Cost:
    """The cost of what was run before, between its estimate by curves and its own spans."""
    measured = as_measured(estimate, record, setting)
    if not curves or not estimate.seconds or not record.seconds:
        return measured
    part = weight(spans_of(record))
    seconds = estimate.seconds ** (1 - part) * record.seconds**part + record.wait
    said = f"{spans_of(record)} spans weigh {100 * part:.0f} % beside curves {curves}"
    first = record.source_for(setting) if part >= 0.5 else estimate.source
    return replace(measured, seconds=seconds, source=f"{first}, {said}")
