"""From a row as it is stored to the row a pipeline sees, and what can be wrong on the way.

This file knows columns and prompts; it knows neither files nor formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.data.chat import message_problem
from rlflow.data.pictures.columns import (
    IMAGES,
    PictureColumn,
    picture_problem,
    pictures_in,
    unseen_picture,
)
from rlflow.data.sources import ROW_ID, Row
from rlflow.errors import Finding, Source, UsageError, known_names, near_names

PROMPT = "prompt"
SHOWN_PER_CODE = 3
SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """A row as its file holds it; `place` names it in messages, `where` is its line."""

    place: str
    row: Mapping[str, Any]
    where: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which stored columns a source keeps, and what it calls them.

    `keep` are names after renaming, None for all of the first row; `rename` are pairs
    (stored name, name). With `pictured` the column `images` holds pictures.
    """

    keep: tuple[str, ...] | None = None
    rename: tuple[tuple[str, str], ...] = ()
    pictured: bool = False

    def mapping(self, stored: Iterable[str]) -> dict[str, str]:
        """Each column's name and its stored name, for a table with the columns `stored`."""
        new = dict(self.rename)
        found = dict.fromkeys([*(new.get(name, name) for name in stored), *new.values()])
        return {name: self.stored_name(name) for name in (self.keep or found)}

    def stored_name(self, name: str) -> str:
        """What the file calls the column `name`."""
        return {new: old for old, new in self.rename}.get(name, name)

    def clashes(self, stored: Iterable[str], where: Source | None) -> list[Finding]:
        """Names that two columns would have, or that rlflow itself gives a column."""
        stored = tuple(stored)
        renamed = dict(self.rename)
        taken = [new for old, new in self.rename if new in stored and new not in renamed]
        found = [
            Finding(
                code="E609",
                what=f"two columns would be called {name!r}",
                where=where,
                got=f"{self.stored_name(name)!r} renamed to {name!r}, beside a column {name!r}",
                expected="one column of each name",
                fix=f'rename={{"{self.stored_name(name)}": "{name}", "{name}": "{name}_2"}}',
            )
            for name in (taken if self.keep is None else ())
        ]
        if ROW_ID in self.mapping(stored):
            found.append(
                Finding(
                    code="E609",
                    what=f"a column is called {ROW_ID!r}, which rlflow adds itself",
                    where=where,
                    got=f"columns {known_names(stored)}",
                    expected="any other name",
                    fix=f'rename={{"{self.stored_name(ROW_ID)}": "id"}}',
                )
            )
        return found


def row_problem(
    stored: StoredRow, mapping: Mapping[str, str], pictures: PictureColumn | None = None
) -> Finding | None:
    """What is wrong with a row for this mapping of `Columns`; the first thing found.

    A row may have no `pictures`; every other column has a value.
    """
    for name, old in mapping.items():
        if stored.row.get(old) is None and not (pictures is not None and name == IMAGES):
            return _missing(stored, name, old)
    found = prompt_problem(stored, mapping[PROMPT]) if PROMPT in mapping else None
    if found is not None or pictures is None:
        return found
    column, prompt = mapping[IMAGES], stored.row.get(mapping.get(PROMPT, PROMPT))
    problem = picture_problem(stored.row.get(column), prompt, pictures)
    return problem and unseen_picture(stored.place, column, *problem, stored.where)


def shaped(
    row: Mapping[str, Any], mapping: Mapping[str, str], pictures: PictureColumn | None = None
) -> Row:
    """The row with its columns renamed, after `row_problem` has passed it."""
    found = {name: row.get(old) for name, old in mapping.items()}
    if pictures is not None:
        found[IMAGES] = pictures_in(found[IMAGES], pictures.folder)
    return found


def _missing(stored: StoredRow, name: str, old: str) -> Finding:
    have = tuple(column for column, value in stored.row.items() if value is not None)
    near = near_names(old, have)
    texts = [column for column in have if isinstance(stored.row[column], str | list)]
    return Finding(
        code="E603",
        what=f"{stored.place} has no {old!r}",
        where=stored.where,
        got=f"{old!r} is null" if old in stored.row else f"columns {known_names(have)}",
        expected=f"a value for {old!r} in every row",
        near=near,
        fix="" if old in stored.row else _renaming(name, near, texts),
    )


def _renaming(name: str, near: tuple[str, ...], texts: list[str]) -> str:
    """The argument that takes another column; for a prompt any that could be one."""
    if name == PROMPT and (near or texts):
        return f'prompt="{(*near, *texts)[0]}"'
    return f'rename={{"{near[0]}": "{name}"}}' if near else ""


def prompt_problem(stored: StoredRow, column: str) -> Finding | None:
    """Whether the prompt is neither text nor a list of chat messages, or is empty."""
    prompt = stored.row[column]
    if isinstance(prompt, str):
        got = "" if prompt else "an empty text"
    elif isinstance(prompt, list):
        got = _chat_problem(prompt)
    else:
        got = excerpt(f"{type(prompt).__name__} {prompt!r}")
    if not got:
        return None
    return Finding(
        code="E605",
        what=f"{stored.place} has a {column!r} that is no prompt",
        where=stored.where,
        got=got,
        expected='a text, or chat messages: [{"role": "user", "content": "..."}]',
    )


def _chat_problem(messages: list[Any]) -> str:
    if not messages:
        return "an empty list"
    for number, message in enumerate(messages, start=1):
        problem = message_problem(message)
        if problem:
            return excerpt(f"message {number} {problem}")
    return ""


def excerpt(text: str, at: int = 0) -> str:
    """At most 80 characters of `text`, around the character `at`; cuts are marked with dots."""
    start = max(0, min(at - SHOWN_CHARS // 2, len(text) - SHOWN_CHARS))
    end = start + SHOWN_CHARS
    before = "..." if start else ""
    after = "..." if end < len(text) else ""
    return f"{before}{text[start:end]}{after}"


def summarised(findings: Iterable[Finding]) -> list[Finding]:
    """The first three findings of each code; the third says how many more there are.

    Rows that all lack a column are one finding, that of the first of them.
    """
    kept: dict[str, list[Finding]] = {}
    hidden: dict[str, int] = {}
    alike: set[tuple[str, str]] = set()
    for finding in findings:
        mistake = (finding.got, finding.expected)
        if finding.code == "E603" and mistake in alike:
            hidden[finding.code] = hidden.get(finding.code, 0) + 1
            continue
        alike.add(mistake)
        same = kept.setdefault(finding.code, [])
        if len(same) < SHOWN_PER_CODE:
            same.append(finding)
        else:
            hidden[finding.code] = hidden.get(finding.code, 0) + 1
    for code, count in hidden.items():
        last = kept[code][-1]
        what = f"{last.what} (and {count:,} more of this kind)"
        kept[code][-1] = dataclasses.replace(last, what=what)
    return [finding for same in kept.values() for finding in same]


def bad_argument(what: str, where: Source | None, **parts: Any) -> UsageError:
    """An argument of a source that cannot be right, E608; `parts` are those of a finding."""
    return UsageError(Finding(code="E608", what=what, where=where, **parts))
