"""Where recorded edges lie, and what every file says of itself.

    RUN/records/actor.rollout/iteration-000040.parquet          of a run in one process
    RUN/records/actor.rollout/iteration-000040.00003.parquet    what rank 3 had of the rows
    RUN/records/reward/iteration-000040-000059.parquet          of 20 short iterations
    RUN/records/reward/iteration-000040-000058-by2.parquet      of every second one of them

This file imports neither torch nor pyarrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote, unquote

RECORDS = "records"
FORMAT = 2
# Keys of a file's schema metadata.
ABOUT, DTYPES, SHAPES = b"rlflow", b"rlflow.dtype", b"rlflow.shape"
TEXT = "text"
# The column of a file of several iterations that says of which one a row is.
ITERATION = "iteration"
FILE = re.compile(
    r"iteration-(?P<first>\d{6,})(-(?P<last>\d{6,})(-by(?P<step>\d+))?)?(\.(?P<rank>\d{5,}))?"
    r"\.parquet"
)

How = Literal["every", "first", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a file of recorded rows says of itself.

    `how` is `every` where a process wrote all rows that it had, else `first` (groups) or `rows`.
    `total` is the number of rows that the node made in that iteration, over all processes.
    `rows_of` is the node that numbers them: rows of one number are the same in all its edges.
    A file of several iterations has in `parts` those in their order, each with its rows in the
    file and its total; `iteration` and `total` are then the first one's.
    """

    node: str
    iteration: int
    how: How
    total: int
    graph: str
    rows_of: str = ""
    format: int = FORMAT
    parts: tuple[tuple[int, int, int], ...] = ()

    def encoded(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decoded(cls, metadata: Mapping[bytes, bytes] | None) -> About | None:
        """What a schema's metadata says; None of one that is no recorded edge."""
        found = (metadata or {}).get(ABOUT)
        if found is None:
            return None
        values = json.loads(found)
        values["parts"] = tuple(tuple(part) for part in values.get("parts", ()))
        names = cls.__slots__
        return cls(**{name: value for name, value in values.items() if name in names})

    def places(self, rows: int) -> dict[int, range]:
        """The places of each iteration's rows in a file of so many rows."""
        if not self.parts:
            return {self.iteration: range(rows)}
        ends = accumulate(count for _, count, _ in self.parts)
        return {
            iteration: range(end - count, end)
            for (iteration, count, _), end in zip(self.parts, ends, strict=True)
        }

    def of(self, iteration: int) -> About:
        """What the file says of one of its iterations."""
        totals = {number: total for number, _, total in self.parts}
        total = totals.get(iteration, self.total)
        return replace(self, iteration=iteration, total=total, parts=())

    def within(self, iterations: range) -> Self:
        """The same of those iterations of a file of several that lie in a range."""
        parts = tuple(part for part in self.parts if part[0] in iterations)
        first, _, total = parts[0]
        return replace(self, iteration=first, total=total, parts=parts)

    def file_name(self, rank: int | None) -> str:
        """The name of the file of its iterations, which have one distance."""
        numbers = [number for number, _, _ in self.parts] or [self.iteration]
        step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
        return file_name(numbers[0], rank, last=numbers[-1], step=step)


def edge_directory(run: Path, node: str) -> Path:
    """The directory of a node's recorded rows."""
    return run / RECORDS / quote(node, safe=" #@+,=()[]")


def node_of(directory: Path) -> str:
    """The node whose rows a directory holds."""
    return unquote(directory.name)


def file_name(
    iteration: int, rank: int | None = None, *, last: int | None = None, step: int = 1
) -> str:
    """The name of the file of one iteration, or of all to the `last`, of one rank of several."""
    part = "" if rank is None else f".{rank:05d}"
    until = "" if last in (None, iteration) else f"-{last:06d}"
    by = f"-by{step}" if until and step > 1 else ""
    return f"iteration-{iteration:06d}{until}{by}{part}.parquet"


@lru_cache(maxsize=2**16)
def recorded_span(name: str) -> range | None:
    """The iterations whose rows a file holds, ascending; None for a file of another name."""
    match = FILE.fullmatch(name)
    if match is None:
        return None
    first = int(match["first"])
    return range(first, int(match["last"] or first) + 1, int(match["step"] or 1))


def rank_of(name: str) -> int | None:
    """The rank whose rows a file holds; None for that of a run in one process."""
    match = FILE.fullmatch(name)
    return None if match is None or match["rank"] is None else int(match["rank"])
