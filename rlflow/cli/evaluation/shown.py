"""What an evaluation found: as a table for a terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlflow.cli.evaluation.declared import COUNTED, Counted
from rlflow.cli.evaluation.terms import Terms
from rlflow.graph.callables import name_of
from rlflow.ops.evaluating.passing import ANSWERS, DRAWS, HIGH, LEVEL, LOW, whole_response


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation that was run: of what, on which terms, where it is, its metrics by name."""

    weights: str
    checkpoint: Path | None
    terms: Terms
    counted: Counted
    seed: int
    run_dir: Path
    metrics: Mapping[str, float]

    def number(self, name: str) -> float:
        """A number of the node that counts."""
        return self.metrics[f"{COUNTED}/{name}"]

    def interval(self, name: str) -> tuple[float, float, float]:
        """A number with the ends of its interval."""
        return self.number(name), self.number(name + LOW), self.number(name + HIGH)

    def sampled(self, name: str) -> float | None:
        """A number of the rollout, where it has it."""
        return self.metrics.get(f"{self.terms.model.name}.rollout/{name}")

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens were drawn: temperature, nucleus, longest response."""
        said = self.terms.sampling
        names = ("temperature", "top_p", "top_k", "max_new_tokens")
        found = {"temperature": 1.0, "top_p": 1.0, **said}
        return {name: found[name] for name in names if name in found}

    def as_json(self) -> dict[str, Any]:
        """Plain data; an interval is `low` and `high` beside its `value`."""
        names = ["mean", *(f"{of}@{k}" for of in ("pass", "maj") for k in self.counted.ks)]
        parts = ("value", "low", "high")
        found = {name: dict(zip(parts, self.interval(name), strict=True)) for name in names}
        return {
            "weights": self.weights,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "data": self.terms.data.describe(),
            "prompts": int(self.number("prompts")),
            "samples": self.counted.n,
            "sampling": {**self.sampling, "seed": self.seed},
            "passes": self.counted.rule.describe(),
            "votes": name_of(self.counted.answer),
            "interval": {"level": LEVEL, "draws": DRAWS, "over": "prompts"},
            "metrics": found,
            "length": self.sampled("length"),
            "finished": self.sampled("finished"),
            "run_dir": str(self.run_dir),
        }


def evaluated_table(found: Evaluated) -> RenderableType:
    """What was evaluated and how, then a row for each k."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("k", "pass@k", "", "maj@k", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for k in found.counted.ks:
        cells = [_cells(*found.interval(f"{of}@{k}")) for of in ("pass", "maj")]
        table.add_row(str(k), *cells[0], *cells[1])
    value, interval = _cells(*found.interval("mean"))
    mean = Text.assemble((f"mean reward {value} ", "bold"), interval, _ended(found))
    return Group(*(Text(line, style="dim") for line in _lines(found)), "", mean, "", table)


def _ended(found: Evaluated) -> str:
    length, finished = found.sampled("length"), found.sampled("finished")
    if length is None or finished is None:
        return ""
    return f"   {length:.4g} tokens on average, {finished:.1%} ended by themselves"


def _lines(found: Evaluated) -> list[str]:
    sampling = ", ".join(f"{k} {v:g}" for k, v in {**found.sampling, "seed": found.seed}.items())
    answer, n = found.counted.answer, found.counted.n
    known = next((name for name, each in ANSWERS.items() if each is answer), name_of(answer))
    votes = "whole responses (--answer)" if answer is whole_response else known
    return [
        found.weights,
        f"{found.number('prompts'):,.0f} prompts x {n} sample{'s' if n > 1 else ''}   "
        f"{found.terms.data.describe()}",
        f"sampling: {sampling}",
        f"right: {found.counted.rule.describe()}   votes: {votes}   "
        f"[{LEVEL:.0%} by {DRAWS:,} bootstraps over prompts]",
    ]


def _cells(value: float, low: float, high: float) -> tuple[str, str]:
    return f"{value:.4f}", f"[{low:.4f}, {high:.4f}]"
