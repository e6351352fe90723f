"""What the record of a run costs: iterations with the default record and without, in pairs.

    python benchmarks/recording.py

Runs pipelines/grpo_arithmetic.py in this process, one thread, and records every second iteration
as a run by default records each: a pair is an iteration without a record and the next one with
it. Compared are processor seconds, those of the thread that computes and, beside them, those of
the thread that writes, shared by the iterations that are recorded. They hardly depend on what
else the machine does, and are more than what a run waits, for the thread writes beside it. The
share is the median over the pairs; the bar is 1 %. The pipeline's own iteration is as short as
any can be (a model of 0.4 M parameters, responses of 4 tokens), so the milliseconds say more.
Writes benchmarks/results/recording.json and .md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

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
    *("rows", "pairs", "without ms", "taking ms", "quartiles ms", "writing ms", "more ms"),
    *("share", "target", "met"),
)
NOTES = (
    "Processor milliseconds an iteration. Taking is what the thread that computes does more, the "
    "median of the pairs; writing is what the thread that writes has done, by iterations.",
    "Files are waited for twice as long as in a run, since half of the iterations are recorded.",
)


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description="The record's time an iteration.")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64])
    parser.add_argument("--quick", action="store_true", help="small counts, nothing kept")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.prompts = 4, [8]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    found = [measured(prompts, options.pairs) for prompts in options.prompts]
    rows = [row(result) for result in found]
    print(text_table(HEADER, rows))
    title = "The default record: an iteration of GRPO with it and without"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows)], NOTES)
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(folder, "recording", {"machine": facts, "sizes": found}, page)


def measured(prompts: int, pairs: int) -> dict[str, Any]:
    """Processor seconds of iterations of so many prompts, and of the thread that writes."""
    from rlflow.cli.commands import Target, compile_target
    from rlflow.errors import UsageError
    from rlflow.graph.user.recording import read_rules
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
    recorders.WAIT_SECONDS *= 2

    def seconds(iteration: int) -> float:
        began = time.thread_time()
        for action in actions:
            worker.run(action, iteration)
        return time.thread_time() - began

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        default = recording_of(plan.graph, None, run, 10**12, declared)
        said = read_rules([f"{rule},every:2" for rule in default.rules()], UsageError)
        recording = recording_of(plan.graph, said, run, 10**12, declared)
        # The first file takes half a second for imports, once a run.
        worker.recorder = recorders.Recorder(recording, plan)
        for iteration in range(5):
            seconds(iteration)
        worker.recorder.finish(60.0)
        # Later files wait for the longest time, also in a run.
        recorders.FIRST_SECONDS = recorders.WAIT_SECONDS
        recorder = worker.recorder = recorders.Recorder(recording, plan)
        found = [(seconds(2 * pair + 5), seconds(2 * pair + 6)) for pair in range(pairs)]
        written = writing_seconds(recorder, pairs * len(recording.chosen))
        recorder.finish(60.0)
    return {
        "prompts": prompts,
        "rows": prompts * 8,
        "without": [bare for bare, _ in found],
        "with": [recorded for _, recorded in found],
        "writing": written / pairs,
    }


def writing_seconds(recorder: Any, entries: int) -> float:
    """Processor seconds of the thread that writes, once so many entries are written."""
    recorder.flush()
    while recorder.notes().written < entries:
        time.sleep(0.05)
    clock = time.pthread_getcpuclockid(recorder._thread.ident)
    return time.clock_gettime(clock)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    bare, recorded = result["without"], result["with"]
    more = [b - a for a, b in zip(bare, recorded, strict=True)]
    middle, writing = statistics.median(more), result["writing"]
    low, _, high = statistics.quantiles(more, n=4)
    ratios = [(b + writing) / a for a, b in zip(bare, recorded, strict=True)]
    share = statistics.median(ratios) - 1
    return (
        str(result["rows"]),
        str(len(bare)),
        f"{statistics.median(bare) * 1e3:.1f}",
        f"{middle * 1e3:.2f}",
        f"{low * 1e3:.2f} to {high * 1e3:.2f}",
        f"{writing * 1e3:.2f}",
        f"{(middle + writing) * 1e3:.2f}",
        f"{share:.2%}",
        f"< {TARGET:.0%}",
        "yes" if share < TARGET else "NO",
    )


if __name__ == "__main__":
    main()
