"""What a rank answers: what an action did there, or the error that it raised, as values."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import Finding, RlflowError, RunError, error_text
from rlflow.runtime.record.lines.clock import clock
from rlflow.runtime.record.printed import Line, collected

if TYPE_CHECKING:
    from rlflow.contract.values import Stat

Rows = NDArray[np.int64]
PRINTED: list[list[Line]] = []  # of this process, once it is a rank


def collect() -> None:
    """From now on what is printed here goes with the answers."""
    PRINTED.append(collected())


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an action instance did on this rank, on its own clock (seconds since the epoch)."""

    start: float
    end: float
    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
    rows: int = 0
    total: int = 0
    tokens: Rows | None = None
    groups: Rows | None = None
    numbers: Rows | None = None
    moved: int | None = None
    printed: tuple[Line, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    def packed(self) -> list[Any]:
        """Lists and numbers, which Ray sends in half the time that an object takes."""
        metrics = {
            name: value
            if isinstance(value, float)
            else [value.kind, value.total, value.count, value.spread]
            for name, value in self.metrics.items()
        }
        made = [self.rows, self.total, self.tokens, self.groups, self.numbers]
        beside = [self.moved, self.printed, dict(self.figures)]
        return [self.start, self.end, metrics, *made, *beside]

    @classmethod
    def unpacked(cls, packed: list[Any]) -> Made:
        """The same again."""
        start, end, metrics, rows, total, tokens, groups, numbers, *beside = packed
        moved, printed, figures = beside
        return cls(
            start=start,
            end=end,
            metrics={name: _stat(value) for name, value in metrics.items()},
            rows=rows,
            total=total,
            tokens=tokens,
            groups=groups,
            numbers=numbers,
            moved=moved,
            printed=tuple(printed),
            figures=figures,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error of an action; `error` is one of rlflow's, `trace` the text of its traceback."""

    error: tuple[type[RlflowError], tuple[Finding, ...], str]
    trace: str
    printed: tuple[Line, ...] = ()

    def raised(self) -> RlflowError:
        """The error itself."""
        kind, findings, summary = self.error
        return kind(*findings, summary=summary)


def packed_made(found: Made | Failed) -> list[Any] | Failed:
    """What goes back; a `Failed` as it is."""
    return found.packed() if isinstance(found, Made) else found


def _stat(value: float | list[Any]) -> float | Stat:
    """A number of the metrics as it was before it was packed."""
    if isinstance(value, float):
        return value
    from rlflow.contract.values import Stat

    kind, total, count, spread = value
    return Stat(kind=kind, total=total, count=count, spread=spread)


def timed(action: Callable[[], Made | None]) -> Made | Failed:
    """What an action made, or the error it raised as a value."""
    began = clock()
    found: Made | Failed
    try:
        found = action() or Made(start=began, end=clock())
    except Exception as error:
        found = failed(error)
    lines = printed_since()
    return replace(found, printed=lines) if lines else found


def printed_since() -> tuple[Line, ...]:
    """What this process has printed since the last action that ended."""
    lines = [line for kept in PRINTED for line in kept]
    for kept in PRINTED:
        del kept[:]
    return tuple(lines)


def failed(error: Exception) -> Failed:
    """An error as a value, under a code of its own where it has none."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, RlflowError):
        return Failed(error=(type(error), error.findings, error.summary), trace=trace)
    what = error_text(error)
    return Failed(error=(RunError, (Finding(code="E751", what=what),), ""), trace=trace)
