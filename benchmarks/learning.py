"""Accuracy after equal iterations on both sides, over several seeds: `vs_trl.py --learning`.

Held-out greedy accuracy of the same 512 problems every 25 iterations, from the same warm
start, with the same prompts, learning rate and batch. Seconds are those of training alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
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
    say,
    text_table,
    write_results,
)
from models import Size, warm_directory
from sides import GROUP, PROMPTS, TRL, grpo_spec, held_out, run_rlflow, run_trl

PIPELINE = ROOT / "pipelines" / "grpo_arithmetic.py"
LR = 1e-4
ITERATIONS, EVERY = 300, 25
EVALUATION = "eval"
SIDES = ("rlflow", "TRL")
COLORS = {"rlflow": "#1f5fa8", "TRL": "#c8641e"}
NOTES = (
    "16 prompts x 8 samples an iteration, lr 1e-4, no KL term, one optimizer step an iteration, "
    "the same prompts in the same order for the same seed; the samples differ.",
    "Greedy accuracy on the same 512 held-out problems, every 25 iterations.",
    "Seconds are the time of training alone: evaluations are taken out on both sides.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One run: accuracy at iterations, and the seconds of training until then."""

    side: str
    seed: int
    iterations: tuple[int, ...]
    accuracy: tuple[float, ...]
    seconds: tuple[float, ...]


def compare_learning(size: Size, seeds: Iterable[int], *, quick: bool) -> None:
    """Run both sides for every seed, print the table, draw the curves."""
    facts = machine()
    count, every = (6, 3) if quick else (ITERATIONS, EVERY)
    model = warm_directory(size)
    curves = []
    for seed in seeds:
        say(f"seed {seed}")
        curves.append(ours(model, seed, count, every))
        curves.append(theirs(model, seed, count, every))
    header, rows = table(curves)
    print(text_table(header, rows))
    folder = CACHE / "quick" if quick else RESULTS
    title = f"GRPO: greedy accuracy beside TRL 1.16.0, model {size.name}"
    picture = "![Accuracy over iterations and seconds](vs_trl_learning.svg)"
    page = markdown_report(title, facts, [markdown_table(header, rows), picture], NOTES)
    data = {"machine": facts, "curves": [asdict(curve) for curve in curves]}
    write_results(folder, "vs_trl_learning", data, page)
    draw(curves, folder)


def ours(model: Path, seed: int, iterations: int, every: int) -> Curve:
    """One run of rlflow."""
    settings = {
        "model": str(model),
        "seed": seed,
        "lr": LR,
        "kl_coef": 0.0,
        "prompts_per_iteration": PROMPTS,
        "group_size": GROUP,
        "eval_every": every,
    }
    directory, _ = run_rlflow(f"learning-{seed}", PIPELINE, settings, iterations)
    spans = read_jsonl(directory / "spans" / "main.jsonl")
    accuracy = {
        line["iteration"]: line["metrics"]["eval/reward"]
        for line in read_jsonl(directory / "metrics.jsonl")
        if "eval/reward" in line["metrics"]
    }
    return Curve(
        side="rlflow",
        seed=seed,
        iterations=tuple(accuracy),
        accuracy=tuple(accuracy.values()),
        seconds=tuple(trained_seconds(spans, number) for number in accuracy),
    )


def trained_seconds(spans: Sequence[Mapping[str, Any]], iteration: int) -> float:
    """Wall clock from the start of the run to the end of `iteration - 1`, evaluations taken out.

    The evaluation of an iteration has the device for itself, so its span is all it costs.
    """
    done = [s for s in spans if s.get("iteration", iteration) < iteration]
    if not done:
        return 0.0
    first = min(span["start"] for span in done)
    paused = sum(span["end"] - span["start"] for span in done if span["node"] == EVALUATION)
    return float(max(span["end"] for span in done) - first - paused)


def theirs(model: Path, seed: int, iterations: int, every: int) -> Curve:
    """One run of TRL."""
    spec = grpo_spec(model, iterations, seed=seed, lr=LR, kl_coef=0.0)
    spec |= {"eval_every": every, "held_out": held_out()}
    result, _ = run_trl(f"trl-learning-{seed}", TRL, "trl_grpo.py", spec)
    return Curve(
        side="TRL",
        seed=seed,
        iterations=tuple(number for number, _ in result["accuracy"]),
        accuracy=tuple(value for _, value in result["accuracy"]),
        seconds=tuple(unpaused(result, number) for number, _ in result["accuracy"]),
    )


def unpaused(result: Mapping[str, Any], iteration: int) -> float:
    """Seconds from the first iteration's start to the end of `iteration` of them."""
    ends, paused = result["ends"], result["paused"]
    return float(ends[iteration] - ends[0] - sum(paused[:iteration]))


def table(curves: Sequence[Curve]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """One line a run: accuracy at a few iterations, and the mean over the seeds."""
    marks = milestones(curves[0].iterations)
    header = ("run", *(str(mark) for mark in marks), "training s")
    rows = []
    for side in SIDES:
        mine = [curve for curve in curves if curve.side == side]
        for curve in mine:
            cells = [f"{at(curve, mark):.3f}" for mark in marks]
            rows.append((f"{side} seed {curve.seed}", *cells, f"{curve.seconds[-1]:.1f}"))
        means = [f"{statistics.fmean(at(curve, mark) for curve in mine):.3f}" for mark in marks]
        seconds = statistics.fmean(curve.seconds[-1] for curve in mine)
        rows.append((f"{side} mean", *means, f"{seconds:.1f}"))
    return header, rows


def milestones(iterations: Sequence[int]) -> tuple[int, ...]:
    """At most seven of the evaluated iterations, the first and the last among them."""
    places = {round(step * (len(iterations) - 1) / 6) for step in range(7)}
    return tuple(iterations[place] for place in sorted(places))


def at(curve: Curve, iteration: int) -> float:
    """The accuracy at an evaluated iteration."""
    return curve.accuracy[curve.iterations.index(iteration)]


def mean_of(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of every column."""
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def draw(curves: Sequence[Curve], folder: Path) -> None:
    """Accuracy over iterations and over seconds, thin lines for seeds and a thick mean."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.6), sharey=True, layout="constrained")
    for side in SIDES:
        mine = [curve for curve in curves if curve.side == side]
        accuracy = mean_of([curve.accuracy for curve in mine])
        for axis, over in zip(axes, ("iterations", "seconds"), strict=True):
            xs = [getattr(curve, over) for curve in mine]
            for x, curve in zip(xs, mine, strict=True):
                axis.plot(x, curve.accuracy, color=COLORS[side], lw=0.8, alpha=0.4)
            axis.plot(mean_of(xs), accuracy, color=COLORS[side], lw=2, label=side)
    for axis, label in zip(axes, ("iteration", "seconds of training, one thread"), strict=True):
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out greedy accuracy")
    axes[0].legend(frameon=False, loc="lower right")
    seeds = len(curves) // len(SIDES)
    figure.suptitle(f"GRPO on two-digit addition, mean of {seeds} seeds", fontsize=10)
    for suffix in ("svg", "png"):
        figure.savefig(folder / f"vs_trl_learning.{suffix}", dpi=150)
    pyplot.close(figure)
