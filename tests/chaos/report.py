"""The page of a run of the matrix: each row, what was expected, what came of it, what was left."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.matrix import Row


@dataclass(frozen=True)
class Told:
    """What became of a row: `holds`, `failed` or `not run`; why not, or what was left."""

    row: Row
    outcome: str
    seconds: float
    said: str


def page(told: Sequence[Told], rows: int, seed: int, took: float) -> str:
    """A page in Markdown of the rows that were tried, of so many in all."""
    counts = Counter(each.outcome for each in told)
    named = ", ".join(f"{counts[name]} {name}" for name in ("holds", "failed", "not run"))
    lines = [
        "# Faults",
        "",
        f"`make chaos` on {platform.machine()}, {len(os.sched_getaffinity(0))} cores, seed {seed}: "
        f"{len(told)} of {rows} rows in {took / 60:.0f} minutes: {named}.",
        "",
        "A row holds where its fault has fired, what is expected followed within the deadline, "
        "and no process, shared memory, socket or temporary file was left. *continues*: resumed, "
        "it has the bits of a run without an accident. *error*: one typed error in time; the run "
        "goes on from there to the same bits. *refused*: before anything starts. *goes on*: and "
        "counts it. Rows of other suites hold where their tests pass, which assert the fault by "
        "themselves.",
        "",
        "| row | fault | expected | outcome | seconds | of at most | left, or why not |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in told:
        row = each.row
        cells = (row.id, row.fault, row.expect, each.outcome, f"{each.seconds:.1f}")
        said = (*cells, f"{row.seconds:g}", each.said or "nothing")
        lines.append(
            "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in said) + " |"
        )
    return "\n".join(lines) + "\n"


def write(told: Sequence[Told], rows: int, seed: int, took: float, path: Path) -> None:
    """Write the page."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(told, rows, seed, took))
