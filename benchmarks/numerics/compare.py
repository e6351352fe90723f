"""What `vs_numerics.py` compares: a case, the difference of its results, and what explains it.

This file knows neither rlflow's functions nor those of the other libraries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Fields = Mapping[str, Tensor]
Made = Mapping[str, Tensor]
"""Results by name; `gradient` is that of the loss, everything else is a value."""
Variant = Mapping[str, Any]
Ours = Callable[[Fields, Variant], Made]

SAME = ("rlflow", "other", "value", "gradient")
DIFFERENT = (*SAME, "with the option", "why", "the option")
TOLERANCE = 1e-9
GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One function beside one of the other library's, on the same inputs.

    `kind`, `function` and `given` tell the other side what to call; each of `variants` is
    merged into `given`, and handed to ours. `reason` says why the two differ, if they do, and
    `option` how ours reaches the other's convention: `reached` is ours with that option, or
    None where there is none, and then `option` says so. Differences are of `batches` alone,
    and of the results `only`, if it names any.
    """

    name: str
    kind: str
    function: str
    ours: Ours
    given: Mapping[str, Any] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ({},)
    batches: tuple[str, ...] = ("ragged", "edge")
    only: tuple[str, ...] = ()
    reason: str = ""
    option: str = ""
    reached: Ours | None = None
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        """Refuse a reason without an option, and the other way round."""
        if bool(self.reason) != bool(self.option) or (self.reached and not self.reason):
            raise ValueError(f"{self.name}: a reason and an option belong together")

    def calls(self) -> list[dict[str, Any]]:
        """What the other side is to call, one for each variant."""
        return [
            {
                "id": f"{self.kind} {self.name} {self.function} {self.given} {number}",
                "kind": self.kind,
                "function": self.function,
                "options": {**self.given, **variant},
                "batches": list(self.batches),
            }
            for number, variant in enumerate(self.variants)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest differences, each relative to the largest entry of the other's result."""

    value: float | None = None
    gradient: float | None = None

    def __or__(self, other: Difference) -> Difference:
        """The larger of each."""
        return Difference(
            value=_larger(self.value, other.value),
            gradient=_larger(self.gradient, other.gradient),
        )

    @property
    def largest(self) -> float:
        """The larger of the two."""
        return max(self.value or 0.0, self.gradient or 0.0)


def _larger(left: float | None, right: float | None) -> float | None:
    """The larger of two numbers, or the one that there is."""
    return max((x for x in (left, right) if x is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What was found for a case; `reached` is the difference with its option."""

    case: Case
    other: str
    found: Difference
    reached: Difference | None
    inputs: int

    @property
    def verdict(self) -> str:
        """`same`, `explained`, `choice` (there is no option), or what is wrong."""
        differs = self.found.largest > self.case.tolerance
        if not self.case.reason:
            return "UNEXPLAINED" if differs else "same"
        if not differs:
            return "NO DIFFERENCE"
        if self.reached is None:
            return "choice"
        return "explained" if self.reached.largest <= self.case.tolerance else "NOT REACHED"

    @property
    def passed(self) -> bool:
        """Whether every difference above the tolerance is explained."""
        return self.verdict in ("same", "explained", "choice")

    def row(self) -> tuple[str, ...]:
        """A line of the table of its verdict."""
        name, value = self.case.name, shown(self.found.value)
        same = (name, f"{self.other} {self.case.function}", value, shown(self.found.gradient))
        if self.verdict == "same":
            return same
        reached = "" if self.reached is None else shown(self.reached.largest)
        why = self.case.reason if self.passed else f"{self.verdict} {self.case.reason}"
        return (*same, reached, why.strip(), self.case.option)

    def as_json(self) -> dict[str, Any]:
        """Everything found."""
        return {
            "name": self.case.name,
            "other": self.other,
            "function": self.case.function,
            "value": self.found.value,
            "gradient": self.found.gradient,
            "with_option": None if self.reached is None else self.reached.largest,
            "tolerance": self.case.tolerance,
            "inputs": self.inputs,
            "batches": list(self.case.batches),
            "reason": self.case.reason,
            "option": self.case.option,
            "verdict": self.verdict,
        }


def shown(x: float | None) -> str:
    """A difference in a table: one digit is enough."""
    if x is None:
        return ""
    return "0" if x == 0 else f"{x:.0e}"


def apart(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest entry of `theirs`; infinity where one is no number.

    Where theirs is 0 everywhere, the largest difference itself. Raises ValueError for shapes
    that differ: a tensor that broadcasts would hide it.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes {tuple(ours.shape)} and {tuple(theirs.shape)}")
    if not ours.numel():
        return 0.0
    left, right = ours.double(), theirs.double()
    if not (left.isfinite().all() and right.isfinite().all()):
        return math.inf
    scale = right.abs().max().item() or 1.0
    return (left - right).abs().max().item() / scale


def difference(ours: Made, theirs: Made, only: Sequence[str] = ()) -> Difference:
    """The differences of the results of one call, or of some. Raises ValueError for other names."""
    if set(ours) != set(theirs):
        raise ValueError(f"results {sorted(ours)} and {sorted(theirs)}")
    if only:
        ours = {name: ours[name] for name in only}
    gradient = apart(ours[GRADIENT], theirs[GRADIENT]) if GRADIENT in ours else None
    values = [apart(ours[name], theirs[name]) for name in ours if name != GRADIENT]
    return Difference(value=max(values, default=None), gradient=gradient)


def compare(
    case: Case,
    other: str,
    inputs: Sequence[Mapping[str, Fields]],
    results: Sequence[Mapping[str, Mapping[str, Any]]],
) -> Line:
    """A case over all seeds, batches and variants.

    `inputs` has for each seed the fields of every batch, `results` what the other side made
    of them, by call and batch. What it returned besides results, under `seen`, is joined to
    the fields: log-probs that its own model computed. Raises SystemExit where it failed.
    """
    found, reached, count = Difference(), Difference(), 0
    for batches, made in zip(inputs, results, strict=True):
        for call, variant in zip(case.calls(), case.variants, strict=True):
            for batch in case.batches:
                theirs = made[call["id"]][batch]
                if "error" in theirs:
                    raise SystemExit(f"{other} failed in {call} on {batch}:\n{theirs['error']}")
                fields = {**batches[batch], **theirs.get("seen", {})}
                count += 1
                found |= difference(case.ours(fields, variant), theirs["made"], case.only)
                if case.reached is not None:
                    reached |= difference(case.reached(fields, variant), theirs["made"], case.only)
    return Line(
        case=case,
        other=other,
        found=found,
        reached=reached if case.reached is not None else None,
        inputs=count,
    )


def tables(lines: Iterable[Line]) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """What differs, and what agrees, each with its header; without a table that is empty."""
    listed = list(lines)
    different = [line.row() for line in listed if line.verdict != "same"]
    same = [line.row() for line in listed if line.verdict == "same"]
    return [(header, rows) for header, rows in ((DIFFERENT, different), (SAME, same)) if rows]


def summary(lines: Iterable[Line]) -> str:
    """How many cases agree, differ by a choice, or are wrong."""
    listed = list(lines)
    counts = dict.fromkeys(("same", "explained", "choice"), 0)
    for line in listed:
        counts[line.verdict] = counts.get(line.verdict, 0) + 1
    words = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return f"{len(listed)} cases: " + ", ".join(words)
