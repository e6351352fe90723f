"""The first rows of a data source, as a source of its own.

This file reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.data.sources import DataSource, Row
from rlflow.errors import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRows(DataSource):
    """At most `count` rows of a source, its first ones."""

    source: DataSource
    count: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The source's."""
        return self.source.columns

    @property
    def remote(self) -> bool:
        """Whether the source's rows may need the network."""
        return self.source.remote

    def size(self) -> int | None:
        """The number of rows, or None where the source does not know its own."""
        size = self.source.size()
        return None if size is None else min(size, self.count)

    def load(self) -> Sequence[Row]:
        """The first rows."""
        return self.source.rows()[: self.count]

    def describe(self) -> str:
        """The source, and how many rows of it."""
        return f"first {self.count:,} of {self.source.describe()}"

    def check(self) -> list[Finding]:
        """What is wrong with the source."""
        return self.source.check()

    def notes(self) -> list[str]:
        """What the source's check leaves out."""
        return self.source.notes()
