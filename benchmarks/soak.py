"""What a long run holds: memory, descriptors, threads and files, over many iterations of nothing.

    python benchmarks/soak.py

The GRPO graph with a worker that returns at once, and all that a run writes: thousands of
iterations in a minute, as a run of weeks has them. Writes benchmarks/results/soak.json and .md.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from common import CACHE, RESULTS, machine, markdown_report, markdown_table, text_table
from common import write_results as write
from overhead import Nothing, compiled

if TYPE_CHECKING:
    from rlflow.runtime.worker.worker import Worker
    from rlflow.scheduler.plan.plan import Action, Plan

HEADER = ("iteration", "resident MB", "descriptors", "threads", "files MB", "B an iteration")
NOTES = (
    "Bodies do nothing, each action has one metric, and a checkpoint of no weights is saved twenty "
    "times: the executor, the local backend, logs, spans and TensorBoard events remain. Files MB "
    "are all of the run directory, bytes an iteration those since the line above.",
    "A run of real bodies adds what torch, Ray and engines hold.",
)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a run holds in an iteration: bytes of memory and of files, and counts."""

    iteration: int
    resident: int
    descriptors: int
    threads: int
    written: int


class Looked(Nothing):
    """A worker of nothing that looks at its process every so many iterations."""

    def __init__(self, plan: Plan, folder: Path, every: int) -> None:
        super().__init__(plan)
        self.folder, self.every = folder, every
        self.held: list[Held] = []

    def run(self, action: Action, iteration: int) -> Mapping[str, float]:
        """One number, and a look where one is due, in one action of the iteration."""
        if action.id == self.plan.actions[0].id and iteration >= self.every * len(self.held):
            self.held.append(held_now(self.folder, iteration))
        return super().run(action, iteration)


def held_now(folder: Path, iteration: int) -> Held:
    """What this process holds, garbage collected, and what is written."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        iteration=iteration,
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


def soaked(plan: Plan, total: int, folder: Path, looks: int) -> list[Held]:
    """Looks at a run of so many iterations, evenly apart from its first iteration on."""
    from rich.console import Console

    from rlflow.runtime.display import Display
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.record.rundir import RunDir
    from rlflow.runtime.run import Run, Settings

    shutil.rmtree(folder, ignore_errors=True)
    settings = Settings(seed=0, iterations=total, threads=1, save_every=max(1, total // 20))
    display = Display(Console(stderr=True), quiet=True)
    worker = Looked(plan, folder, total // looks)
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
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    options = parser.parse_args()
    total = 1000 if options.quick else options.iterations
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    held = soaked(compiled("split"), total, CACHE / "runs" / "soak", looks=10)
    print(text_table(HEADER, rows(held)))
    facts = machine()
    title = f"A run of {total:,} iterations of the GRPO graph, split, with empty bodies"
    page = markdown_report(title, facts, [markdown_table(HEADER, rows(held))], NOTES)
    folder = CACHE / "quick" if options.quick else RESULTS
    write(folder, "soak", {"machine": facts, "held": [asdict(each) for each in held]}, page)


if __name__ == "__main__":
    main()
