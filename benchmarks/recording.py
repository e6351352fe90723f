"""What the record of a run costs: iterations with the default record and without, in pairs.

    python benchmarks/recording.py

Runs pipelines/grpo_arithmetic.py in this process, on one thread. In each iteration the actions
whose rows a run records by default (rollout, reward, advantage) run twice, one after the other, on
the same rows to the same tokens: with the record and without; which comes first alternates.
Compared are processor seconds of the thread that computes, which hardly depend on what else the
machine does. The thread that writes beside it is added by its own processor seconds, shared by the
iterations; files are written every ten seconds of iterations, as in a run. So the sum is more than
a run waits for. The share is that sum over the iteration without a record. Taking is the mean of
the medians of both orders, with its bootstrap interval. The bar is 1 %. The pipeline's iterations
are as short as any can be (a model of 0.4 M parameters, responses of 4 tokens): the last column
says from which length of an iteration on the same milliseconds meet the bar. Writes
benchmarks/results/recording.json and .md.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    CACHE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    text_table,
    write_results,
)

TARGET = 0.01
HEADER = (
    *("rows", "pairs", "iteration ms", "taking ms", "95 %", "writing ms", "share", "95 %"),
    *("target", "met", "met from ms"),
)
NOTES = (
    "Processor milliseconds. Iteration: without a record, the median. Taking: what the thread that "
    "computes does more. Writing: what the thread that writes has done, by iterations; it works "
    "beside the iterations.",
    "Files are written every ten seconds of iterations, as in a run that has gone on for a minute. "
    "The first file of a run imports pyarrow in the thread that writes, once: it is not counted.",
    "Met from: taking and writing, at the upper end, over the bar: the shortest iteration of which "
    "they are under 1 %, were they as large in it.",
)
WARM = 5
# How long rows wait for those of the next iterations, in a run that has gone on for a while.
FILE_SECONDS = 10.0
RESAMPLES = 2_000


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description="The record's time an iteration.")
    parser.add_argument("--seconds", type=float, default=150.0, help="Of each size.")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--quick", action="store_true", help="small counts, nothing kept")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.prompts = 1.0, [8]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    found = [measured(prompts, options.seconds) for prompts in options.prompts]
    rows = [row(result) for result in found]
    print(text_table(HEADER, rows))
    title = "The default record: an iteration of GRPO with it and without"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows)], NOTES)
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(folder, "recording", {"machine": facts, "sizes": found}, page)


def measured(prompts: int, seconds: float) -> dict[str, Any]:
    """Processor seconds of pairs of iterations of so many prompts, and of the writing thread."""
    from rlflow.cli.commands import Target, compile_target
    from rlflow.runtime.record.edges import recorder as recorders
    from rlflow.runtime.record.edges.choice import recording_of
    from rlflow.runtime.worker.worker import Worker

    pipeline = ROOT / "pipelines" / "grpo_arithmetic.py"
    model = ROOT / "pipelines" / "assets" / "arith-tiny"
    settings = (f"prompts_per_iteration={prompts}", f"eval_every={10**9}", f"model={model}")
    planned = compile_target(Target(pipeline=str(pipeline), settings=settings, threads=1))
    plan, declared = planned.compiled.plan, planned.declared.graph
    actions = [action for action in plan.actions if action.node != "eval"]
    worker = Worker(plan, seed=0, near=pipeline)
    with tempfile.TemporaryDirectory() as folder:
        recording = recording_of(plan.graph, None, Path(folder), 10**12, declared)
        # Files are written when they are asked for.
        recorders.FIRST_SECONDS = recorders.WAIT_SECONDS = 1e9
        warming = recorders.Recorder(recording, plan)
        pairs = Pairs(worker, actions, warming)
        for iteration in range(WARM):
            pairs.run(iteration)
        warming.finish(60.0)
        recorder = recorders.Recorder(recording, plan)
        pairs = Pairs(worker, actions, recorder)
        until = time.monotonic() + seconds
        while time.monotonic() < until or pairs.behind:
            pairs.run(WARM + len(pairs.without))
        written = writing_seconds(recorder, len(pairs.without) * len(recording.chosen))
        recorder.finish(60.0)
    return {
        "prompts": prompts,
        "rows": prompts * 8,
        "iterations": pairs.iterations,
        "without": pairs.without,
        "with": pairs.recorded,
        "writing": written / len(pairs.without),
    }


class Pairs:
    """Iterations in which each action of a recorded node runs twice, with its record and without.

    The numbers are processor seconds of this thread: of whole iterations without a record, and of
    the recorded nodes' actions in both ways. What is read stays until both are done.
    """

    def __init__(self, worker: Any, actions: Sequence[Any], recorder: Any) -> None:
        self.worker, self.actions, self.recorder = worker, actions, recorder
        self.bare = type(recorder)(None, worker.plan)
        self.iterations: list[float] = []
        self.without: list[float] = []
        self.recorded: list[float] = []
        self.waiting = 0.0

    @property
    def behind(self) -> bool:
        """Whether rows wait that a run would write with those of later iterations."""
        return self.waiting > 0

    def run(self, iteration: int) -> None:
        """One iteration; what a run would have written by then is written."""
        recorded = self.recorder._recording.by_node
        sums = [0.0, 0.0, 0.0]
        for action in self.actions:
            if str(action.node) not in recorded:
                sums[2] += self._spent(action, iteration, self.bare)
                continue
            release, self.worker.release = self.worker.release, lambda *_: None
            for place in (0, 1) if iteration % 2 else (1, 0):
                recorder = (self.bare, self.recorder)[place]
                sums[place] += self._spent(action, iteration, recorder)
            self.worker.release = release
            release(action, iteration)
        self.without.append(sums[0])
        self.recorded.append(sums[1])
        self.iterations.append(sums[0] + sums[2])
        self.waiting += self.iterations[-1]
        if self.waiting >= FILE_SECONDS:
            self.recorder.flush()
            self.waiting = 0.0

    def _spent(self, action: Any, iteration: int, recorder: Any) -> float:
        self.worker.recorder = recorder
        began = time.thread_time()
        self.worker.run(action, iteration)
        return time.thread_time() - began


def writing_seconds(recorder: Any, entries: int) -> float:
    """Processor seconds of the thread that writes, once so many entries are written."""
    recorder.flush()
    while recorder.notes().written < entries:
        time.sleep(0.05)
    clock = time.pthread_getcpuclockid(recorder._thread.ident)
    return time.clock_gettime(clock)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    writing, iteration = result["writing"], float(np.median(result["iterations"]))
    more = np.array(result["with"]) - np.array(result["without"])
    # What runs second finds its data in caches: each order has its own median.
    orders = more[0::2], more[1::2]
    taking = float(np.mean([np.median(each) for each in orders]))
    low, high = np.quantile(np.mean([resampled(each) for each in orders], axis=0), (0.025, 0.975))
    share, least, most = ((each + writing) / iteration for each in (taking, low, high))
    return (
        str(result["rows"]),
        str(len(more)),
        f"{iteration * 1e3:.1f}",
        f"{taking * 1e3:.2f}",
        f"{low * 1e3:.2f} to {high * 1e3:.2f}",
        f"{writing * 1e3:.2f}",
        f"{share:.2%}",
        f"{least:.2%} to {most:.2%}",
        f"< {TARGET:.0%}",
        "yes" if most < TARGET else "NO" if least > TARGET else "open",
        f"{(high + writing) / TARGET * 1e3:.0f}",
    )


def resampled(values: Any) -> Any:
    """Medians of bootstrap samples of some values."""
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    return np.median(values[draws], axis=1)


if __name__ == "__main__":
    main()
