"""Whether a pipeline learns alike with SGLang and with the embedded engine.

`pipelines/grpo_arithmetic.py` runs with the same seed, prompts and start under its placements
`split` and `sglang`, which differ in the engine of the rollouts; the samples differ, since SGLang
ignores seeds on a CPU. The curves go to `results/learning/grpo_arithmetic.sglang.json`.

RLFLOW_SGLANG_PYTHON=.venv-sglang/bin/python python benchmarks/learning_sglang.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
from dataclasses import asdict
from typing import Any

from common import CACHE, RESULTS, ROOT, machine, say, text_table
from learning_all import ENDS, PIPELINES, Learned, Series, gathered, run_once, watched

NAME = "grpo_arithmetic"
ENGINES = {"embedded": "split", "sglang": "sglang"}
HEADER = ("engine", "metric", "iterations", "first", "last", "gain")
ALIKE = 2.0


def main() -> None:
    """Run both engines, print the table, write the curves."""
    options = parsed()
    # The interpreter of `make test-sglang`, where none is named.
    os.environ.setdefault("RLFLOW_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
    found = {engine: learned(placement, options) for engine, placement in ENGINES.items()}
    rows = [row for engine, each in found.items() for row in lines(engine, each)]
    print(text_table(HEADER, rows), flush=True)
    apart, error = difference(*(trained(each) for each in found.values()))
    verdict = "alike" if abs(apart) <= ALIKE * error else "APART"
    figures = f"sglang - embedded = {apart:+.3f} +- {ALIKE * error:.3f}"
    print(f"training reward, last {ENDS}: {figures}: {verdict}")
    folder = (CACHE / "quick" if options.quick else RESULTS) / "learning"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.sglang.json"
    ends = {"difference": apart, "standard_error": error, "alike": verdict == "alike"}
    document = {**asdict(found["sglang"]), "embedded": asdict(found["embedded"]), **ends}
    text = json.dumps(document, sort_keys=True)
    path.write_text(text.replace('"machine"', '\n"machine"').replace("[[", "[\n[") + "\n")
    say(f"wrote {path}")


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


def learned(placement: str, options: argparse.Namespace) -> Learned:
    """What one run under a placement has shown."""
    wanted: dict[str, Any] = {
        "backend": "local",
        "placement": placement,
        "seeds": (options.seed,),
        "iterations": options.iterations,
        "digest": hashlib.sha256((PIPELINES / f"{NAME}.py").read_bytes()).hexdigest()[:16],
    }
    facts = machine()
    run = run_once(NAME, options.seed, wanted)
    series = gathered(
        [run], watched(NAME, sorted({key for line in run for key in line["metrics"]}))
    )
    return Learned(pipeline=f"{NAME}, {placement}", **wanted, machine=facts, series=series)


def lines(engine: str, found: Learned) -> list[tuple[str, ...]]:
    """A line of the table for every metric."""
    rows = []
    for each in found.series:
        (first,), (last,) = each.ends()
        gain, _ = each.gain()
        counts = str(len(each.iterations))
        rows.append((engine, each.metric, counts, f"{first:.3f}", f"{last:.3f}", f"{gain:+.3f}"))
    return rows


def trained(found: Learned) -> Series:
    """The reward in training."""
    return next(each for each in found.series if not each.held_out)


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
