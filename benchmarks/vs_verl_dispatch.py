"""A batch through a chain of three ops on two Ray workers, beside verl 0.9.1.

    python benchmarks/vs_verl_dispatch.py
    python benchmarks/vs_verl_dispatch.py --quick      a check of the whole path; no results

What the controller pays for a call, how long the chain takes, and what the controller's
memory does as batches grow. Writes benchmarks/results/vs_verl_dispatch.json and .md, anew
after every case.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    RESULTS,
    Environment,
    machine,
    markdown_report,
    markdown_table,
    say,
    script,
    text_table,
    write_results,
)
from gauges import Turn

VERL = Environment(
    name="verl",
    constraints="constraints-verl.txt",
    packages=("--no-deps", "-r", "benchmarks/constraints-verl.txt"),
)
PROMPT, RESPONSE, WORKERS, CALLS = 512, 1024, 2, 3
BYTES_PER_ROW = 2 * 8 * (PROMPT + RESPONSE) + 3 * 4 * RESPONSE
ROWS = 1024
BATCHES_MB = (1, 4, 16, 64, 256)
GAUGES = {
    "controller, CPU a call": ("cpu", CALLS, 0.1),
    "controller, submitting a call": ("submitting", CALLS, 0.1),
    "chain, wall": ("seconds", 1, 0.25),
}
HEADER = ("measured", "verl", "rlflow ms", "verl ms", "ratio", "of pairs", "target", "met")
MEMORY_HEADER = ("batch MB", "rows", "rlflow MB", "verl MB")
NOTES = (
    f"{ROWS} rows x ({PROMPT} prompt + {RESPONSE} response) int64 tokens, an int64 mask over both, "
    f"three float32 columns of {RESPONSE}: {ROWS * BYTES_PER_ROW / 1e6:.1f} MB. Two CPU workers "
    "and every other process on one thread.",
    "Each of three ops gets the whole batch and the column of the op before it, and returns the "
    "mean of two columns. The same numbers on both sides: mean, least and largest value of the "
    "last column are compared.",
    "verl: a RayWorkerGroup, methods with DP_COMPUTE_PROTO. A turn begins with the batch in the "
    "driver's memory, its making is not counted, and ends when the third column is there too. "
    "`union`: as verl's trainer does, every column comes to the driver and joins the batch. "
    "`future`: a column goes to the next call as a DataProtoFuture, the driver waits only for the "
    "last. `numpy`: with VERL_DATAPROTO_SERIALIZATION_METHOD=numpy, which is not the default.",
    "rlflow: the plan of pipelines/dispatch.py, by the executor and the Ray machine. A turn begins "
    "when the controller hears that the batch is made, in the memory of the host worker, a "
    "process of its own; it ends when the third column is back there. The rows' way to the "
    "workers, once an iteration, and the column's way back are actions of their own, and count.",
    f"A call is one of the {CALLS} ops: the controller's figures of a turn over {CALLS}, transfers "
    "included. CPU is that of all threads of the controller's process. Submitting is wall time "
    "that handing a call over keeps the controller's thread: dispatch and serialisation with verl, "
    "the backend's submit with rlflow.",
    "Memory: the most that the controller held during the turns over what it held when the "
    "workers were up, each batch in processes of its own.",
    "ratio: the median over the pairs of (median of rlflow / median of verl). Times are medians "
    "over all measured turns.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way through the chain on verl's side."""

    chain: str
    serialization: str = ""

    @property
    def name(self) -> str:
        """As in the table."""
        return " ".join(filter(None, (self.chain, self.serialization)))


WAYS = (Way(chain="union"), Way(chain="union", serialization="numpy"))
WAYS += (Way(chain="future"), Way(chain="future", serialization="numpy"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How often everything is repeated."""

    pairs: int
    warmup: int
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One process of either side; `column` has mean, least and largest value of the result."""

    turns: tuple[Turn, ...]
    actions: int
    ready_mb: float
    peak_mb: float
    column: tuple[float, float, float]

    @classmethod
    def read(cls, result: Mapping[str, Any]) -> Measured:
        """What a side wrote."""
        return cls(
            turns=tuple(Turn(**turn) for turn in result["turns"]),
            actions=result["actions"],
            ready_mb=result["ready_mb"],
            peak_mb=result["peak_mb"],
            column=(result["mean"], result["min"], result["max"]),
        )

    @property
    def growth(self) -> float:
        """MB that the controller took for the turns."""
        return self.peak_mb - self.ready_mb

    def median(self, gauge: str) -> float:
        """The median turn's seconds of a gauge."""
        return statistics.median(getattr(turn, gauge) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One gauge of paired runs, in seconds a call or a chain."""

    measured: str
    way: str
    ours: float
    theirs: float
    ratios: tuple[float, ...]
    target: float

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def passed(self) -> bool:
        """Whether the ratio meets the target."""
        return self.ratio <= self.target

    def row(self) -> tuple[str, ...]:
        """A line of the table, times in milliseconds."""
        return (
            self.measured,
            self.way,
            f"{self.ours * 1e3:.2f}",
            f"{self.theirs * 1e3:.2f}",
            f"{self.ratio:.3f}",
            f"{min(self.ratios):.3f}..{max(self.ratios):.3f}",
            f"<= {self.target:.2f}",
            "yes" if self.passed else "NO",
        )


def lines(way: str, ours: Sequence[Measured], theirs: Sequence[Measured]) -> list[Line]:
    """Every gauge of pairs of runs."""
    found = []
    for measured, (gauge, parts, target) in GAUGES.items():
        pairs = zip(ours, theirs, strict=True)
        found.append(
            Line(
                measured=measured,
                way=way,
                ours=pooled(ours, gauge) / parts,
                theirs=pooled(theirs, gauge) / parts,
                ratios=tuple(a.median(gauge) / b.median(gauge) for a, b in pairs),
                target=target,
            )
        )
    return found


def pooled(runs: Sequence[Measured], gauge: str) -> float:
    """The median over the turns of all runs."""
    return statistics.median(getattr(turn, gauge) for made in runs for turn in made.turns)


def rows_of(megabytes: float) -> int:
    """As many rows as come closest to a batch of that size, half of them for each worker."""
    return max(round(megabytes * 1e6 / BYTES_PER_ROW / WORKERS), 1) * WORKERS


def check_same(ours: Measured, theirs: Measured) -> None:
    """Raise SystemExit where the two sides did not compute the same column."""
    near = zip(ours.column, theirs.column, strict=True)
    if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in near):
        raise SystemExit(f"the columns differ: rlflow {ours.column}, verl {theirs.column}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Dispatch of a batch beside verl.")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    return parser.parse_args()


def main() -> None:
    """Measure, print the tables, write the results after every case."""
    options = arguments()
    VERL.ensure()
    counts = Counts(pairs=options.pairs, warmup=options.warmup, turns=options.turns)
    sizes: Sequence[int] = BATCHES_MB
    if options.quick:
        counts, sizes = Counts(pairs=1, warmup=1, turns=3), (1, 16)
    facts = machine()
    folder = CACHE / "quick" if options.quick else RESULTS
    report = Report(facts, counts, folder)
    for number in range(counts.pairs):
        say(f"pair {number + 1} of {counts.pairs}")
        report.ours.append(rlflow_side(ROWS, counts))
        for way in WAYS:
            report.theirs[way.name].append(verl_side(way, ROWS, counts))
            check_same(report.ours[-1], report.theirs[way.name][-1])
        report.write()
    few = Counts(pairs=1, warmup=0, turns=min(counts.turns, 8))
    for megabytes in sizes:
        say(f"memory, {megabytes} MB")
        rows = rows_of(megabytes)
        pair = rlflow_side(rows, few), verl_side(WAYS[0], rows, few)
        check_same(*pair)
        report.memory.append((megabytes, rows, *pair))
        report.write()
    print("\n\n".join(text_table(*table) for table in report.tables()))


class Report:
    """What has been measured up to now, as tables and files."""

    def __init__(self, facts: Mapping[str, Any], counts: Counts, folder: Path) -> None:
        self.facts = facts
        self.counts = counts
        self.folder = folder
        self.ours: list[Measured] = []
        self.theirs: dict[str, list[Measured]] = {way.name: [] for way in WAYS}
        self.memory: list[tuple[float, int, Measured, Measured]] = []

    def lines(self) -> list[Line]:
        """Every gauge beside every way, gauge by gauge."""
        found = [line for way, runs in self.theirs.items() for line in lines(way, self.ours, runs)]
        order = list(GAUGES)
        return sorted(found, key=lambda line: order.index(line.measured))

    def tables(self) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
        """Times, and memory where it was measured."""
        times = (HEADER, [line.row() for line in self.lines()])
        grown = [
            (f"{size:g}", str(rows), f"{ours.growth:.1f}", f"{theirs.growth:.1f}")
            for size, rows, ours, theirs in self.memory
        ]
        return [times, (MEMORY_HEADER, grown)] if grown else [times]

    def write(self) -> None:
        """Both files."""
        title = "A batch through three ops on two workers, beside verl 0.9.1"
        parts = [markdown_table(*table) for table in self.tables()]
        page = markdown_report(title, self.facts, parts, NOTES)
        figures = [
            {**asdict(line), "ratio": line.ratio, "passed": line.passed} for line in self.lines()
        ]
        memory = [
            {"mb": size, "rows": rows, "rlflow": asdict(ours), "verl": asdict(theirs)}
            for size, rows, ours, theirs in self.memory
        ]
        data = {
            "machine": self.facts,
            "counts": asdict(self.counts),
            "figures": figures,
            "memory": memory,
            "rlflow": [asdict(made) for made in self.ours],
            "verl": {way: [asdict(made) for made in runs] for way, runs in self.theirs.items()},
        }
        write_results(self.folder, "vs_verl_dispatch", data, page)


def rlflow_side(rows: int, counts: Counts) -> Measured:
    """One process of rlflow."""
    return side("dispatch-rlflow", Path(sys.executable), "dispatch_side.py", rows, counts, {})


def verl_side(way: Way, rows: int, counts: Counts) -> Measured:
    """One process of verl."""
    return side("dispatch-verl", VERL.python, "verl_side.py", rows, counts, asdict(way))


def side(
    name: str, python: Path, file: str, rows: int, counts: Counts, more: Mapping[str, Any]
) -> Measured:
    """Run a script on a spec, and read what it wrote."""
    sizes = {"rows": rows, "prompt": PROMPT, "response": RESPONSE, "workers": WORKERS}
    repeats = {"warmup": counts.warmup, "turns": counts.turns}
    return Measured.read(script(name, python, file, {**sizes, **repeats, **more}))


if __name__ == "__main__":
    main()
