"""Whether GRPO learns alike where its rollouts never drain, over several seeds.

`pipelines/async_grpo.py`, whose loss corrects for tokens of older weights, runs synchronously, at
staleness 2 with rollouts that drain, and there with such that never do, with the same seeds,
prompts and start. What older weights cost is the second beside the first.

python benchmarks/learning_continuous.py --seeds 6
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from common import (
    CACHE,
    HERE,
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)
from learning_all import Series, gathered, run_once, watched

NAME = "async_grpo"
FILE = HERE / "learning_continuous_side.py"
SIDES = ("synchronous", "stale", "continuous")
SMALL = ("--set", "prompts_per_iteration=16", "--set", "eval_every=20")
# Student's t of 95 % by degrees of freedom, from the first on; further ones are normal.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NORMAL = 1.96
HEADER = ("rollouts", "metric", "seeds", "iterations", "first", "last", "gain", "beside the first")
NOTES = (
    "First and last are means over the seeds: of an evaluation its first and last value, of what "
    "is logged in every iteration the means of its first and last 10.",
    "`beside the first`: the difference of the last values, seed by seed, and its 95 % interval "
    "by Student's t over the seeds. Alike is a difference whose interval has zero in it.",
    "16 prompts x 8 samples an iteration, two optimizer steps; evaluations decode 512 held-out "
    "problems greedily. Tokens of older weights are weighed by importance sampling, capped at 5.",
)


def main() -> None:
    """Run all, print the table, write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--quick", action="store_true", help="4 iterations; results/ is left alone")
    options = parser.parse_args()
    iterations = min(options.iterations, 4) if options.quick else options.iterations
    facts = machine()
    found = {side: learned(side, range(options.seeds), iterations) for side in SIDES}
    rows = [row for side in SIDES for row in lines(side, found[side], found[SIDES[0]])]
    print(text_table(HEADER, rows), flush=True)
    page = markdown_report(
        "GRPO with rollouts that never drain", facts, [markdown_table(HEADER, rows)], NOTES
    )
    kept = {side: [asdict(each) for each in series] for side, series in found.items()}
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(folder, "learning_continuous", {"machine": facts, "runs": kept}, page)


def learned(side: str, seeds: Sequence[int], iterations: int) -> tuple[Series, ...]:
    """What the runs of a side have shown."""
    wanted: dict[str, Any] = {"backend": "local", "placement": side, "iterations": iterations}
    say(side)
    runs = [run_once(NAME, seed, wanted, file=FILE, more=SMALL) for seed in seeds]
    logged = sorted({key for line in runs[0] for key in line["metrics"]})
    return gathered(runs, watched(NAME, logged))


def lines(side: str, found: Sequence[Series], others: Sequence[Series]) -> list[tuple[str, ...]]:
    """A line of the table for every metric."""
    rows = []
    for each, other in zip(found, others, strict=True):
        first, last = (statistics.fmean(values) for values in each.ends())
        apart = ""
        if each is not other:
            by, reach = difference(other, each)
            apart = f"{by:+.3f} +- {reach:.3f}"
        counts = (str(len(each.values)), str(len(each.iterations)))
        numbers = (f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}")
        rows.append((side, each.metric, *counts, *numbers, apart))
    return rows


def difference(one: Series, other: Series) -> tuple[float, float]:
    """By how much the other's last values are higher, seed by seed, and half its interval."""
    pairs = zip(one.ends()[1], other.ends()[1], strict=True)
    apart = [second - first for first, second in pairs]
    if len(apart) == 1:
        return apart[0], math.nan
    freedom = len(apart) - 1
    times = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL
    return statistics.fmean(apart), times * statistics.stdev(apart) / math.sqrt(len(apart))


if __name__ == "__main__":
    main()
