"""What became of each row: kept beside the page from one session to the next, and the page of it.

A session may run a few rows alone; the page has the last outcome of every row, and when it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.chaos.matrix import Row


@dataclass(frozen=True, kw_only=True)
class Told:
    """What became of a row: `holds`, `failed` or `not run`; why not, or what was left.

    `limit` is the deadline in seconds that it had, `load` the machine's processes that were
    ready to run when it began, `when` the minute, in UTC.
    """

    row: str
    outcome: str
    seconds: float
    limit: float
    said: str = ""
    load: float = 0.0
    when: str = ""


@dataclass(frozen=True, kw_only=True)
class Session:
    """A call of `make chaos`: how many rows it has run on how many workers, and how long it took.

    `slower` is the factor on all deadlines that the caller has given, for a machine at work.
    """

    when: str
    rows: int
    workers: int
    slower: float
    minutes: float


@dataclass(frozen=True)
class Kept:
    """Rows by id and sessions, as a file has them."""

    rows: dict[str, Told]
    sessions: list[Session]


def now() -> str:
    """This minute, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def read(page: Path) -> Kept:
    """What is kept beside a page; nothing where there is none yet."""
    file = page.with_suffix(".json")
    found = json.loads(file.read_text()) if file.exists() else {"rows": [], "sessions": []}
    rows = {each["row"]: Told(**each) for each in found["rows"]}
    return Kept(rows, [Session(**each) for each in found["sessions"]])


def keep(page: Path, rows: Sequence[Row], change: Callable[[Kept], object]) -> None:
    """Change what is kept and write the page anew; one process at a time."""
    with alone(page.parent):
        kept = read(page)
        change(kept)
        known = [kept.rows[row.id] for row in rows if row.id in kept.rows]
        page.with_suffix(".json").write_text(by_line(rows=known, sessions=kept.sessions))
        page.write_text(written(rows, Kept({each.row: each for each in known}, kept.sessions)))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within it no other process that asks is in this folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def by_line(**lists: Sequence[Any]) -> str:
    """Lists of frozen values as JSON, a line each value."""
    said = (
        f'"{name}": [\n' + ",\n".join(json.dumps(asdict(each)) for each in values) + "\n]"
        for name, values in lists.items()
    )
    return "{" + ",\n".join(said) + "}\n"


INTRODUCTION = (
    "A row holds where its fault has fired, what is expected followed within the deadline, "
    "and no process, shared memory, socket or temporary file was left. *continues*: resumed, "
    "it has the bits of a run without an accident. *error*: one typed error in time; the run "
    "goes on from there to the same bits. *refused*: before anything starts. *goes on*: and "
    "counts it. Rows of other suites hold where their tests pass, which assert the fault by "
    "themselves. *Load* is that of the machine when the row began: above the cores, others were "
    "at work too. `make chaos` writes this page; `make chaos ONLY='K6, D2'` runs rows by the "
    "beginnings of their ids, `make chaos MISSING=1` those that do not hold yet, and the page has "
    "the last outcome of each."
)


def written(rows: Sequence[Row], kept: Kept) -> str:
    """The page in Markdown."""
    told = [kept.rows[row.id] for row in rows if row.id in kept.rows]
    counts = Counter(each.outcome for each in told)
    named = ", ".join(f"{counts[name]} {name}" for name in ("holds", "failed", "not run"))
    lines = [
        "# Faults",
        "",
        f"{len(told)} of {len(rows)} rows on {platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores: {named}.",
        "",
        INTRODUCTION,
        "",
        *costs(rows, kept),
        "",
        *sessions(kept),
        "",
        "| row | fault | expected | outcome | seconds | of at most | load | when | left, why not |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(line(row, kept.rows.get(row.id)) for row in rows)]) + "\n"


def costs(rows: Sequence[Row], kept: Kept) -> list[str]:
    """Seconds by kind of row, of those that were run."""
    lines = [
        "| kind | rows | run | seconds in all | median | longest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    kinds = sorted({row.id[0] for row in rows}, key=[row.id[0] for row in rows].index)
    for kind in [*kinds, ""]:
        mine = [row for row in rows if row.id.startswith(kind)]
        ran = [kept.rows[row.id] for row in mine if row.id in kept.rows]
        took = [each.seconds for each in ran if each.outcome != "not run"]
        figures = [sum(took), statistics.median(took), max(took)] if took else []
        cells = [
            kind or "all",
            str(len(mine)),
            str(len(took)),
            *(f"{each:.0f}" for each in figures),
        ]
        lines.append(f"| {' | '.join([*cells, '', '', ''][:6])} |")
    return lines


def sessions(kept: Kept) -> list[str]:
    """When how many rows were run."""
    return [
        "| session | rows | workers | deadlines times | minutes |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {each.when} | {each.rows} | {each.workers} | {each.slower:g} | {each.minutes:.1f} |"
            for each in kept.sessions
        ),
    ]


def line(row: Row, told: Told | None) -> str:
    """A row of the table, of what was run or not yet."""
    cells = [row.id, row.fault, row.expect]
    if told is None:
        cells += ["not yet", "", f"{row.seconds:g}", "", "", ""]
    else:
        cells += [told.outcome, f"{told.seconds:.1f}", f"{told.limit:g}", f"{told.load:.1f}"]
        cells += [told.when, told.said or "nothing"]
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
