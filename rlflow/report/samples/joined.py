"""Recorded edges of the same rows beside each other: one sample a row, read field by field."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, RunDirError, near_names
from rlflow.runtime.record.edges.reading import about, read_edge, recorded

RESPONSE, PROMPT = "response_tokens", "prompt_tokens"
LOG_PROBS = ("rollout_log_probs", "old_log_probs")


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One row of an iteration, with the fields of all edges that have it.

    `tables` are the edges with the row's place in each; fields of the first one win.
    """

    iteration: int
    row: int
    tables: tuple[tuple[Any, int], ...]

    def value(self, field: str) -> Any:
        """A field's value: a number, a truth value, text, or a list of one a token; else None."""
        for table, place in self.tables:
            if field in table.column_names:
                return table.column(field)[place].as_py()
        return None

    def fields(self) -> list[str]:
        """The names of its fields, each once."""
        names = (name for table, _ in self.tables for name in table.column_names)
        return [name for name in dict.fromkeys(names) if name != "row"]

    @property
    def group(self) -> int | None:
        """The number of its group, where that is recorded."""
        found = self.value("group")
        return None if found is None else int(found)

    @property
    def length(self) -> int | None:
        """Tokens of the response; None where they are not recorded."""
        found = self.value(RESPONSE)
        return None if found is None else len(found)

    @property
    def ended(self) -> str:
        """How the response ended: `end` by itself, `cut` at its longest length, "" if unknown."""
        finished, cut = self.value("finished"), self.value("truncated")
        if finished is None and cut is None:
            return ""
        return "cut" if cut or finished is False else "end"

    @property
    def gap(self) -> float | None:
        """The mean of trainer's minus sampler's log-probs, nats a token; None without both."""
        sampled, trained = (self.value(name) for name in LOG_PROBS)
        if not sampled or not trained or len(sampled) != len(trained):
            return None
        return float(sum(trained) - sum(sampled)) / len(sampled)

    def number(self, key: str) -> float | None:
        """What samples are sorted by: a field of one number, or a word such as `length`."""
        words = {"iteration": self.iteration, "row": self.row, "length": self.length}
        words |= {"group": self.group}
        if key == "gap":
            return self.gap
        found = words[key] if key in words else self.value(_FIELDS.get(key, key))
        if isinstance(found, list) and key in ("version", "advantage", "advantages") and found:
            found = sum(found) / len(found)
        return float(found) if isinstance(found, int | float) else None

    def per_token(self, what: str) -> list[float] | None:
        """A number for each token of the response: advantage, log-prob, ratio, entropy.

        One advantage of the row holds for each of its tokens. None where it is not recorded.
        """
        count = self.length or 0
        if what == "ratio":
            sampled, trained = (self.value(name) for name in LOG_PROBS)
            if not sampled or not trained or len(sampled) != len(trained):
                return None
            return [math.exp(min(b - a, 50.0)) for a, b in zip(sampled, trained, strict=True)]
        found = self.value(TOKEN_FIELDS[what])
        if isinstance(found, float):
            return [found] * count
        return found if isinstance(found, list) and len(found) == count else None

    def as_json(self) -> dict[str, Any]:
        """Everything that is recorded of it, plainly."""
        values = {name: _plain(self.value(name)) for name in self.fields()}
        return {"iteration": self.iteration, "row": self.row, **values}


_FIELDS = {"advantage": "advantages"}
# What tokens are coloured by, and the field that has it; the ratio is of two.
TOKEN_FIELDS = {
    "advantage": "advantages",
    "log-prob": "rollout_log_probs",
    "ratio": "old_log_probs",
    "entropy": "entropy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples of a run, of the node that numbers their rows.

    `totals` has the rows that there were in each iteration, recorded or not.
    """

    run: Path
    node: str
    samples: Sequence[RecordedSample]
    totals: dict[int, int]
    edges: tuple[str, ...]


def load_samples(run: Path, node: str | None, iterations: Collection[int] | None) -> Samples:
    """The samples of some iterations, None for all; of a node's rows, None for the rollout's.

    An iteration that is being written or was dropped meanwhile is left out. Raises RunDirError
    E734 where nothing is recorded, or nothing of that node or those iterations.
    """
    known = recorded(run)
    if not known:
        raise RunDirError(_nothing(run))
    wanted = {n for found in known.values() for n in found}
    wanted = wanted if iterations is None else wanted & set(iterations)
    if not wanted:
        raise RunDirError(_no_iteration(run, known))
    tables: dict[int, dict[str, Any]] = {}
    for edge, found in known.items():
        for iteration in sorted(wanted.intersection(found)):
            try:
                tables.setdefault(iteration, {})[edge] = read_edge(run, edge, iteration)
            except RunDirError:
                continue
    chosen = node or _rollout(tables)
    numbered = {about(t).rows_of or name for each in tables.values() for name, t in each.items()}
    if chosen not in numbered:
        raise RunDirError(_no_node(run, str(chosen), numbered))
    return _joined(run, str(chosen), tables)


def _rollout(tables: dict[int, dict[str, Any]]) -> str:
    """The node whose rows are looked at: the first one with responses, else the first."""
    names: dict[str, bool] = {}
    for found in tables.values():
        for edge, table in found.items():
            name = about(table).rows_of or edge
            has = bool({RESPONSE, "response"} & set(table.column_names))
            names[name] = names.get(name, False) or has
    return next((name for name, has in names.items() if has), next(iter(names), ""))


def _joined(run: Path, node: str, tables: dict[int, dict[str, Any]]) -> Samples:
    found: list[RecordedSample] = []
    totals: dict[int, int] = {}
    edges: dict[str, None] = {}
    for iteration, each in sorted(tables.items()):
        mine = {e: t for e, t in each.items() if (about(t).rows_of or e) == node}
        ordered = dict(sorted(mine.items(), key=lambda item: item[0] != node))
        edges |= dict.fromkeys(ordered)
        places: dict[int, list[tuple[Any, int]]] = {}
        for table in ordered.values():
            totals[iteration] = max(totals.get(iteration, 0), about(table).total)
            for place, row in enumerate(table.column("row").to_pylist()):
                places.setdefault(row, []).append((table, place))
        found += [RecordedSample(iteration, row, tuple(at)) for row, at in sorted(places.items())]
    return Samples(run=run, node=node, samples=found, totals=totals, edges=tuple(edges))


def _plain(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite as text."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _nothing(run: Path) -> Finding:
    return Finding(
        code="E734",
        what=f"{run} has no recorded rows",
        got="it ran with --record none or an earlier version, or has not rolled out yet",
        fix="rlflow run PIPELINE   records 8 groups of each iteration unless told otherwise",
    )


def _no_iteration(run: Path, known: dict[str, list[int]]) -> Finding:
    numbers = sorted({n for found in known.values() for n in found})
    got = f"{len(numbers)} iterations from {numbers[0]} to {numbers[-1]}"
    what = f"{run} has no recorded rows of those iterations"
    return Finding(code="E734", what=what, got=got, fix=f"--iteration {numbers[-1]}")


def _no_node(run: Path, node: str, numbered: Collection[str]) -> Finding:
    return Finding(
        code="E734",
        what=f"{run} has no recorded rows that {node!r} numbers",
        expected=", ".join(sorted(numbered)),
        near=near_names(node, numbered),
    )
