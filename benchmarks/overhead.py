"""What the controller costs: an iteration of the GRPO graph whose actions do nothing.

    python benchmarks/overhead.py

Compiles pipelines/grpo_arithmetic.py and lets the executor and the local backend run it with
a worker that returns at once. Milliseconds of an iteration, for every placement; the target
is under 1 ms. Writes benchmarks/results/overhead.json and .md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from common import (
    CACHE,
    RESULTS,
    ROOT,
    between,
    machine,
    markdown_report,
    markdown_table,
    read_jsonl,
    text_table,
    write_results,
)
from sides import iteration_ends
from virtual_clock import Ends

if TYPE_CHECKING:
    from rlflow.runtime.worker.worker import Result, Worker
    from rlflow.scheduler.plan.plan import Action, Plan

TARGET = 1e-3
HEADER = ("placement", "actions", "median ms", "p95 ms", "us an action", "target", "met")
NOTES = (
    "Bodies do nothing: the event loop, the queues and the threads remain. Recorded: with all that "
    "a run writes as well (spans, metrics, TensorBoard events), each action with one metric.",
    "The reference is kept in the graph by kl_coef=0.04, so this is the whole GRPO graph.",
)


class Nothing:
    """A worker whose actions are done at once."""

    world = None

    def __init__(self, plan: Plan) -> None:
        from rlflow.runtime.record.edges.recorder import Recorder
        from rlflow.runtime.worker.node_states import NodeStates
        from rlflow.runtime.worker.store import ShardStore

        self.plan = plan
        self.store, self.states = ShardStore(), NodeStates()
        self.recorder = Recorder(None, plan)

    def run(self, action: Action, iteration: int) -> Mapping[str, float]:
        """One number, so that there is something to record."""
        return {"mean": 0.0}

    def perform(self, action: Action, iteration: int) -> Result:
        """The same, as what a worker of rows answers."""
        from rlflow.runtime.worker.worker import Result

        return Result(metrics=self.run(action, iteration))

    def skip(self, action: object, iteration: int) -> None:
        """No rows to let go of."""

    def drop_surplus(self) -> None:
        """Nothing is left over."""

    def close(self) -> None:
        """Nothing runs beside it."""

    def trained(self) -> list[Any]:
        """No weights to save."""
        return []


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
    found = []
    for placement in ("colocate", "split"):
        plan = compiled(placement)
        total = options.iterations + options.warmup
        for name, ends in (
            (placement, bare_ends(plan, total)),
            (f"{placement}, recorded", recorded_ends(plan, total)),
        ):
            found.append(figures(name, plan, between(ends, options.warmup)))
    rows = [row(result) for result in found]
    print(text_table(HEADER, rows))
    title = "Controller: an iteration of the GRPO graph with empty bodies"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows)], NOTES)
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(folder, "overhead", {"machine": facts, "placements": found}, page)


def compiled(placement: str) -> Plan:
    """The plan of a placement, evaluation but at the ends left out."""
    from rlflow.cli.commands import Target, compile_target

    model = ROOT / "pipelines" / "assets" / "arith-tiny"
    target = Target(
        pipeline=str(ROOT / "pipelines" / "grpo_arithmetic.py"),
        placement=placement,
        settings=("kl_coef=0.04", f"eval_every={10**9}", f"model={model}"),
        threads=1,
    )
    return compile_target(target).compiled.plan


def bare_ends(plan: Plan, total: int) -> list[float]:
    """When every iteration ended, in seconds; executor and backend alone."""
    from rlflow.runtime.execute.executor import Executor
    from rlflow.runtime.local import LocalBackend

    backend = LocalBackend(plan, Nothing(plan), threads=1, now=time.perf_counter)
    ends = Ends(time.perf_counter)
    try:
        Executor(plan, backend, ends, start=0, end=total, barrier=total).run()
    finally:
        backend.close()
    return ends.ends[:total]


def recorded_ends(plan: Plan, total: int) -> list[float]:
    """The same of a whole run, which writes what every run writes."""
    from rich.console import Console

    from rlflow.runtime.display import Display
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.record.rundir import RunDir
    from rlflow.runtime.run import Run, Settings

    path = CACHE / "runs" / "overhead"
    shutil.rmtree(path, ignore_errors=True)
    settings = Settings(seed=0, iterations=total, threads=1, save_every=total)
    display = Display(Console(stderr=True), quiet=True)
    with RunDir.create(path, plan.graph.name, pipeline="overhead", command=["overhead"]) as made:
        machine = LocalMachine(plan, cast("Worker", Nothing(plan)), threads=1)
        Run(plan, settings, machine, made, display).execute()
    return iteration_ends(read_jsonl(path / "spans" / "main.jsonl"))[:total]


def figures(name: str, plan: Plan, seconds: Sequence[float]) -> dict[str, Any]:
    """What the table and the file hold."""
    ordered = sorted(seconds)
    return {
        "placement": name,
        "actions": len(plan.actions),
        "iterations": len(ordered),
        "median_seconds": statistics.median(ordered),
        "p95_seconds": ordered[int(0.95 * len(ordered))],
        "passed": statistics.median(ordered) < TARGET,
    }


def row(result: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    middle = result["median_seconds"]
    return (
        result["placement"],
        str(result["actions"]),
        f"{middle * 1e3:.3f}",
        f"{result['p95_seconds'] * 1e3:.3f}",
        f"{middle * 1e6 / result['actions']:.0f}",
        f"< {TARGET * 1e3:.0f} ms",
        "yes" if result["passed"] else "NO",
    )


if __name__ == "__main__":
    main()
