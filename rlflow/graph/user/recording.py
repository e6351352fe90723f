"""What a user says of a record: `actor.rollout=every:10`, a node and how much of what it makes.

Nothing here changes a plan: recording is no action, and a graph with it computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.errors import Finding, RlflowError, Source

NO_RECORD = "none"
DEFAULT_GROUPS = 8
PART = re.compile(r"(every|first|rows):([1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRule:
    """How much of a node's output is recorded.

    Every so many iterations; then all rows, those of the `first` groups, or so many first `rows`.
    """

    edge: str
    every: int = 1
    first: int | None = None
    rows: int | None = None

    def __str__(self) -> str:
        parts = {"every": self.every if self.every > 1 else None}
        parts |= {"first": self.first, "rows": self.rows}
        said = ",".join(f"{name}:{count}" for name, count in parts.items() if count is not None)
        return f"{self.edge}={said}" if said else self.edge


def read_rules(
    said: str | Sequence[str], error: type[RlflowError], where: Source | None = None
) -> tuple[RecordRule, ...] | None:
    """The rules that texts say; None where nothing is said, no rule where `none` is.

    Raises `error` E318 for what is no rule, with the line that says it.
    """
    texts = [said] if isinstance(said, str) else list(said)
    if not texts:
        return None
    if NO_RECORD in texts:
        if len(texts) > 1:
            what = "the record is turned off by 'none', and rows are to be recorded"
            got = ", ".join(map(str, texts))
            raise error(Finding(code="E318", what=what, where=where, got=got, fix="leave out one"))
        return ()
    return tuple(_read(str(text), error, where) for text in texts)


def _read(text: str, error: type[RlflowError], where: Source | None) -> RecordRule:
    edge, equals, said = text.partition("=")
    parts = [PART.fullmatch(part.strip()) for part in said.split(",")] if equals else []
    counts = {match[1]: int(match[2]) for match in parts if match}
    clash = {"first", "rows"} <= counts.keys()
    if not edge or None in parts or clash or len(counts) < len(parts):
        raise error(
            Finding(
                code="E318",
                what=f"{text!r} does not say what to record",
                where=where,
                expected="NODE, or NODE= and every:N (iterations), first:N (groups) or rows:N; "
                "every:N may go with one of the others; or none",
                fix=f"{edge or 'actor.rollout'}=every:10,first:8",
            )
        )
    return RecordRule(edge=edge, **counts)
