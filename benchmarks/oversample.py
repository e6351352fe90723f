"""What a rollout saves that begins more groups than its batch has, and what was predicted of it.

The pipeline is that of `continuous.py`: lengths are log-normal, up to eight means. Everything that
is counted follows from the tokens, so no clock and no other work on the machine changes it: turns,
in each of which every live row gets a token, tokens that are decoded, and tokens of the rows that
stay. The prediction knows the distribution alone, as plans do.

python benchmarks/oversample.py --iterations 48
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    HERE,
    RESULTS,
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
from continuous import WIDTHS
from pipelines.tails import LONGEST, MEAN, SPREAD
from prediction import model_directory

PIPELINE = HERE / "pipelines" / "tails.py"
GROUPS, N = 16, 4
BEGUN = (16, 18, 20, 24, 32)
CLOSE = 0.10
COUNTED = ("turns", "tokens", "length")
HEADER = (
    "groups begun",
    "turns",
    "predicted",
    "of the drained",
    "tokens decoded",
    "predicted",
    "tokens of a row",
    "predicted",
)
NOTES = (
    f"{GROUPS} groups of {N} rows are the batch of every line, those that are complete first. "
    "Means over the iterations; each number is predicted from the distribution of lengths alone.",
    "A turn is a step of decoding, in which every live row gets a token. Rows of the drained "
    "rollout, of the first line, have all ended.",
    "What is saved in turns is paid in tokens that are thrown away, and in shorter rows than the "
    "policy samples.",
)


def measured(begun: int, iterations: int) -> dict[str, list[float]]:
    """Turns, decoded tokens and the mean length of the rows that stay, of every iteration."""
    name = f"oversample-{begun}"
    directory = CACHE / "runs" / name
    shutil.rmtree(directory, ignore_errors=True)
    settings = [f"model={model_directory(WIDTHS, '2x128-long')}", f"prompts_per_iteration={begun}"]
    settings += [f"group_size={N}", f"first_groups={GROUPS}"]
    words: list[str | Path] = [rlflow(), "run", PIPELINE, "--placement", "split", "-q"]
    words += ["--devices", "cpu:2", "--threads", "1", "--iterations", str(iterations)]
    words += ["--run-dir", directory, *(word for each in settings for word in ("--set", each))]
    run(words, CACHE / "logs" / f"{name}.log")
    rows = [line["metrics"] for line in read_jsonl(directory / "metrics.jsonl")]
    rows = [row for row in rows if "actor.rollout/length" in row]
    assert len(rows) == iterations
    assert all(row["actor.rollout/finished"] == 1 for row in rows)
    kept = [row["actor.rollout/length"] for row in rows]
    thrown = [row.get("actor.rollout/dropped_tokens", 0.0) for row in rows]
    return {
        "turns": [row["actor.rollout/length_max"] for row in rows],
        "tokens": [GROUPS * N * k + t for k, t in zip(kept, thrown, strict=True)],
        "length": kept,
    }


def predicted(begun: int) -> dict[str, float]:
    """The same from order statistics of the lengths."""
    from rlflow.scheduler.costs.lengths import ResponseLengths, stages
    from rlflow.scheduler.costs.rows.oversampled import first_stages, of_first

    lengths = ResponseLengths(LONGEST, float(MEAN), SPREAD)
    dropping = begun > GROUPS
    found = first_stages(lengths, begun, N, GROUPS) if dropping else stages(lengths, begun * N, 1)
    kept = of_first(lengths, begun, N, GROUPS) if dropping else lengths
    return {
        "turns": sum(stage.tokens * stage.goes_on for stage in found),
        "tokens": sum(stage.tokens * stage.goes_on * stage.live for stage in found),
        "length": kept.mean,
    }


def report(found: Mapping[int, Mapping[str, Any]], facts: Mapping[str, Any], folder: Path) -> None:
    """Print the table, and write it."""
    rows, worst = [], 0.0
    drained = statistics.fmean(found[GROUPS]["measured"]["turns"])
    for begun, each in found.items():
        means = {name: statistics.fmean(each["measured"][name]) for name in COUNTED}
        said = each["predicted"]
        off = [said[name] / means[name] - 1 for name in COUNTED]
        worst = max(worst, *map(abs, off))
        cells = [[f"{means[name]:.1f}", f"{said[name]:.1f}"] for name in COUNTED]
        share = f"{means['turns'] / drained:.2f}"
        rows.append([str(begun), *cells[0], share, *cells[1], *cells[2]])
    print(text_table(HEADER, rows))
    reached = "met" if worst <= CLOSE else "NOT met"
    end = f"the prediction is off by {worst:.1%} at the most (target {CLOSE:.0%}: {reached})"
    print(end)
    page = markdown_report(
        "Rollouts that drop who is late", facts, [markdown_table(HEADER, rows), end], NOTES
    )
    write_results(folder, "oversample", {"machine": facts, "found": dict(found)}, page)


def main(words: Sequence[str] | None = None) -> None:
    """Count with each number of groups that begin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=48)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    facts = machine()
    found = {}
    for begun in BEGUN:
        say(f"{begun} groups begin")
        counted = measured(begun, given.iterations)
        found[begun] = {"measured": counted, "predicted": predicted(begun)}
    report(found, facts, given.results)


if __name__ == "__main__":
    main()
