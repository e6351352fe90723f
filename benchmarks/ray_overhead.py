"""What an action costs on the Ray backend, beside a bare call of a Ray actor.

    python benchmarks/ray_overhead.py

A chain of actions with empty bodies through the executor and the ranks of one device, and
calls of an empty actor method, in turn in the same process and cluster; target: at most 1.5
round trips an action. Then two actions that sleep on pools of their own, which have to take
the time of one. Writes benchmarks/results/ray_overhead.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from common import (
    CACHE,
    HERE,
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    text_table,
    write_results,
)
from segments import NAMES, Moments, Watch, medians

if TYPE_CHECKING:
    from rlflow.runtime.ray.machine import RayMachine
    from rlflow.scheduler.plan.plan import Plan

PIPELINE = HERE / "pipelines" / "empty.py"
TARGET, TOGETHER = 1.5, 1.2
NAP = 0.2
DEADLINE = 60.0
HEADER = ("chain on", "action ms", "call ms", "ratio", "of rounds", "target", "met")
SEGMENTS = ("chain on", *NAMES)
APART = ("two pools", "both ms", "one ms", "ratio", "target", "met")
NOTES = (
    "An action lasts from the end of the one before it to its own end, as the executor's thread "
    "hears of them; a call from `remote()` to the return of `ray.get`. On two devices an action is "
    "a call of either rank, and so is the bare call: of two actors, both awaited.",
    "Rounds of actions and of calls in turn, in one process and one Ray cluster. ratio: the median "
    "over the rounds of (median action / median call).",
    "Where an action's time goes, medians in ms: `submit` is the backend's; `out` ends when the "
    "rank begins; `rank` is its own time; `back` ends when the backend's thread calls the "
    "executor; `executor` when that has heard. Beginning and end are read off the rank's clock.",
    f"Two pools: an iteration of two actions that sleep {NAP:g} s, each on a device of its own, "
    "over the longer of the two as the ranks measured it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of every action and of every bare call in one round."""

    actions: tuple[float, ...]
    calls: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median action over the median call."""
        return statistics.median(self.actions) / statistics.median(self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The rounds of one placement, and where its actions' time went."""

    name: str
    rounds: tuple[Round, ...]
    segments: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(each.ratio for each in self.rounds)

    def row(self) -> tuple[str, ...]:
        """A line of the table, times in milliseconds."""
        ratios = [each.ratio for each in self.rounds]
        return (
            self.name,
            f"{statistics.median(s for each in self.rounds for s in each.actions) * 1e3:.3f}",
            f"{statistics.median(s for each in self.rounds for s in each.calls) * 1e3:.3f}",
            f"{self.ratio:.2f}",
            f"{min(ratios):.2f}..{max(ratios):.2f}",
            f"<= {TARGET:g}",
            "yes" if self.ratio <= TARGET else "NO",
        )

    def segment_row(self) -> tuple[str, ...]:
        """Where an action's time went."""
        return (self.name, *(f"{self.segments[name] * 1e3:.3f}" for name in NAMES))


class Empty:
    """An actor whose method does nothing."""

    def nothing(self) -> None:
        """Return at once."""


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description="An action beside a bare Ray call.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=50, help="of each round")
    parser.add_argument("--quick", action="store_true", help="small counts, nothing written")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.iterations = 2, 10
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
    )
    facts = machine()
    chains = [
        measured("1 device", "one", options.rounds, options.iterations),
        measured("2 devices", "two", options.rounds, options.iterations),
    ]
    ratios = together(5)
    tables: list[tuple[Sequence[str], list[tuple[str, ...]]]] = [
        (HEADER, [chain.row() for chain in chains]),
        (SEGMENTS, [chain.segment_row() for chain in chains]),
        (APART, [apart_row(ratios)]),
    ]
    print("\n\n".join(text_table(*table) for table in tables))
    title = "An action on the Ray backend beside a bare call of an actor"
    page = markdown_report(title, facts, [markdown_table(*table) for table in tables], NOTES)
    data = {
        "machine": facts,
        "chains": [{**asdict(chain), "ratio": chain.ratio} for chain in chains],
        "together": ratios,
    }
    write_results(CACHE / "quick" if options.quick else RESULTS, "ray_overhead", data, page)


def measured(name: str, placement: str, rounds: int, iterations: int) -> Chain:
    """Rounds of a chain and of bare calls, the first round left out."""
    import ray

    with started("chain", placement) as (plan, ranks):
        actors = [
            ray.remote(Empty).options(num_cpus=0).remote() for _ in range(len(plan.pools["all"]))
        ]
        found = []
        moments: list[Moments] = []
        for number in range(rounds + 1):
            noted = run(plan, ranks, number * iterations, (number + 1) * iterations)
            links = [each for each in noted if each.action.startswith("link")]
            moments = links if number == 0 else [*moments, *links]
            calls = tuple(call(actors) for _ in range(len(links)))
            found.append(Round(actions=between(noted), calls=calls))
    kept = moments[len(moments) // (rounds + 1) :]
    return Chain(name=name, rounds=tuple(found[1:]), segments=medians(kept))


def run(plan: Plan, ranks: RayMachine, start: int, end: int) -> list[Moments]:
    """Run iterations one after the other; their action instances in the order they ended."""
    from rlflow.runtime.execute.executor import Executor

    watch = Watch(ranks.backend(time.perf_counter))
    try:
        Executor(plan, watch, watch, start=start, end=end, barrier=1).run()
    finally:
        watch.close()
    return watch.moments


def between(noted: Sequence[Moments]) -> tuple[float, ...]:
    """Seconds of every link whose predecessor in the chain is a link too."""
    return tuple(
        b.heard - a.heard
        for a, b in itertools.pairwise(noted)
        if a.iteration == b.iteration and a.action.startswith("link")
    )


def call(actors: Sequence[Any]) -> float:
    """Seconds of a call of every actor, submitted together and awaited."""
    import ray

    began = time.perf_counter()
    ray.get([actor.nothing.remote() for actor in actors])
    return time.perf_counter() - began


def together(iterations: int) -> list[float]:
    """For each iteration of the naps the time of both over that of the longer one."""
    with started("naps", "apart", f"seconds={NAP}") as (plan, ranks):
        noted = run(plan, ranks, 0, iterations + 1)
    found = []
    for number in range(1, iterations + 1):
        both = [each for each in noted if each.iteration == number]
        whole = max(each.heard for each in both) - min(each.submitted for each in both)
        found.append(whole / max(each.end - each.start for each in both))
    return found


def apart_row(ratios: Sequence[float]) -> tuple[str, ...]:
    """The line of the two pools, times in milliseconds."""
    ratio = statistics.median(ratios)
    return (
        f"two naps of {NAP * 1e3:g} ms",
        f"{ratio * NAP * 1e3:.1f}",
        f"{NAP * 1e3:.1f}",
        f"{ratio:.2f}",
        f"<= {TOGETHER:g}",
        "yes" if ratio <= TOGETHER else "NO",
    )


@contextmanager
def started(pipeline: str, placement: str, *settings: str) -> Iterator[tuple[Plan, RayMachine]]:
    """The plan of a pipeline, and its processes while they are needed."""
    from rlflow.cli.commands import Target, compile_target
    from rlflow.runtime.ray.machine import Options, RayMachine

    target = Target(
        pipeline=f"{PIPELINE}:{pipeline}",
        placement=placement,
        settings=settings,
        threads=1,
        backend="ray",
    )
    plan = compile_target(target).compiled.plan
    options = Options(kind="cpu", threads=1, seed=0, near=PIPELINE, deadline=DEADLINE)
    ranks = RayMachine(plan, options)
    try:
        yield plan, ranks
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
