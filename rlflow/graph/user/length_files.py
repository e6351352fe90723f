"""Files of lengths: JSON Lines, CSV, or one number a line; each row's tokens."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rlflow.errors import Finding, RlflowError, Source, near_names
from rlflow.graph.user.lengths import (
    EXAMPLE,
    Lengths,
    lengths_of_columns,
    read_lengths,
    says_lengths,
)

# Names that a column may have.
NAMES = {
    "prompt": ("prompt", "prompt_tokens", "prompt_length", "input_tokens"),
    "response": ("response", "response_tokens", "response_length", "output_tokens", "length"),
}
MOST_ROWS = 1_000_000


def lengths_file(path: Path, error: type[RlflowError], where: Source | None = None) -> Lengths:
    """The lengths in a file: `.jsonl` and `.csv` by columns, any other a response's a line.

    Raises `error` E357 where it cannot be read, or a line of it says no length.
    """
    columns: dict[str, list[int]] = {"prompt": [], "response": []}
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for number, row in _rows(path, lines):
                if number > MOST_ROWS:
                    break
                for name, value in row.items():
                    columns[name].append(_tokens(value, path, number, error, where))
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError, _NoColumnError) as wrong:
        raise error(_unreadable(path, wrong, where)) from None
    if not any(any(values) for values in columns.values()):
        raise error(_unreadable(path, _NoColumnError("no length in it", ""), where))
    rows = max(map(len, columns.values()))
    return lengths_of_columns(columns, f"{path.name}, {rows:,} row{'s' * (rows != 1)}")


class _NoColumnError(Exception):
    """A file without a column of lengths, and the name that is nearest to one."""

    def __init__(self, what: str, near: str) -> None:
        super().__init__(what)
        self.near = near


def _rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each row with its line: values by `prompt` and `response`."""
    if path.suffix == ".csv":
        table = csv.DictReader(lines)
        taken = _columns(table.fieldnames or [])
        for number, found in enumerate(table, 2):
            yield number, {name: found[column] for name, column in taken.items()}
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield number, {"response": line.strip()}
            continue
        row = json.loads(line)
        if not isinstance(row, dict):
            yield number, {"response": row}
        else:
            yield number, {name: row[column] for name, column in _columns(list(row)).items()}


def _columns(names: Sequence[str]) -> dict[str, str]:
    """The columns of prompts and of responses, by the first of their names that there is."""
    taken = {
        part: column for part, known in NAMES.items() for column in known[::-1] if column in names
    }
    if not taken:
        known = [name for each in NAMES.values() for name in each]
        near = next((match for name in names for match in near_names(name, known)), "")
        raise _NoColumnError(f"columns {', '.join(names)}" if names else "no columns", near)
    return taken


def _tokens(
    value: object, path: Path, line: int, error: type[RlflowError], where: Source | None
) -> int:
    """A length that a line says: a number, or the tokens themselves."""
    if isinstance(value, list):
        return len(value)
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal():
        raise error(
            Finding(
                code="E357",
                what=f"{path}:{line} says no length",
                where=where,
                got=f"{value!r:.80}",
                expected="a whole number of tokens, or a list of them",
                fix='{"prompt": 512, "response": 1804}   a line of a .jsonl file',
            )
        )
    return int(text)


def _unreadable(path: Path, wrong: Exception, where: Source | None) -> Finding:
    got = wrong.strerror if isinstance(wrong, OSError) else str(wrong)
    near = (wrong.near,) if isinstance(wrong, _NoColumnError) and wrong.near else ()
    return Finding(
        code="E357",
        what=f"no lengths can be read of {path}",
        where=where,
        got=str(got),
        expected="a .jsonl or .csv file with columns prompt and response, a number a line,"
        " or the directory of a run",
        near=near,
        fix="--lengths lengths.jsonl",
    )


def declared_lengths(
    said: object, error: type[RlflowError], where: Source | None, *near: Path
) -> Lengths | None:
    """The lengths that a value, words or a file say; a file is looked for in `near` folders too.

    Raises `error` E355, E356 and E357.
    """
    if said is None or isinstance(said, Lengths):
        return said
    if not isinstance(said, str | Path):
        expected = f'rf.Lengths(prompt=512, response=rf.Length(1800)), "{EXAMPLE}", or a file'
        what, got = "no lengths", f"{type(said).__name__}: {said!r:.60}"
        raise error(Finding(code="E355", what=what, where=where, got=got, expected=expected))
    if isinstance(said, str) and says_lengths(said):
        return read_lengths(said, error, where)
    places = (Path(said), *(folder / said for folder in near))
    return lengths_file(next((p for p in places if p.is_file()), places[0]), error, where)
