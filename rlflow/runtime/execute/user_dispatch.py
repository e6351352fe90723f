"""Registered dispatch functions of a user: asked to spread rows, and their results checked.

The functions are a user's: whatever they return, the answer is a partition or one error that
names them. This file knows no rule of rlflow's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import Finding, RunError, Source, error_text
from rlflow.graph.user.dispatch import Pair

Rows = NDArray[np.int64]

SHOWN = 200
NO_PARTS = "it is no list of lists of row numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A registered pair and what it is asked for; what it returns is checked here."""

    pair: Pair
    rows: int
    parts: int
    where: Source | None

    def taken(self, tokens: Rows, groups: Rows | None) -> list[Rows]:
        """What `dispatch` returns: every row in some part."""
        named = None if groups is None else groups.tolist()
        made = self._made("dispatch", tokens.tolist(), named, self.parts)
        missing = np.setdiff1d(np.arange(self.rows), np.concatenate(made))
        if len(missing):
            raise self._refused("dispatch", f"row {missing[0]} is in no part", made)
        return made

    def require_whole(self, taken: list[Rows], groups: Rows) -> None:
        """Refuse a part that has some rows of a group and lacks others."""
        for number, part in enumerate(taken):
            lacking = np.setdiff1d(np.flatnonzero(np.isin(groups, groups[part])), part)
            if len(lacking):
                problem = f"part {number} lacks row {lacking[0]}, the rest of whose group it has"
                raise self._refused("dispatch", problem, taken)

    def kept(self, taken: list[Rows]) -> list[Rows]:
        """The rows of each part whose results `collect` keeps; the first of a row without it."""
        if self.pair.collect is None:
            first = np.unique(np.concatenate(taken), return_index=True)[1]
            ends = np.cumsum([len(part) for part in taken])
            bounds = np.searchsorted(np.sort(first), ends[:-1])
            return np.split(np.concatenate(taken)[np.sort(first)], bounds)
        made = self._made("collect", [part.tolist() for part in taken])
        for number, (chosen, part) in enumerate(zip(made, taken, strict=True)):
            foreign = np.setdiff1d(chosen, part)
            if len(foreign):
                problem = f"part {number} was not given row {foreign[0]}"
                raise self._refused("collect", problem, made)
        times = np.bincount(np.concatenate(made), minlength=self.rows)
        wrong = np.flatnonzero(times != 1)
        if len(wrong):
            problem = f"row {wrong[0]} is kept {times[wrong[0]]} times"
            raise self._refused("collect", problem, made)
        firsts = [np.sort(np.unique(part, return_index=True)[1]) for part in taken]
        return [
            part[first[np.isin(part[first], chosen)]]
            for chosen, part, first in zip(made, taken, firsts, strict=True)
        ]

    def _made(self, role: str, *arguments: Any) -> list[Rows]:
        """The parts a function of the pair returns, as arrays of numbers of rows."""
        try:
            returned = getattr(self.pair, role)(*arguments)
        except Exception as error:
            problem = f"raised {error_text(error)}"
            raise self._refused(role, problem) from error
        try:
            found = [np.array(list(part)) for part in returned]
        except (TypeError, ValueError):
            raise self._refused(role, NO_PARTS, returned) from None
        if len(found) != self.parts:
            raise self._refused(role, f"{len(found)} parts instead of {self.parts}", returned)
        for part in found:
            if len(part) and (part.ndim != 1 or part.dtype.kind not in "iu"):
                raise self._refused(role, NO_PARTS, returned)
            outside = part[(part < 0) | (part >= self.rows)]
            if len(outside):
                problem = f"{outside[0]} is none of the {self.rows} rows"
                raise self._refused(role, problem, returned)
        return [part.astype(np.int64) for part in found]

    def _refused(self, role: str, problem: str, *returned: Any) -> RunError:
        function = getattr(self.pair, role)
        name = getattr(function, "__qualname__", repr(function))
        each = "in at least one of them" if role == "dispatch" else "in exactly one of them"
        return RunError(
            Finding(
                code="E761",
                what=f"{role} function {name} of rule {self.pair.name!r}: {problem}",
                where=self.where,
                got="".join(f"{_plain(value)!r:.{SHOWN}}" for value in returned),
                expected=f"{self.parts} lists of row numbers below {self.rows}, every row {each}",
            )
        )


def _plain(returned: Any) -> Any:
    """Arrays as lists, so that what was returned is printed as it was meant."""
    if isinstance(returned, list):
        return [_plain(part) for part in returned]
    return returned.tolist() if isinstance(returned, np.ndarray) else returned
