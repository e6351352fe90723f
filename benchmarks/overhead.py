"""What the controller costs: an iteration of the GRPO graph whose actions do nothing.

    python benchmarks/overhead.py

Compiles pipelines/grpo_arithmetic.py and lets the executor and the local backend run it with
a worker that returns at once. Milliseconds of an iteration, for every placement; the target
is under 1 ms. Writes benchmarks/results/overhead.json and .md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    RESULTS,
    ROOT,
    between,
    machine,
    markdown_report,
    markdown_table,
    text_table,
    write_results,
)

TARGET = 1e-3
HEADER = ("placement", "actions", "median ms", "p95 ms", "us an action", "target", "met")
NOTES = (
    "Bodies, metrics and spans are left out: the event loop, the queues and the threads remain.",
    "The reference is kept in the graph by kl_coef=0.04, so this is the whole GRPO graph.",
)


class Nothing:
    """A worker whose actions are done at once."""

    def run(self, action: object, iteration: int) -> Mapping[str, float]:
        """No numbers."""
        return {}


class Ends:
    """Notes when every iteration was done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def started(self, action: object, iteration: int) -> None:
        """Not needed here."""

    def finished(self, action: object, completion: object) -> None:
        """Not needed here."""

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The clock is read here."""
        self.times.append(time.perf_counter())


def main() -> None:
    """Measure every placement, print the table, write the results."""
    parser = argparse.ArgumentParser(description="The controller's time an iteration.")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    options = parser.parse_args()
    if options.quick:
        options.iterations, options.warmup = 200, 20
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    found = [
        measured(placement, options.iterations, options.warmup)
        for placement in ("colocate", "split")
    ]
    rows = [row(result) for result in found]
    print(text_table(HEADER, rows))
    title = "Controller: an iteration of the GRPO graph with empty bodies"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows)], NOTES)
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(folder, "overhead", {"machine": facts, "placements": found}, page)


def measured(placement: str, iterations: int, warmup: int) -> dict[str, Any]:
    """Run one placement; its seconds, sorted."""
    from rlflow.commands import Target, compile_target
    from rlflow.runtime.executor import Executor
    from rlflow.runtime.local import LocalBackend

    pipeline = str(ROOT / "pipelines" / "grpo_arithmetic.py")
    settings = ("kl_coef=0.04", f"eval_every={iterations * 10}", f"model={model_directory()}")
    target = Target(pipeline=pipeline, placement=placement, settings=settings, threads=1)
    plan = compile_target(target).compiled.plan
    backend = LocalBackend(plan, Nothing(), threads=1, now=time.perf_counter)
    ends = Ends()
    total = iterations + warmup
    try:
        Executor(plan, backend, ends, start=0, end=total, barrier=total).run()
    finally:
        backend.close()
    seconds = sorted(between(ends.times[:total], warmup))
    return {"placement": placement, "actions": len(plan.actions), "seconds": seconds}


def model_directory() -> Path:
    """Where the pipeline's own model is."""
    return ROOT / "pipelines" / "assets" / "arith-tiny"


def row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    seconds: Sequence[float] = result["seconds"]
    middle = statistics.median(seconds)
    late = seconds[int(0.95 * len(seconds))]
    return (
        result["placement"],
        str(result["actions"]),
        f"{middle * 1e3:.3f}",
        f"{late * 1e3:.3f}",
        f"{middle * 1e6 / result['actions']:.0f}",
        f"< {TARGET * 1e3:.0f} ms",
        "yes" if middle < TARGET else "NO",
    )


if __name__ == "__main__":
    main()
