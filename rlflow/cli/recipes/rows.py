"""The rows that a pipeline is written for: a file with columns that can be looked at, or a name.

This file reads the columns of a file, and writes the function that declares the source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlflow.data.files import Jsonl, Parquet, jsonl, parquet
from rlflow.data.paths import find_path, missing_file
from rlflow.errors import DataError, Finding, UsageError, known_names, near_names

READERS: dict[str, Callable[..., Jsonl | Parquet]] = {".jsonl": jsonl, ".parquet": parquet}
OTHER_FORMATS = (".json", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")
# What files call a prompt and an answer where they do not call them so.
OFTEN = {
    "--prompt-column": ("question", "problem", "instruction", "query", "input", "messages"),
    "--answer-column": ("solution", "response", "output", "target", "completion", "label"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows:
    """Where rows come from and what their columns are called there."""

    data: str
    prompt: str = "prompt"
    answer: str = "answer"
    subset: str | None = None

    @property
    def suffix(self) -> str:
        """`.jsonl` or `.parquet`, and "" for what the package `datasets` reads by name."""
        suffix = Path(self.data).suffix
        return suffix if suffix in READERS else ""

    def checked(self) -> None:
        """Look at the file, if it is one.

        Raises UsageError E353 for columns that it does not have, E354 for data that is neither a
        file of a known format nor a name of the hub, E601 to E606 for a file that cannot be read.
        """
        if self.prompt == self.answer:
            raise UsageError(_one_column(self.prompt))
        found = find_path(self.data)
        if not self.suffix:
            if Path(self.data).suffix in OTHER_FORMATS or (found and found.is_file()):
                raise UsageError(_unknown_format(self.data))
            if found is None and not _like_a_hub_name(self.data):
                raise UsageError(missing_file(self.data, None, None))
            return
        if found is None:
            raise UsageError(missing_file(self.data, None, None))
        try:
            columns = READERS[self.suffix](self.data).header()
        except DataError as error:
            raise UsageError(*error.findings) from None
        asked = {"--prompt-column": self.prompt, "--answer-column": self.answer}
        wrong = [_no_column(self.data, o, c, columns) for o, c in asked.items() if c not in columns]
        if wrong:
            raise UsageError(*wrong)

    def source(self) -> str:
        """The function `rows` of the written file."""
        renamed = {self.prompt: "prompt", self.answer: "answer"}
        renamed = {old: new for old, new in renamed.items() if old != new}
        pairs = ", ".join(
            f"{double_quoted(old)}: {double_quoted(new)}" for old, new in renamed.items()
        )
        columns = 'columns=("prompt", "answer")'
        words = [columns, f"rename={{{pairs}}}"] if renamed else [columns]
        if self.suffix:
            says = '"""The file\'s rows, each with a `prompt` and an `answer`."""'
            called, head = f"rf.data.{self.suffix[1:]}", "def rows(path: str)"
            words.insert(0, "path")
        else:
            says = '"""A split\'s rows, each with a `prompt` and an `answer`."""'
            called, head = "rf.data.huggingface", 'def rows(name: str, split: str = "train")'
            subset = [f"subset={double_quoted(self.subset)}"] if self.subset else []
            words[:0] = ["name", "split=split", *subset]
        lines = [f"{head} -> rf.data.DataSource:", f"    {says}"]
        one = f"    return {called}({', '.join(words)})"
        several = [f"    return {called}(", *(f"        {word}," for word in words), "    )"]
        return "\n".join(lines + ([one] if len(one) <= 100 and not renamed else several))


def double_quoted(text: str) -> str:
    """A text as Python has it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _like_a_hub_name(name: str) -> bool:
    return name.count("/") <= 1 and name[:1] not in {"/", ".", "~"} and not name.endswith("/")


def _one_column(name: str) -> Finding:
    return Finding(
        code="E353",
        what=f"column {name!r} is to be the prompt and the answer",
        expected="two columns",
        fix="--prompt-column NAME --answer-column NAME",
    )


def _unknown_format(data: str) -> Finding:
    return Finding(
        code="E354",
        what=f"no format is known for {data!r}",
        got=f"a file ending in {Path(data).suffix!r}",
        expected=f"a file ending in {' or '.join(READERS)}, or the name of a data set of the hub",
    )


def _no_column(data: str, option: str, column: str, columns: tuple[str, ...]) -> Finding:
    often = tuple(name for name in OFTEN[option] if name in columns)
    near = near_names(column, columns) or often[:1]
    return Finding(
        code="E353",
        what=f"{data} has no column {column!r}",
        got=f"columns {known_names(columns)}",
        expected=f"the one that {option} names",
        near=near,
        fix=f"{option} {near[0] if near else 'NAME'}",
    )
