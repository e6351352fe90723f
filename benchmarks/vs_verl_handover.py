"""The rows of an engine on their way to a trainer, beside verl 0.9.1's DataProto.

    python benchmarks/vs_verl_handover.py
    python benchmarks/vs_verl_handover.py --quick      a check of the whole path; no results

How many rows a second another process can read, from when an engine has them. Writes
benchmarks/results/vs_verl_handover.json and .md, anew after every case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    say,
    script,
    text_table,
    write_results,
)
from handover_rows import SHORTEST, sums
from vs_verl_dispatch import VERL

ROWS, PROMPT, RESPONSE = 1024, 32, 1024
HEADER = ("responses", "verl", "rlflow rows/s", "verl rows/s", "times", "of pairs")
SERIALIZATIONS = ("", "numpy")
NOTES = (
    f"{ROWS} rows with prompts of {PROMPT} tokens and responses of {RESPONSE} (`equal`), or of "
    f"{SHORTEST} to {RESPONSE}, uniformly (`unequal`). A turn begins when the engine has all of "
    "them as Python lists, and ends when the controller hears that another worker has read "
    "prompts, responses and log-probs: it sums them, and the sums are compared. Every process on "
    "one thread, two workers beside the controller.",
    "rlflow: the plan of pipelines/handover.py, by the executor and the Ray machine. The engine "
    "is a process of its own that answers over the socket as SGLang's does; its worker makes "
    "tensors of the answers, without padding, and a transfer brings the fields that are read. The "
    "prompts are text when a turn begins, and are tokenized within it.",
    "verl: `AgentLoopWorker._agent_loop_postprocess` and `_postprocess` pad the lists and put "
    "them together in a worker, the DataProto comes to the driver and joins its batch by `union`, "
    "a RayWorkerGroup gets it with DP_COMPUTE_PROTO: as its trainer does. The request that verl "
    "makes of its server for each row, one call of Ray each, is left out, and so is tokenizing. "
    "`numpy`: with "
    "VERL_DATAPROTO_SERIALIZATION_METHOD=numpy, which is not the default.",
    "Rows a second of the median turn; `times` is the median over the pairs of rlflow's over "
    "verl's.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often everything is repeated, and with how many rows."""

    pairs: int
    warmup: int
    turns: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One case of paired runs: median seconds of a turn of every run of both sides."""

    responses: str
    serialization: str
    rows: int
    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """How many times as many rows a second rlflow hands over, of every pair."""
        return tuple(b / a for a, b in zip(self.ours, self.theirs, strict=True))

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        rates = (self.rows / statistics.median(each) for each in (self.ours, self.theirs))
        return (
            self.responses,
            self.serialization or "default",
            *(f"{rate:,.0f}" for rate in rates),
            f"{statistics.median(self.ratios):.1f}",
            f"{min(self.ratios):.1f}..{max(self.ratios):.1f}",
        )


def median(result: Mapping[str, Any]) -> float:
    """The median turn's seconds of what a side wrote."""
    return statistics.median(turn["seconds"] for turn in result["turns"])


def check(result: Mapping[str, Any], spec: Mapping[str, Any], side: str) -> None:
    """Raise SystemExit where a side has not read what the engine had."""
    wanted = sums(spec["rows"], spec["response"], ragged=spec["ragged"])
    got = (result["tokens"], result["log_probs"])
    if any(abs(a - b) > 1e-6 * abs(b) for a, b in zip(got, wanted, strict=True)):
        raise SystemExit(f"{side} has read {got}, the engine had {wanted}")


def measured(counts: Counts, report: Report) -> None:
    """All pairs: rlflow once, then verl in each way, of equal and of unequal responses."""
    for number in range(counts.pairs):
        for responses in ("equal", "unequal"):
            say(f"pair {number + 1} of {counts.pairs}, {responses}")
            spec: dict[str, Any] = {
                "workers": 2,
                "rows": counts.rows,
                "prompt": PROMPT,
                "response": RESPONSE,
                "ragged": responses == "unequal",
                "warmup": counts.warmup,
                "turns": counts.turns,
                "tokenizer": str(ROOT / "pipelines" / "assets" / "arith-tiny"),
            }
            ours = script("handover-rlflow", Path(sys.executable), "handover_side.py", spec)
            check(ours, spec, "rlflow")
            for way in SERIALIZATIONS:
                given = {**spec, "serialization": way}
                theirs = script("handover-verl", VERL.python, "verl_handover_side.py", given)
                check(theirs, spec, "verl")
                report.add(responses, way, median(ours), median(theirs))
        report.write()


class Report:
    """What has been measured up to now, as a table and files."""

    def __init__(self, facts: Mapping[str, Any], counts: Counts, folder: Path) -> None:
        self.facts = facts
        self.counts = counts
        self.folder = folder
        self.found: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def add(self, responses: str, way: str, ours: float, theirs: float) -> None:
        """One pair of a case."""
        self.found.setdefault((responses, way), []).append((ours, theirs))

    def lines(self) -> list[Line]:
        """All cases, in the order in which they came."""
        return [
            Line(
                responses=responses,
                serialization=way,
                rows=self.counts.rows,
                ours=tuple(ours for ours, _ in pairs),
                theirs=tuple(theirs for _, theirs in pairs),
            )
            for (responses, way), pairs in self.found.items()
        ]

    def table(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        """The header and a line a case."""
        return HEADER, [line.row() for line in self.lines()]

    def write(self) -> None:
        """Both files."""
        title = "Rows of an engine handed to a trainer, beside verl 0.9.1"
        page = markdown_report(title, self.facts, [markdown_table(*self.table())], NOTES)
        cases = [{**asdict(line), "ratios": line.ratios} for line in self.lines()]
        data = {"machine": self.facts, "counts": asdict(self.counts), "cases": cases}
        write_results(self.folder, "vs_verl_handover", data, page)


def main() -> None:
    """Measure, print the table, write the results after every pair."""
    parser = argparse.ArgumentParser(description="Rows of an engine handed over, beside verl.")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    options = parser.parse_args()
    VERL.ensure()
    counts = Counts(pairs=options.pairs, warmup=options.warmup, turns=options.turns, rows=ROWS)
    if options.quick:
        counts = Counts(pairs=1, warmup=1, turns=3, rows=64)
    report = Report(machine(), counts, CACHE / "quick" if options.quick else RESULTS)
    measured(counts, report)
    print(text_table(*report.table()))


if __name__ == "__main__":
    main()
