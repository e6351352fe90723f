"""What all stored tables share: which columns are kept, how far they are read and checked.

A format adds two things, its header and its rows. This file knows no format.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from rlflow.data.checks import (
    PROMPT,
    Columns,
    StoredRow,
    bad_argument,
    row_problem,
    shaped,
    summarised,
)
from rlflow.data.pictures.columns import IMAGES, PictureColumn
from rlflow.data.sources import CHECKED_ROWS, DataSource, Row, no_rows
from rlflow.errors import DataError, Finding, Source, UsageError, known_names

WHOLE_BYTES = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource(DataSource):
    """Rows of a stored table: `shape` says which columns, `limit` how many rows at most."""

    shape: Columns
    limit: int | None = None

    @abstractmethod
    def header(self) -> tuple[str, ...]:
        """The stored columns; raises `DataError` where they cannot be read."""

    @abstractmethod
    def stored(self) -> Iterator[StoredRow | Finding]:
        """All rows in order, a finding in the place of one that cannot be read."""

    @abstractmethod
    def stored_bytes(self) -> int:
        """The size of the table, bytes; 0 where it cannot be told."""

    @abstractmethod
    def folder(self) -> Path | None:
        """The folder that paths of pictures begin in; None where there is none."""

    @property
    def pictured(self) -> bool:
        """Whether `images=` named a column of pictures."""
        return self.shape.pictured

    def pictures(self, *, opened: bool) -> PictureColumn | None:
        """How its pictures are read, None where it has none."""
        return PictureColumn(folder=self.folder(), opened=opened) if self.pictured else None

    @property
    def columns(self) -> tuple[str, ...]:
        """The declared columns, or those of the header (`UsageError` if it cannot be read)."""
        if self.shape.keep is not None:
            return self.shape.keep
        try:
            return tuple(self._memo.once("mapping", self.mapping))
        except DataError as error:
            raise UsageError(*error.findings) from error

    def mapping(self) -> dict[str, str]:
        """Each column's name and its stored name; raises `DataError`."""
        header = self.header()
        clashes = self.shape.clashes(header, self.declared)
        if clashes:
            raise DataError(*clashes)
        return self.shape.mapping(header)

    def load(self) -> Sequence[Row]:
        """Read and check the rows; raises `DataError` with all that is wrong."""
        mapping, pictures = self.mapping(), self.pictures(opened=False)
        problems: list[Finding] = []
        rows: list[Row] = []
        for item in islice(self.stored(), self.limit):
            problem = item if isinstance(item, Finding) else row_problem(item, mapping, pictures)
            if problem is not None:
                problems.append(problem)
            elif isinstance(item, StoredRow):
                rows.append(shaped(item.row, mapping, pictures))
        if problems:
            raise DataError(*summarised(problems))
        return rows

    def check(self) -> list[Finding]:
        """Read the whole table, or the first 10,000 rows of one above 200 MB."""
        try:
            return summarised(self._problems(self.mapping()))
        except DataError as error:
            return list(error.findings)

    def notes(self) -> list[str]:
        """Says so where only the first rows are checked."""
        try:
            if self.whole():
                return []
        except DataError:
            return []
        size = f"{self.stored_bytes() / 1e6:,.0f} MB"
        return [f"{self.describe()}: checked the first {CHECKED_ROWS:,} rows only, of {size}"]

    def _problems(self, mapping: Mapping[str, str]) -> Iterator[Finding]:
        rows, pictures = islice(self.stored(), self.limit), self.pictures(opened=True)
        first = next(rows, None)
        if first is None:
            yield no_rows(self)
            return
        for item in chain([first], rows if self.whole() else islice(rows, CHECKED_ROWS - 1)):
            problem = item if isinstance(item, Finding) else row_problem(item, mapping, pictures)
            if problem is not None:
                yield problem

    def whole(self) -> bool:
        """Whether the table is small enough to be read for a check; raises `DataError`."""
        few = self.limit is not None and self.limit <= CHECKED_ROWS
        return few or self.stored_bytes() <= WHOLE_BYTES

    def described(self, subject: str) -> str:
        """`subject` with, in brackets, the columns and the limit."""
        renamed = ", ".join(f"{old} as {new}" for old, new in self.shape.rename)
        limit = f"first {self.limit:,}" if self.limit is not None else ""
        seen = "pictures" if self.pictured else ""
        parts = "; ".join(filter(None, (", ".join(self.shape.keep or ()), renamed, seen, limit)))
        return f"{subject} ({parts})" if parts else subject


def shape_of(
    columns: Sequence[str] | None,
    prompt: str,
    rename: Mapping[str, str] | None,
    images: str | None,
    where: Source | None,
) -> Columns:
    """The shape that a user's arguments describe; raises `UsageError` (E608) if they clash."""
    pairs = dict(rename or {})
    for stored, name, what in ((prompt, PROMPT, "the prompt"), (images, IMAGES, "the pictures")):
        if stored not in (None, name) and pairs.setdefault(str(stored), name) != name:
            raise bad_argument(
                f"column {stored!r} is {what} and renamed to {pairs[str(stored)]!r}",
                where,
                expected=f"{stored!r} in one of the two",
            )
    targets = list(pairs.values())
    for name in targets:
        if targets.count(name) > 1:
            both = [old for old, new in pairs.items() if new == name]
            raise bad_argument(f"two columns are renamed to {name!r}", where, got=known_names(both))
    for name in columns or ():
        if name in pairs and name not in targets:
            raise bad_argument(
                f"column {name!r} is renamed to {pairs[name]!r}",
                where,
                got=f"columns {known_names(tuple(columns or ()))}",
                expected="columns by their names after renaming",
                fix=f'"{pairs[name]}" in columns',
            )
    seen = () if images is None else (IMAGES,)
    keep = None if columns is None else tuple(dict.fromkeys((*columns, *seen)))
    return Columns(keep=keep, rename=tuple(pairs.items()), pictured=images is not None)


def checked_limit(limit: int | None, where: Source | None) -> int | None:
    """`limit` if it is None or at least 1; raises `UsageError` (E608) otherwise."""
    if limit is not None and limit < 1:
        raise bad_argument(f"limit={limit} leaves no rows", where, expected="at least 1")
    return limit
