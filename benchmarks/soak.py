"""What a long run holds: memory, descriptors, threads and files, over many iterations of nothing.

    python benchmarks/soak.py

The GRPO graph with a worker that returns at once, and all that a run writes: thousands of
iterations in a minute, as a run of weeks has them. The clocks of the process run ahead by the same
time in every iteration, so that the run lasts a day by all that it reads, times and saves by.
Writes benchmarks/results/soak.json and .md.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from common import CACHE, RESULTS, machine, markdown_report, markdown_table, text_table
from common import write_results as write
from overhead import Nothing, compiled

if TYPE_CHECKING:
    from rlflow.runtime.worker.worker import Worker
    from rlflow.scheduler.plan.plan import Action, Plan

CLOCKS = {"time": 1, "monotonic": 1, "perf_counter": 1, "time_ns": 10**9, "monotonic_ns": 10**9}
HEADER = (
    "iteration",
    "hours",
    "resident MB",
    "descriptors",
    "threads",
    "files MB",
    "B an iteration",
)
NOTES = (
    "Hours are those of the process's clocks, which the worker sets forward; a checkpoint of no "
    "weights is saved every hour. Bodies do nothing, each action has one metric: the executor, the "
    "local backend, logs, spans and TensorBoard events remain. Files MB are all of the run "
    "directory, bytes an iteration those since the line above.",
    "A run of real bodies adds what torch, Ray and engines hold.",
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a run holds in an iteration: bytes of memory and of files, and counts."""

    iteration: int
    seconds: float
    resident: int
    descriptors: int
    threads: int
    written: int


class Looked(Nothing):
    """A worker of nothing that looks at its process every so many iterations.

    One action of an iteration passes some `time`.
    """

    def __init__(self, plan: Plan, folder: Path, every: int, passed: Callable[[], None]) -> None:
        super().__init__(plan)
        self.folder, self.every, self.passed = folder, every, passed
        self.begun = time.time()
        self.held: list[Held] = []

    def run(self, action: Action, iteration: int) -> Mapping[str, float]:
        """One number, and a look where one is due, in one action of the iteration."""
        if action.id == self.plan.actions[0].id:
            if iteration >= self.every * len(self.held):
                self.held.append(held_now(self.folder, iteration, time.time() - self.begun))
            self.passed()
        return super().run(action, iteration)


@contextmanager
def ahead(seconds: float) -> Iterator[Callable[[], None]]:
    """Inside, a call of what it yields sets the clocks of this process forward by so much."""
    passed = 0.0

    def forward() -> None:
        nonlocal passed
        passed += seconds

    def shifted(clock: Callable[[], float], unit: int) -> Callable[[], float]:
        return lambda: clock() + (passed if unit == 1 else int(passed * unit))

    clocks = {name: getattr(time, name) for name in CLOCKS}
    for name, clock in clocks.items():
        setattr(time, name, shifted(clock, CLOCKS[name]))
    try:
        yield forward
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)


def held_now(folder: Path, iteration: int, seconds: float) -> Held:
    """What this process holds after so long, garbage collected, and what is written."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        iteration=iteration,
        seconds=seconds,
        resident=pages * os.sysconf("SC_PAGE_SIZE"),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
        written=sum(map(size_of, folder.rglob("*"))),
    )


def size_of(file: Path) -> int:
    """Bytes of a file; 0 of one that a checkpoint's writer has renamed or removed meanwhile."""
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0


def soaked(
    plan: Plan, total: int, folder: Path, looks: int, passed: Callable[[], None]
) -> list[Held]:
    """Looks at a run of so many iterations, evenly apart from its first iteration on."""
    from rich.console import Console

    from rlflow.runtime.display import Display
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.record.rundir import RunDir
    from rlflow.runtime.run import Run, Settings

    shutil.rmtree(folder, ignore_errors=True)
    settings = Settings(seed=0, iterations=total, threads=1, save_every=0, save_seconds=3600.0)
    display = Display(Console(stderr=True), quiet=True)
    worker = Looked(plan, folder, total // looks, passed)
    with RunDir.create(folder, plan.graph.name, pipeline="soak", command=["soak"]) as made:
        Run(
            plan, settings, LocalMachine(plan, cast("Worker", worker), threads=1), made, display
        ).execute()
    return worker.held


def rows(held: Sequence[Held]) -> list[tuple[str, ...]]:
    """Lines of the table."""
    before = [held[0], *held[:-1]]
    return [
        (
            f"{now.iteration:,}",
            f"{now.seconds / 3600:.1f}",
            f"{now.resident / 1e6:.1f}",
            str(now.descriptors),
            str(now.threads),
            f"{now.written / 1e6:.1f}",
            f"{(now.written - last.written) / max(1, now.iteration - last.iteration):.0f}",
        )
        for last, now in zip(before, held, strict=True)
    ]


def main() -> None:
    """Run, print the table, write the results."""
    parser = argparse.ArgumentParser(description="What a long run holds.")
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--hours", type=float, default=24.0, help="how long it lasts by its clocks")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    options = parser.parse_args()
    total = 1000 if options.quick else options.iterations
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ahead(options.hours * 3600 / total) as passed:
        held = soaked(compiled("split"), total, CACHE / "runs" / "soak", 10, passed)
    print(text_table(HEADER, rows(held)))
    facts = machine()
    title = f"{total:,} iterations in {options.hours:g} hours: the GRPO graph, split, empty bodies"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows(held))], NOTES)
    folder = CACHE / "quick" if options.quick else RESULTS
    write(folder, "soak", {"machine": facts, "held": [asdict(each) for each in held]}, page)


if __name__ == "__main__":
    main()
