"""Rows that are computed: arithmetic problems, and a user's own function.

This file reads no file and keeps no row.
"""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from rlflow.data.checks import StoredRow, bad_argument, excerpt, row_problem, shaped, summarised
from rlflow.data.paths import declared_here
from rlflow.data.pictures.columns import IMAGES, PictureColumn
from rlflow.data.sources import CHECKED_ROWS, Computed, DataSource, Row
from rlflow.errors import DataError, Finding, near_names

Split = Literal["train", "test"]

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
MOST_DIGITS = 8
HELD_OUT = "rlflow arithmetic, held out"


def arithmetic(
    digits: int = 2,
    operators: str = "+",
    split: Split = "train",
    test_size: int = 512,
) -> Arithmetic:
    """All problems `a+b=` with a and b below 10**digits, and their answers as text.

    `operators` are any of `+-*`. The `test_size` problems of the test split are the same
    ones in every process, and the train split holds all others. Raises `UsageError` (E608).
    """
    where = declared_here()
    if split not in get_args(Split):
        raise bad_argument(
            f"arithmetic has no split {split!r}",
            where,
            expected="'train' or 'test'",
            near=near_names(split, get_args(Split)),
        )
    unknown = [mark for mark in operators if mark not in OPERATIONS]
    if unknown or not operators or len(set(operators)) < len(operators):
        raise bad_argument(
            f"arithmetic has no operators {operators!r}",
            where,
            expected=f"one or more of {''.join(OPERATIONS)}, each once",
        )
    if not 1 <= digits <= MOST_DIGITS:
        expected = f"between 1 and {MOST_DIGITS}"
        raise bad_argument(f"digits={digits}", where, expected=expected)
    source = Arithmetic(
        digits=digits, operators=operators, split=split, test_size=test_size, declared=where
    )
    if not 1 <= test_size < source.problems:
        raise bad_argument(
            f"test_size={test_size} of {source.problems:,} problems",
            where,
            expected=f"between 1 and {source.problems - 1:,}",
            fix=f"test_size={max(1, source.problems // 5)}",
        )
    return source


def generator(
    fn: Callable[[int], Row], *, size: int, columns: Sequence[str], images: str | None = None
) -> _Generated:
    """Rows that `fn(index)` makes for the indices 0 to size - 1.

    The row must follow from the index alone: it may be asked for again, in any order and
    in any process. `images` is its column of pictures: paths, or encoded bytes. Raises
    `UsageError` (E608) for a size below 1.
    """
    where = declared_here()
    if size < 1:
        raise bad_argument(f"size={size} leaves no rows", where, expected="at least 1")
    seen = () if images is None else (IMAGES,)
    names = tuple(dict.fromkeys(IMAGES if name == images else name for name in (*columns, *seen)))
    return _Generated(fn=fn, length=size, names=names, images=images, declared=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic(DataSource):
    """One split of the problems of `digits` digits."""

    digits: int
    operators: str
    split: Split
    test_size: int

    @property
    def problems(self) -> int:
        """How many problems there are, both splits together."""
        return len(self.operators) * int(100**self.digits)

    @property
    def columns(self) -> tuple[str, ...]:
        """`prompt` and `answer`, both text."""
        return ("prompt", "answer")

    def size(self) -> int:
        """The number of problems in this split."""
        return self.test_size if self.split == "test" else self.problems - self.test_size

    def load(self) -> Sequence[Row]:
        """The problems, each made when it is asked for."""
        test = held_out(self.problems, self.test_size)
        if self.split == "test":
            return Computed(self.size(), lambda index: self._row(test[index]))
        # The i-th number outside the sorted test set is i plus the test numbers below it;
        # gaps[k] is how many train problems come before the k-th test problem.
        gaps = [number - k for k, number in enumerate(test)]
        return Computed(self.size(), lambda index: self._row(index + bisect_right(gaps, index)))

    def describe(self) -> str:
        """The operators, digits, split and size."""
        return (
            f"arithmetic {self.operators} of {self.digits} digits, {self.split} split, "
            f"{self.size():,} rows"
        )

    def check(self) -> list[Finding]:
        """Nothing can be wrong: the arguments were checked at the declaration."""
        return []

    def _row(self, problem: int) -> Row:
        numbers = 100**self.digits
        mark = self.operators[problem // numbers]
        a, b = divmod(problem % numbers, 10**self.digits)
        return {"prompt": f"{a}{mark}{b}=", "answer": str(OPERATIONS[mark](a, b))}


@lru_cache(maxsize=4)
def held_out(problems: int, test_size: int) -> tuple[int, ...]:
    """The numbers of the test problems, ascending; the same for the same arguments, always.

    Drawn one by one with `random()`, the one draw that Python promises never to change.
    """
    draw = random.Random(f"{HELD_OUT}/{problems}").random  # noqa: S311 - a split, not a secret
    chosen: set[int] = set()
    while len(chosen) < test_size:
        chosen.add(int(draw() * problems))
    return tuple(sorted(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generated(DataSource):
    """The rows of a user's function of the index."""

    fn: Callable[[int], Any]
    length: int
    names: tuple[str, ...]
    images: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns as declared."""
        return self.names

    @property
    def pictured(self) -> bool:
        """Whether `images=` named a column of pictures."""
        return self.images is not None

    def size(self) -> int:
        """The number of rows as declared."""
        return self.length

    def load(self) -> Sequence[Row]:
        """The rows, each made and checked when it is asked for (`DataError` then)."""

        def row(index: int) -> Row:
            made, problem = self._made(index)
            if problem is not None:
                raise DataError(problem)
            return shaped(made, self._mapping(), self._pictures())

        return Computed(self.length, row)

    def describe(self) -> str:
        """The name of the function and the number of rows."""
        return f"generator {self._name()}, {self.length:,} rows"

    def check(self) -> list[Finding]:
        """Make each row, or the first 10,000 of more, and the first one twice."""
        made = (self._made(index)[1] for index in range(min(self.length, CHECKED_ROWS)))
        found = summarised(problem for problem in made if problem is not None)
        return found or self._unrepeatable()

    def notes(self) -> list[str]:
        """Says so where only the first rows are checked."""
        if self.length <= CHECKED_ROWS:
            return []
        return [f"{self.describe()}: checked the first {CHECKED_ROWS:,} rows only"]

    def _unrepeatable(self) -> list[Finding]:
        once, again = self._made(0)[0], self._made(0)[0]
        if once == again:
            return []
        return [
            Finding(
                code="E610",
                what=f"{self._name()}(0) makes another row each time",
                where=self.declared,
                got=f"{excerpt(repr(once))}\n{excerpt(repr(again))}",
                expected="the same row for the same index, so that a run can continue",
                fix="random.Random(index) instead of random",
            )
        ]

    def _made(self, index: int) -> tuple[Row, Finding | None]:
        place = f"row {index} of {self._name()}"
        try:
            row = self.fn(index)
        except Exception as error:
            return {}, self._finding(f"{place} raised {type(error).__name__}", str(error))
        if not isinstance(row, Mapping):
            return {}, self._finding(f"{place} is no row", f"{type(row).__name__} {row!r}")
        stored = StoredRow(place=place, row=row, where=self.declared)
        problem = row_problem(stored, self._mapping(), self._pictures())
        # Only stored tables can rename columns, so the proposal would not help here.
        return dict(row), problem and dataclasses.replace(problem, fix="")

    def _finding(self, what: str, got: str) -> Finding:
        listed = ", ".join(f'"{name}": ...' for name in self.columns)
        return Finding(
            code="E605",
            what=what,
            where=self.declared,
            got=excerpt(got),
            expected=f"a row: {{{listed}}}",
        )

    def _mapping(self) -> dict[str, str]:
        found = {name: name for name in self.names}
        return found if self.images is None else {**found, IMAGES: self.images}

    def _pictures(self) -> PictureColumn | None:
        return None if self.images is None else PictureColumn()

    def _name(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return str(name)
