"""The base of every data source: rows, and which of them an iteration sees.

The position in the data is a pure function of the iteration: epoch e visits all rows in
an order drawn from (seed, e) alone. A resumed run therefore needs no state of its data,
and no rank, thread or call order can change which rows come. This file knows neither
files nor tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isqrt
from typing import Any, TypeVar, overload

from rlflow.data.pictures.columns import IMAGES, size_of_picture
from rlflow.errors import DataError, Finding, Source

Row = dict[str, Any]
T = TypeVar("T")

ROW_ID = "row_id"
CHECKED_ROWS = 10_000
ROUNDS = 4


def as_text(value: object) -> str:
    """A column's value as text: strings as they are, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Memo(dict[str, Any]):
    """What a source has read or drawn; it stays behind when the source is copied or sent."""

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return (Memo, ())

    def once(self, key: str, make: Callable[[], T]) -> T:
        """The value under `key`, made at the first call."""
        if key not in self:
            self[key] = make()
        value: T = self[key]
        return value


class Computed(Sequence[Row]):
    """`size` rows that are computed when they are asked for."""

    def __init__(self, size: int, row: Callable[[int], Row]) -> None:
        self.size = size
        self.row = row

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """One row, or a list of them; negative indices count from the end."""
        if isinstance(index, slice):
            return [self.row(i) for i in range(*index.indices(self.size))]
        return self.row(range(self.size)[index])


def row_at(position: int, rows: int, seed: int) -> int:
    """The row that comes at `position` (from 0) of the endless sequence of epochs.

    Epoch e is a permutation of the rows keyed by (seed, e): a Feistel network on a grid of
    at least `rows` cells, walked until it meets a row (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002, sections 3 and 4). Any place in any epoch costs the
    same, whatever the number of rows, and nothing is kept.
    """
    epoch, cell = divmod(position, rows)
    height = isqrt(rows - 1) + 1
    width = -(-rows // height)
    while True:
        row, column = divmod(cell, width)
        for turn in range(ROUNDS):
            row = (row + _draw(seed, epoch, 2 * turn, column)) % height
            column = (column + _draw(seed, epoch, 2 * turn + 1, row)) % width
        cell = row * width + column
        if cell < rows:
            return cell


def _draw(*counters: int) -> int:
    """64 random bits that follow from the counters alone."""
    text = "/".join(map(str, counters)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource(ABC):
    """Rows with named columns, declared without reading them.

    `declared` is the line of the user's file that made the source.
    """

    declared: Source | None = field(default=None, compare=False, repr=False)
    _memo: Memo = field(default_factory=Memo, init=False, compare=False, repr=False)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The columns of every row, without `row_id`.

        Reads the first row or the header where they were not declared, and raises
        `UsageError` where that cannot be read.
        """

    @abstractmethod
    def size(self) -> int | None:
        """The number of rows, or None where only reading them all would tell."""

    @abstractmethod
    def load(self) -> Sequence[Row]:
        """Read the rows; raises `DataError`. Use `rows`, which reads once."""

    @abstractmethod
    def describe(self) -> str:
        """One line that says what this is; the same in every process."""

    @abstractmethod
    def check(self) -> list[Finding]:
        """Everything that is wrong with the data, found without torch; [] if nothing is."""

    @property
    def pictured(self) -> bool:
        """Whether the column `images` of its rows holds pictures."""
        return False

    def picture_sizes(self, row: Mapping[str, Any]) -> Sequence[tuple[int, int]]:
        """Width and height, pixels, of each picture of a row; raises `ValueError` and OSError."""
        return [size_of_picture(each) for each in row[IMAGES]] if self.pictured else []

    @property
    def remote(self) -> bool:
        """Whether reading the rows may need the network."""
        return False

    def content(self) -> str:
        """What the rows are now, as a short digest: "" where they follow from the declaration.

        Reads files, from end to end. Raises `DataError` and OSError.
        """
        return ""

    def notes(self) -> list[str]:
        """What `check` leaves out, in sentences; [] where it reads every row."""
        return []

    def rows(self) -> Sequence[Row]:
        """All rows, read at the first call and kept; raises `DataError`, also if there are none."""
        rows = self._memo.once("rows", self.load)
        if not len(rows):
            raise DataError(no_rows(self))
        return rows

    def batch(self, iteration: int, size: int, seed: int) -> list[Row]:
        """The `size` rows of an iteration (from 0), each with its index as `row_id`.

        Batches follow each other through the epochs without a gap, so a batch may end one
        epoch and begin the next. Raises `DataError` where the rows cannot be read.
        """
        rows = self.rows()
        ids = [row_at(iteration * size + i, len(rows), seed) for i in range(size)]
        return [{**rows[row_id], ROW_ID: row_id} for row_id in ids]

    def buckets(self, column: str) -> Mapping[str, Sequence[int]]:
        """The `row_id`s of each value of a column as text, in the order of their first rows.

        Reads every row at the first call; of `row_id` itself each row is one of its own. Raises
        `DataError` where rows cannot be read.
        """
        found: Mapping[str, Sequence[int]]
        found = self._memo.once(f"buckets of {column}", lambda: self._in_buckets(column))
        return found

    def _in_buckets(self, column: str) -> Mapping[str, Sequence[int]]:
        rows = self.rows()
        if column == ROW_ID:
            return {str(row_id): (row_id,) for row_id in range(len(rows))}
        found: dict[str, array[int]] = {}
        for row_id, row in enumerate(rows):
            found.setdefault(as_text(row[column]), array("q")).append(row_id)
        return found


def no_rows(source: DataSource) -> Finding:
    """The finding for a source without a row."""
    return Finding(
        code="E604",
        what=f"no rows in {source.describe()}",
        where=source.declared,
        got="0 rows",
        expected="at least one row",
    )
