"""Whether every pipeline learns: each in `pipelines/` over several seeds, with its curve.

A pipeline runs as it is, under its first placement, once for each seed. Its rewards in training
and on held-out problems go to `results/learning/NAME.json`, its picture to
`docs/images/curve_NAME.svg`. What is finished is kept: the next call goes on from there.

python benchmarks/learning_all.py --only remax --seeds 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    read_jsonl,
    rlflow,
    run,
    say,
    text_table,
    write_results,
)
from pydantic import TypeAdapter

from rlflow.cli.config import load_pipeline
from rlflow.report.charts.curves import STYLE, smooth, window_for
from rlflow.report.charts.look import FAINT, INK, LINE, PALETTE, SOFT_INK

PIPELINES = ROOT / "pipelines"
IMAGES = ROOT / "docs" / "images"
NOT_HERE = {
    "grpo_gsm8k": "needs a model and a data set of the hub",
    "ppo_gsm8k": "needs a model and a data set of the hub",
}
NEVER = 10**9
ENDS = 10
ENDINGS = ("reward/mean", "/reward", "accuracy", "/loss")
HEADER = ("pipeline", "backend", "metric", "seeds", "iterations", "first", "last", "gain", "learns")
NOTES = (
    "First and last are means over the seeds: of an evaluation its first and last value, of what "
    "is logged in every iteration the means of its first and last 10.",
    "Gain is last less first with twice its standard error over the seeds; a pipeline learns "
    "where the gain is the larger one. Of a loss less is more.",
    "Evaluations decode 512 held-out problems greedily. All start from the same warm start "
    "(pipelines/assets/arith-tiny) but sft_arithmetic, which makes it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric of a pipeline: the iterations it was logged in, and its values by seed."""

    metric: str
    held_out: bool
    iterations: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]

    @property
    def rises(self) -> bool:
        """Whether more is better."""
        return not self.metric.endswith("loss")

    def ends(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The first and the last value of every seed; of noisy series the means of ten."""
        count = 1 if self.held_out else max(1, min(ENDS, len(self.iterations) // 2))
        first = tuple(statistics.fmean(row[:count]) for row in self.values)
        return first, tuple(statistics.fmean(row[-count:]) for row in self.values)

    def gain(self) -> tuple[float, float]:
        """How much better the last is than the first, and the standard error of that (NaN of one).

        The gains of seeds are compared, so what all seeds have in common does not count.
        """
        sign = 1 if self.rises else -1
        gains = [sign * (last - first) for first, last in zip(*self.ends(), strict=True)]
        many = len(gains) > 1
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if many else math.nan
        return statistics.fmean(gains), error

    def learns(self) -> bool | None:
        """Whether the gain is more than twice its error; None of one seed."""
        gain, error = self.gain()
        return None if math.isnan(error) else gain > 2 * error


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What the runs of one pipeline on one backend have shown."""

    pipeline: str
    backend: str
    placement: str
    seeds: tuple[int, ...]
    iterations: int
    digest: str
    machine: dict[str, Any]
    series: tuple[Series, ...]

    @property
    def judged(self) -> tuple[Series, ...]:
        """The series that say whether it learns: held-out ones, where there are any."""
        return tuple(each for each in self.series if each.held_out) or self.series

    def rows(self) -> list[tuple[str, ...]]:
        """A line of the table for every series."""
        return [self._row(each) for each in self.series]

    def _row(self, series: Series) -> tuple[str, ...]:
        gain, error = series.gain()
        first, last = (statistics.fmean(values) for values in series.ends())
        learns = {None: "one seed", True: "yes", False: "NO"}[series.learns()]
        spread = "" if math.isnan(error) else f" +- {2 * error:.3f}"
        return (
            self.pipeline,
            self.backend,
            series.metric,
            str(len(self.seeds)),
            str(self.iterations),
            f"{first:.3f}",
            f"{last:.3f}",
            f"{gain:+.3f}{spread}",
            learns if series in self.judged else "",
        )


LEARNED = TypeAdapter(Learned)


def main() -> None:
    """Run what is not finished, then print and write the table of everything."""
    options = parsed()
    folder = (CACHE / "quick" if options.quick else RESULTS) / "learning"
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names(options.only):
        try:
            learned = measured(name, options, folder)
        except SystemExit as error:
            failed.append(f"{name}: {error}")
            say(failed[-1])
            continue
        if options.backend == "local":
            images = folder if options.quick else IMAGES
            draw(learned, images / f"curve_{name}.svg")
        print(text_table(HEADER, learned.rows()), flush=True)
        write_table(folder)
    if failed:
        raise SystemExit("\n\n".join(["failed:", *failed]))


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="pipelines with TEXT in names")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--iterations", type=int, help="the pipeline's own unless given")
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--again", action="store_true", help="run what is finished, too")
    parser.add_argument("--quick", action="store_true", help="6 iterations; results/ is left alone")
    options = parser.parse_args()
    if options.quick:
        options.iterations = options.iterations or 6
    return options


def names(only: str) -> list[str]:
    """The pipelines to run, by name."""
    found = sorted(path.stem for path in PIPELINES.glob("*.py"))
    return [name for name in found if name not in NOT_HERE and only in name]


def measured(name: str, options: argparse.Namespace, folder: Path) -> Learned:
    """The result of a pipeline: the one that lies there where it is the same, else a new one."""
    pipeline = load_pipeline(str(PIPELINES / f"{name}.py"))
    config = pipeline.config()
    wanted = {
        "pipeline": name,
        "backend": options.backend,
        "placement": pipeline.placement(None)[0],
        "seeds": tuple(range(options.seeds)),
        "iterations": options.iterations or config.iterations,
        "digest": hashlib.sha256((PIPELINES / f"{name}.py").read_bytes()).hexdigest()[:16],
    }
    path = folder / f"{name}{'' if options.backend == 'local' else '.' + options.backend}.json"
    if path.is_file() and not options.again:
        known = LEARNED.validate_json(path.read_bytes())
        if all(getattr(known, key) == value for key, value in wanted.items()):
            say(f"{name}: {path.name} is finished (--again runs it anew)")
            return known
    facts = machine()
    runs = [run_once(name, seed, wanted) for seed in wanted["seeds"]]
    logged = sorted({key for line in runs[0] for key in line["metrics"]})
    series = gathered(runs, watched(name, logged))
    learned = Learned(**wanted, machine=facts, series=series)
    text = json.dumps(asdict(learned), sort_keys=True)
    path.write_text(text.replace('"machine"', '\n"machine"').replace("[[", "[\n[") + "\n")
    return learned


def watched(name: str, logged: Sequence[str]) -> dict[str, bool]:
    """The metrics that tell how training goes, and whether each is of held-out data.

    Rewards and evaluations; of a pipeline without either the rewards, the accuracies or the
    losses that it has logged.
    """
    nodes = load_pipeline(str(PIPELINES / f"{name}.py")).trace().nodes
    held_out = {f"{node.name}/reward": True for node in nodes if node.op.name == "evaluate"}
    rewards = {f"{node.name}/mean": False for node in nodes if node.op.name == "reward"}
    drafts = {key: False for key in logged if key.endswith("/acceptance")}
    found = {key: held for key, held in {**rewards, **drafts, **held_out}.items() if key in logged}
    if False in found.values():
        return found
    for ending in ENDINGS:
        named = {key: False for key in logged if key.endswith(ending) and key not in found}
        if named:
            return {**named, **found}
    return found


def run_once(
    name: str,
    seed: int,
    wanted: Mapping[str, Any],
    *,
    file: Path | None = None,
    more: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The metrics of one run, one line an iteration; of another `file` than the pipeline's own."""
    say(f"{name}: seed {seed}, {wanted['iterations']} iterations, {wanted['backend']}")
    directory = CACHE / "runs" / f"learning-{name}-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    os.environ["RLFLOW_COSTS"] = "off"
    path = PIPELINES / f"{name}.py" if file is None else file
    command: list[str | Path] = [rlflow(), "run", path, "--threads", "1", *more]
    command += ["--placement", wanted["placement"], "--backend", wanted["backend"]]
    command += ["--iterations", str(wanted["iterations"]), "--set", f"seed={seed}"]
    command += ["--save-every", str(NEVER), "--run-dir", directory, "-q"]
    run(command, CACHE / "logs" / f"learning-{name}-{seed}.log")
    lines = read_jsonl(directory / "metrics.jsonl")
    shutil.rmtree(directory)
    return lines


def gathered(
    runs: Sequence[Sequence[Mapping[str, Any]]], judges: Mapping[str, bool]
) -> tuple[Series, ...]:
    """The watched metrics of all runs, row by seed."""
    found = []
    for metric, held_out in judges.items():
        curves = [
            {
                line["iteration"]: line["metrics"][metric]
                for line in run
                if metric in line["metrics"]
            }
            for run in runs
        ]
        values = tuple(tuple(round(value, 6) for value in curve.values()) for curve in curves)
        every = tuple(curves[0])
        found.append(Series(metric=metric, held_out=held_out, iterations=every, values=values))
    return tuple(found)


def write_table(folder: Path) -> None:
    """The table of everything that lies there, beside it as `learning_all`."""
    found = [LEARNED.validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]
    rows = [row for learned in found for row in learned.rows()]
    facts = sorted((learned.machine for learned in found), key=lambda each: each["date"])
    notes = (*NOTES, measured_at(facts))
    page = markdown_report(
        "Whether every pipeline learns", facts[-1], [markdown_table(HEADER, rows)], notes
    )
    data = {"header": HEADER, "rows": rows}
    write_results(folder.parent, "learning_all", data, page)


def measured_at(facts: Sequence[Mapping[str, Any]]) -> str:
    """The commits and the time of what a table has, oldest first."""
    commits = list(dict.fromkeys(str(each["commit"]) for each in facts))
    return (
        f"Measured from {facts[0]['date']} to {facts[-1]['date']}, at commits "
        f"{', '.join(commits)} (+ with changed files); the line at the top is of the last one."
    )


def draw(learned: Learned, path: Path) -> None:
    """A panel for training and one for held-out data: a line a seed, and a thick mean."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    panels = [[each for each in learned.series if each.held_out is side] for side in (False, True)]
    panels = [panel for panel in panels if panel]
    with mpl.rc_context({**STYLE, "font.size": 8}):
        figure = Figure(figsize=(3.4 * len(panels), 2.1), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            for colour, series in zip(PALETTE, panel, strict=False):
                _lines(axis, series, colour, named=series.held_out and len(panel) == 1)
            side = "held out" if panel[0].held_out else "training"
            alone = f"{panel[0].metric}, " if len(panel) == 1 else ""
            axis.set_title(f"{alone}{side}", loc="left")
            axis.set_xlabel("iteration")
            axis.grid(axis="y", color=LINE, linewidth=0.6, alpha=0.7)
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(length=3, color=FAINT)
            if len(panel) > 1:
                axis.legend(frameon=False, fontsize=7, labelcolor=SOFT_INK)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    say(f"wrote {path}")


def _lines(axis: Any, series: Series, colour: str, *, named: bool) -> None:
    window = 1 if series.held_out else window_for(len(series.iterations))
    rows = [smooth(row, window) for row in series.values]
    for row in rows:
        axis.plot(series.iterations, row, color=colour, alpha=0.35, linewidth=0.8)
    mean = [statistics.fmean(column) for column in zip(*rows, strict=True)]
    axis.plot(series.iterations, mean, color=colour, linewidth=1.8, label=series.metric)
    if named:
        for place in (0, -1):
            axis.annotate(
                f"{mean[place]:.2f}",
                (series.iterations[place], mean[place]),
                textcoords="offset points",
                xytext=(0, 5),
                ha="left" if place == 0 else "right",
                fontsize=7,
                color=INK,
            )
        axis.margins(y=0.2)


if __name__ == "__main__":
    main()
