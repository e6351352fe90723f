"""Recorded samples for the page: a bounded number, as rows of plain values.

Every n-th recorded iteration is there with all of its recorded samples; long texts are cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import RunDirError
from rlflow.report.samples.joined import RecordedSample, load_samples
from rlflow.runtime.record.edges.reading import recorded

MOST_SAMPLES = 4_000
LONGEST_TEXT = 2_000
ALWAYS = ("iteration", "row", "group")
TEXTS = ("prompt", "response")

Cell = int | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Samples as rows of numbers and texts; `shown` of so many recorded `iterations` are there."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]
    shown: int
    iterations: int

    @property
    def remark(self) -> str:
        """What is there and what is not."""
        some = "" if self.shown == self.iterations else f" of {self.iterations:,}, spread evenly"
        return f"{len(self.rows):,} samples of {self.shown:,} recorded iterations{some}."


def sample_table(run: Path) -> SampleTable | None:
    """The samples of a run that its page shows; None where none is recorded."""
    numbers = sorted({n for found in recorded(run).values() for n in found})
    try:
        last = load_samples(run, None, numbers[-1:]).samples
        kept = _spread(numbers, max(1, MOST_SAMPLES // max(1, len(last))))
        samples = load_samples(run, None, kept).samples[:MOST_SAMPLES]
    except RunDirError:
        return None
    columns, rows = plain_rows(samples)
    return SampleTable(
        columns=columns,
        rows=rows,
        shown=len({sample.iteration for sample in samples}),
        iterations=len(numbers),
    )


def plain_rows(samples: Sequence[RecordedSample]) -> tuple[tuple[str, ...], list[list[Cell]]]:
    """Samples as columns and rows of numbers and texts; lists of tokens are counted."""
    columns = _columns(samples)
    return columns, [[_value(sample, name) for name in columns] for sample in samples]


def _spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most `most` of some numbers, spread evenly, the last one always among them."""
    count = min(most, len(numbers))
    return [numbers[len(numbers) - 1 - n * len(numbers) // count] for n in reversed(range(count))]


def _columns(samples: Sequence[RecordedSample]) -> tuple[str, ...]:
    """Numbers first, then texts, prompt and response before others; lists of tokens are counted."""
    looked_at = [*samples[:50], *samples[-50:]]
    names = list(dict.fromkeys(name for sample in looked_at for name in sample.fields()))
    values = {name: [sample.value(name) for sample in looked_at] for name in names}
    numeric = [n for n in names if any(isinstance(v, int | float) for v in values[n])]
    texts = [n for n in names if any(isinstance(v, str) for v in values[n])]
    worded = [n for n in ("length", "advantage") if any(s.number(n) is not None for s in looked_at)]
    ordered = [*ALWAYS, *worded, *numeric, *(n for n in TEXTS if n in texts), *texts]
    twice = {"advantages"} if "advantage" in worded else set()
    return tuple(name for name in dict.fromkeys(ordered) if name not in twice)


def _value(sample: RecordedSample, name: str) -> Cell:
    found = sample.value(name)
    if isinstance(found, str):
        return found if len(found) <= LONGEST_TEXT else f"{found[:LONGEST_TEXT]}…"
    number = sample.number(name)
    if number is None or not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else float(f"{number:.6g}")
