"""What runs of `pipelines/tails.py` count, in tokens and rows, beside what was predicted of it.

What `balance.py` and `oversample.py` share. Lengths are log-normal, up to eight means. What is
counted follows from the tokens, so no clock and no other work on the machine changes it. The
prediction knows the distribution alone, as plans do.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from common import (
    CACHE,
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    read_jsonl,
    rlflow,
    run,
    say,
    text_table,
    write_results,
)
from prediction import model_directory
from virtual_clock import PIPELINE, WIDTHS

GROUPS, N = 16, 4
CLOSE = 0.10
Found: TypeAlias = Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """A comparison of what is counted with what is predicted, by a number that a run is given.

    `table` makes the rows of what was found, and the largest error as a share; `of` names it.
    """

    name: str
    title: str
    header: Sequence[str]
    notes: Sequence[str]
    cases: Mapping[int, str]
    measured: Callable[[int, int], Mapping[str, Sequence[float]]]
    predicted: Callable[[int], Mapping[str, float]]
    table: Callable[[Found], tuple[list[list[str]], float]]
    of: str = ""

    def report(self, found: Found, facts: Mapping[str, Any], folder: Path) -> None:
        """Print the table, and write it."""
        rows, worst = self.table(found)
        print(text_table(self.header, rows))
        reached = "met" if worst <= CLOSE else "NOT met"
        end = f"the prediction{self.of} is off by {worst:.1%} at the most "
        end += f"(target {CLOSE:.0%}: {reached})"
        print(end)
        parts = [markdown_table(self.header, rows), end]
        page = markdown_report(self.title, facts, parts, self.notes)
        write_results(folder, self.name, {"machine": facts, "found": dict(found)}, page)

    def main(self, iterations: int, words: Sequence[str] | None = None) -> None:
        """Count in every case."""
        parser = argparse.ArgumentParser(description=self.title)
        parser.add_argument("--iterations", type=int, default=iterations)
        parser.add_argument("--results", type=Path, default=RESULTS)
        given = parser.parse_args(words)
        facts = machine()
        found = {}
        for case, said in self.cases.items():
            say(said)
            counted = self.measured(case, given.iterations)
            found[case] = {"measured": counted, "predicted": self.predicted(case)}
        self.report(found, facts, given.results)


def rollouts(
    name: str, settings: Mapping[str, int], placement: str, devices: str, iterations: int
) -> list[dict[str, float]]:
    """What the rollout of every iteration of a run has logged, all of whose rows have ended."""
    directory = CACHE / "runs" / name
    shutil.rmtree(directory, ignore_errors=True)
    given = {"model": model_directory(WIDTHS, "2x128-long"), "group_size": N} | dict(settings)
    words: list[str | Path] = [rlflow(), "run", PIPELINE, "--placement", placement, "-q"]
    words += ["--devices", devices, "--threads", "1", "--iterations", str(iterations)]
    words += ["--run-dir", directory]
    words += [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    run(words, CACHE / "logs" / f"{name}.log")
    lines = [line["metrics"] for line in read_jsonl(directory / "metrics.jsonl")]
    rows = [line for line in lines if "actor.rollout/length" in line]
    assert len(rows) == iterations
    assert all(row["actor.rollout/finished"] == 1 for row in rows)
    return rows


def means(each: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Means over the iterations of what was counted."""
    return {name: statistics.fmean(each["measured"][name]) for name in names}
