"""Where recorded edges lie, and what every file says of itself.

    RUN/records/actor.rollout/iteration-000040.parquet          of a run in one process
    RUN/records/actor.rollout/iteration-000040.00003.parquet    what rank 3 had of the rows

This file imports neither torch nor pyarrow.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

RECORDS = "records"
FORMAT = 1
# Keys of a file's schema metadata.
ABOUT, DTYPES, SHAPES = b"rlflow", b"rlflow.dtype", b"rlflow.shape"
TEXT = "text"
FILE = re.compile(r"iteration-(?P<iteration>\d{6,})(\.(?P<rank>\d{5,}))?\.parquet")

How = Literal["every", "first", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a file of recorded rows says of itself.

    `how` is `every` where a process wrote all rows that it had, else `first` (groups) or `rows`.
    `total` is the number of rows that the node made in that iteration, over all processes.
    `rows_of` is the node that numbers them: rows of one number are the same in all its edges.
    """

    node: str
    iteration: int
    how: How
    total: int
    graph: str
    rows_of: str = ""
    format: int = FORMAT

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
        names = cls.__slots__
        return cls(**{name: value for name, value in values.items() if name in names})


def edge_directory(run: Path, node: str) -> Path:
    """The directory of a node's recorded rows."""
    return run / RECORDS / quote(node, safe=" #@+,=()[]")


def node_of(directory: Path) -> str:
    """The node whose rows a directory holds."""
    return unquote(directory.name)


def file_name(iteration: int, rank: int | None = None) -> str:
    """The name of the file of one iteration, of one rank of several."""
    part = "" if rank is None else f".{rank:05d}"
    return f"iteration-{iteration:06d}{part}.parquet"


def iteration_of(name: str) -> int | None:
    """The iteration whose rows a file holds; None for a file of another name."""
    match = FILE.fullmatch(name)
    return None if match is None else int(match["iteration"])
