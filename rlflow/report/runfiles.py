"""What a run's directory says, read back: documents, metrics, spans, and sums over them.

Plain files in, plain data out. A file that is not there (a run that was stopped early) is
an empty part; a file that is damaged is an error. This file knows no format of a picture.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from rlflow.graph.headline import Headline
from rlflow.graph.roles import SamplingOptions
from rlflow.report.charts.look import Document
from rlflow.runtime.record.health import review
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.metrics import read_metrics
from rlflow.runtime.record.rundir import RunDir, words_again
from rlflow.runtime.record.spans import Span, dropped_spans, read_spans

ENDS = 10
REWARD = "reward/mean"
HELD_OUT = "eval/reward"
Point = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The files of one run; `graph` and `plan` are None where they were never written.

    `dropped` spans before `spans` are no longer kept.
    """

    path: Path
    run: Document
    config: Document
    graph: Document | None
    plan: Document | None
    plan_text: str
    metrics: tuple[tuple[int, Mapping[str, float]], ...]
    spans: tuple[Span, ...]
    dropped: int = 0

    def curve(self, key: str) -> list[Point]:
        """(iteration, value) of one metric, where it was logged."""
        return [(i, values[key]) for i, values in self.metrics if key in values]

    def metric_names(self) -> list[str]:
        """The names of all metrics, sorted."""
        return sorted({key for _, values in self.metrics for key in values})


def read_run_files(path: Path) -> RunFiles:
    """Read a run's directory. Raises RunDirError if it is none, or a file in it is damaged."""
    RunDir.view(path)
    text = path / "plan.txt"
    return RunFiles(
        path=path,
        run=read_document(path / "run.json") or {},
        config=read_document(path / "config.json") or {},
        graph=read_document(path / "graph.json"),
        plan=read_document(path / "plan.json"),
        plan_text=text.read_text("utf-8", errors="replace") if text.is_file() else "",
        metrics=_metrics(path / "metrics.jsonl"),
        spans=tuple(read_spans(path / "spans")) if (path / "spans").is_dir() else (),
        dropped=dropped_spans(path / "spans"),
    )


def _metrics(path: Path) -> tuple[tuple[int, Mapping[str, float]], ...]:
    """The lines of the metrics, where there are any."""
    lines = read_metrics(path) if path.is_file() else []
    return tuple((line.iteration, line.metrics) for line in lines)


def headline_of(files: RunFiles) -> Headline:
    """The metrics that headline a run, of those that it logged; a loss where that is none."""
    said = (files.graph or {}).get("headline") or {"training": [REWARD], "held_out": [HELD_OUT]}
    logged = files.metric_names()
    losses = [name for name in logged if name.endswith("loss")]
    return Headline(
        training=tuple(name for name in said["training"] if name in logged) or tuple(losses[:1]),
        held_out=tuple(name for name in said["held_out"] if name in logged),
    )


def health_lines(files: RunFiles) -> list[str]:
    """The signs that nothing is learned that the metrics of a run show, a line each."""
    nodes = files.graph["nodes"] if files.graph is not None else ()
    found = {node["name"]: SamplingOptions.read(node["params"]) for node in nodes}
    fixed = {name for name, sampling in found.items() if sampling and sampling.ignore_eos}
    return [sign.line() for sign in review(files.metrics, fixed)]


def num_iterations(files: RunFiles) -> int:
    """How many iterations trained; the evaluation after the last one has a line but is none."""
    closing = tuple(f"{name.rpartition('/')[0]}/" for name in headline_of(files).held_out)
    return sum(not all(key.startswith(closing) for key in values) for _, values in files.metrics)


def first_and_last(points: Sequence[Point]) -> tuple[float, float, int]:
    """The mean of the first and of the last n points, and n: at most 10 and half of them."""
    count = max(1, min(ENDS, len(points) // 2))
    values = [value for _, value in points]
    return fmean(values[:count]), fmean(values[-count:]), count


def iteration_windows(spans: Sequence[Span]) -> dict[int, tuple[float, float]]:
    """When each iteration began and ended on the devices, seconds; failed iterations are out.

    What the host does ahead of time, such as drawing the prompts of later iterations,
    does not stretch them; an iteration without any device counts by its host.
    """
    turns: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        turns[span.iteration].append(span)
    windows = {}
    for iteration, turn in sorted(turns.items()):
        if all(span.ok for span in turn):
            counted = [span for span in turn if max(span.devices, default=-1) >= 0] or turn
            windows[iteration] = (min(s.start for s in counted), max(s.end for s in counted))
    return windows


def iteration_seconds(spans: Sequence[Span]) -> float | None:
    """The median time from the end of one iteration to the end of the next; None without any.

    Where iterations overlap this is what one costs; the first counts from its own start.
    """
    windows = list(iteration_windows(spans).values())
    if not windows:
        return None
    finishes = [windows[0][0], *sorted(end for _, end in windows)]
    return median(after - before for before, after in pairwise(finishes))


def median_iteration(spans: Sequence[Span]) -> int | None:
    """The iteration whose length is the (lower) median, the first of equals; None without any."""
    windows = iteration_windows(spans)
    if not windows:
        return None
    ranked = sorted(windows, key=lambda i: (windows[i][1] - windows[i][0], i))
    return ranked[(len(ranked) - 1) // 2]


def measured_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """The median seconds of every action, over its spans that did not fail."""
    named: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.ok:
            named[span.action].append(span.seconds)
    return {name: median(lengths) for name, lengths in named.items()}


def device_label(device: int, plan: Document | None) -> str:
    """A device as it is printed: its pools and number, `host` for the controller."""
    if device < 0:
        return "host"
    pools = [name for name, numbers in (plan["pools"] if plan else {}).items() if device in numbers]
    return f"{'/'.join(pools) or 'device'}[{device}]"


def continue_line(files: RunFiles) -> str:
    """The command that continues a run, for twice the iterations if it has ended."""
    wanted, done = files.config.get("iterations"), num_iterations(files)
    words = ["rlflow", *words_again(files.run)]
    if isinstance(wanted, int):
        words += ["--iterations", str(2 * wanted if done >= wanted else wanted)]
    return shlex.join([*words, "--resume", str(files.path)])
