"""Arrow tables as rows: which columns JSON can hold, and rows made when they are asked for.

This file knows neither where a table comes from nor what its columns mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.data.checks import Columns, StoredRow, row_problem, shaped
from rlflow.data.pictures.columns import IMAGES
from rlflow.data.sources import Computed, Row
from rlflow.data.tables import TableSource
from rlflow.errors import DataError, Finding, Source, known_names, near_names


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowSource(TableSource):
    """A stored table with a schema; its rows stay in Arrow until they are asked for."""

    @abstractmethod
    def schema(self) -> Any:
        """The Arrow schema; raises `DataError` where it cannot be read."""

    @abstractmethod
    def table(self) -> Any:
        """A `pyarrow.Table` of the kept columns, all rows; raises `DataError`."""

    @abstractmethod
    def pieces(self) -> Iterator[list[Row]]:
        """The stored rows of the kept columns, some at a time."""

    @abstractmethod
    def label(self) -> str:
        """What messages call the table."""

    def header(self) -> tuple[str, ...]:
        """The stored columns; raises `DataError` for columns that are missing or unusable."""
        schema = self.schema()
        names = tuple(schema.names)
        missing = missing_columns(names, self.shape, self.label(), self.declared)
        findings = missing or unusable_columns(schema, self.shape, self.label(), self.declared)
        if findings:
            raise DataError(*findings)
        return names

    def stored(self) -> Iterator[StoredRow | Finding]:
        """All rows in order."""
        index = 0
        for piece in self.pieces():
            for row in piece:
                yield self._stored(index, row)
                index += 1

    def load(self) -> Sequence[Row]:
        """The rows, each made and checked when it is asked for (`DataError` then)."""
        mapping, pictures = self.mapping(), self.pictures(opened=False)
        table = self.table()
        size = table.num_rows if self.limit is None else min(self.limit, table.num_rows)

        def row(index: int) -> Row:
            stored = self._stored(index, table.slice(index, 1).to_pylist()[0])
            problem = row_problem(stored, mapping, pictures)
            if problem is not None:
                raise DataError(problem)
            return shaped(stored.row, mapping, pictures)

        return Computed(size, row)

    def kept(self, names: Sequence[str]) -> list[str]:
        """The stored names, out of `names`, of the columns that are kept."""
        wanted = set(self.shape.mapping(names).values())
        return [name for name in names if name in wanted]

    def _stored(self, index: int, row: Row) -> StoredRow:
        return StoredRow(place=f"row {index} of {self.label()}", row=row, where=self.declared)


def limited(pieces: Iterator[list[Row]], limit: int | None) -> Iterator[list[Row]]:
    """The pieces until `limit` rows have come; the last one may run over."""
    seen = 0
    for piece in pieces:
        yield piece
        seen += len(piece)
        if limit is not None and seen >= limit:
            return


def missing_columns(
    header: tuple[str, ...], shape: Columns, label: str, where: Source | None
) -> list[Finding]:
    """A finding for every column that `shape` needs and the table lacks."""
    found = []
    for name, old in shape.mapping(header).items():
        near = near_names(old, header)
        finding = Finding(
            code="E603",
            what=f"{label} has no column {old!r}",
            where=where,
            got=f"columns {known_names(header)}",
            expected=f"a column {old!r}",
            near=near,
            fix=f'rename={{"{near[0]}": "{name}"}}' if near else "",
        )
        found += [] if old in header else [finding]
    return found


def unusable_columns(
    schema: Any, shape: Columns, label: str, where: Source | None
) -> list[Finding]:
    """A finding for every kept column of an Arrow schema that JSON could not hold."""
    mapping = shape.mapping(schema.names)
    kept = {old for name, old in mapping.items() if not (shape.pictured and name == IMAGES)}
    bad = [entry for entry in schema if entry.name in kept and not jsonable(entry.type)]
    good = [name for name in schema.names if name not in {entry.name for entry in bad}]
    new = dict(shape.rename)
    listed = ", ".join(f'"{new.get(name, name)}"' for name in good)
    return [
        Finding(
            code="E605",
            what=f"{label} has a column {entry.name!r} that JSON cannot hold",
            where=where,
            got=str(entry.type),
            expected="text, numbers, booleans, or lists and structs of them",
            fix=f"columns=[{listed}]",
        )
        for entry in bad
    ]


def jsonable(kind: Any) -> bool:
    """Whether values of an Arrow type are JSON values in Python."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(jsonable(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return jsonable(kind.value_type)
    if types.is_dictionary(kind):
        return jsonable(kind.value_type)
    numbers = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(numbers or text or types.is_null(kind))
