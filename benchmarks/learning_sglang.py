"""Whether GRPO learns alike with SGLang and with the embedded engine, wherever SGLang runs.

`pipelines/grpo_arithmetic.py` runs with the same seed, prompts and start: with the embedded engine,
and with SGLang split and colocated (there its pool sleeps during the update), in this process and
on Ray. The samples differ, since SGLang ignores seeds on a CPU.

RLFLOW_SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/learning_sglang.py
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from common import (
    CACHE,
    HERE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)
from learning_all import ENDS, Series, gathered, run_once, watched

NAME = "grpo_arithmetic"
FILE = HERE / "learning_sglang_side.py"
HEADER = ("engine", "metric", "iterations", "first", "last", "gain", "beside embedded")
ALIKE = 2.0
TIGHT = ("--devices", "cpu:1@45MB")
NOTES = (
    f"One seed. `first` and `last` are means of {ENDS} iterations, of an evaluation its first and "
    "its last one.",
    "`beside embedded`: the difference of the last rewards in training from those of the embedded "
    f"engine, and {ALIKE:g} times its standard error.",
    "Colocated, a device has 45 MB: the pool of SGLang sleeps while the update runs.",
    "`log-probs`: the largest difference in the first iteration between what was sampled with and "
    "what the trainer computes of the same tokens.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Where SGLang runs: a placement, a backend, and what else is said."""

    name: str
    placement: str
    backend: str = "local"
    more: tuple[str, ...] = ()


WAYS = (
    Way(name="embedded", placement="embedded"),
    Way(name="SGLang, split", placement="split"),
    Way(name="SGLang, split, Ray", placement="split", backend="ray"),
    Way(name="SGLang, colocated", placement="colocated", more=TIGHT),
    Way(name="SGLang, colocated, Ray", placement="colocated", backend="ray", more=TIGHT),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a run has shown: rewards by iteration, and how far log-probs are apart at its start."""

    way: Way
    series: tuple[Series, ...]
    gap: float


def main() -> None:
    """Run all, print the table, write the curves."""
    options = parsed()
    # The interpreter of `make test-sglang`, where none is named.
    os.environ.setdefault("RLFLOW_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
    facts = machine()
    found = [learned(way, options) for way in WAYS]
    rows = [row for each in found for row in lines(each, found[0])]
    print(text_table(HEADER, rows), flush=True)
    gaps = [(each.way.name, f"{each.gap:.1e}") for each in found]
    tables = [markdown_table(HEADER, rows), markdown_table(("engine", "log-probs"), gaps)]
    page = markdown_report("GRPO with SGLang beside the embedded engine", facts, tables, NOTES)
    ran = {"iterations": options.iterations, "seed": options.seed}
    data = {"machine": facts, "options": ran, "runs": [asdict(each) for each in found]}
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(folder, "learning_sglang", data, page)


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="4 iterations; results/ is left alone")
    options = parser.parse_args()
    if options.quick:
        options.iterations = min(options.iterations, 4)
    return options


def learned(way: Way, options: argparse.Namespace) -> Learned:
    """What one run has shown."""
    wanted: dict[str, Any] = {
        "backend": way.backend,
        "placement": way.placement,
        "iterations": options.iterations,
    }
    say(way.name)
    run = run_once(NAME, options.seed, wanted, file=FILE, more=way.more)
    logged = sorted({key for line in run for key in line["metrics"]})
    (gap,) = (value for key, value in run[0]["metrics"].items() if key.endswith("rollout_gap_max"))
    return Learned(way=way, series=gathered([run], watched(NAME, logged)), gap=gap)


def lines(found: Learned, embedded: Learned) -> list[tuple[str, ...]]:
    """A line of the table for every metric."""
    rows = []
    for each, other in zip(found.series, embedded.series, strict=True):
        (first,), (last,) = each.ends()
        gain, _ = each.gain()
        apart = ""
        if not each.held_out and found is not embedded:
            by, error = difference(other, each)
            apart = f"{by:+.3f} +- {ALIKE * error:.3f}"
        counts = str(len(each.iterations))
        numbers = (f"{first:.3f}", f"{last:.3f}", f"{gain:+.3f}")
        rows.append((found.way.name, each.metric, counts, *numbers, apart))
    return rows


def difference(embedded: Series, other: Series) -> tuple[float, float]:
    """By how much the other's last rewards are higher, and the standard error of that.

    The error is that of two means of an iteration's rewards, which go up and down by themselves.
    """
    ends = [each.values[0][-ENDS:] for each in (embedded, other)]
    apart = statistics.fmean(ends[1]) - statistics.fmean(ends[0])
    spread = [statistics.variance(end) / len(end) if len(end) > 1 else math.nan for end in ends]
    return apart, math.sqrt(sum(spread))


if __name__ == "__main__":
    main()
