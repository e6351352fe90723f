"""How even the rows of two replicas are that move rows, and what was predicted of it.

The pipeline is that of `continuous.py`: lengths are log-normal, up to eight means. Everything that
is counted follows from the tokens, so no clock and no other work on the machine changes it: the
live rows of the replica that has most, summed over turns, in each of which every live row gets a
token, and the rows that move. The prediction knows the distribution alone, as plans do.

python benchmarks/balance.py --iterations 24
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
GROUPS, N, REPLICAS = 16, 4, 2
# Rows are evened after every so many turns; after so many as no row has they stay.
NEVER = 100_000
EVERY = (NEVER, 64, 16)
CLOSE = 0.10
HEADER = (
    "turns between",
    "rows of the fullest, over turns",
    "predicted",
    "of rows that stay",
    "rows that move",
    "predicted",
)
NOTES = (
    f"{GROUPS} groups of {N} rows on {REPLICAS} replicas. Means over the iterations, which have "
    "the same lengths in every line; each number is predicted from their distribution alone.",
    "The first column of numbers adds up, over turns, the live rows of the replica that has most, "
    "which is what a turn waits for. As many turns are made in every line: the longest row has as "
    "many tokens wherever it is.",
)


def measured(every: int, iterations: int) -> dict[str, list[float]]:
    """Rows of the fullest replica over turns, and rows that move, of every iteration."""
    name = f"balance-{every}"
    directory = CACHE / "runs" / name
    shutil.rmtree(directory, ignore_errors=True)
    settings = [f"model={model_directory(WIDTHS, '2x128-long')}", f"group_size={N}"]
    settings += [f"prompts_per_iteration={GROUPS}", f"balance={every}"]
    words: list[str | Path] = [rlflow(), "run", PIPELINE, "--placement", "replicas", "-q"]
    words += ["--devices", "cpu:3", "--threads", "1", "--iterations", str(iterations)]
    words += ["--run-dir", directory, *(word for each in settings for word in ("--set", each))]
    run(words, CACHE / "logs" / f"{name}.log")
    rows = [line["metrics"] for line in read_jsonl(directory / "metrics.jsonl")]
    rows = [row for row in rows if "actor.rollout/row_turns" in row]
    assert len(rows) == iterations
    assert all(row["actor.rollout/finished"] == 1 for row in rows)
    kinds = ("row_turns", "moved", "turns", "length")
    return {kind: [row[f"actor.rollout/{kind}"] for row in rows] for kind in kinds}


def predicted(every: int) -> dict[str, float]:
    """The same from order statistics of the lengths."""
    from rlflow.scheduler.costs.lengths import Load, ResponseLengths
    from rlflow.scheduler.costs.rows.balanced import balanced_stages, staying_stages

    lengths = ResponseLengths(LONGEST, float(MEAN), SPREAD)
    rows = GROUPS * N / REPLICAS
    load = Load(rows=rows, prompts=rows / N, prompt=8, lengths=lengths, peers=REPLICAS)
    if every == NEVER:
        stays = staying_stages(load)
        return {"row_turns": sum(stage.tokens * most for stage, most in stays), "moved": 0.0}
    found = balanced_stages(load, every)
    return {
        "row_turns": sum(stage.tokens * stage.goes_on * most for stage, most, _ in found),
        "moved": sum(stage.tokens * stage.goes_on * moves for stage, _, moves in found),
    }


def report(found: Mapping[int, Mapping[str, Any]], facts: Mapping[str, Any], folder: Path) -> None:
    """Print the table, and write it."""
    rows, worst = [], 0.0
    stay = statistics.fmean(found[NEVER]["measured"]["row_turns"])
    for every, each in found.items():
        means = {name: statistics.fmean(each["measured"][name]) for name in ("row_turns", "moved")}
        said = each["predicted"]
        worst = max(worst, abs(said["row_turns"] / means["row_turns"] - 1))
        turns = [f"{means['row_turns']:.0f}", f"{said['row_turns']:.0f}"]
        share = f"{means['row_turns'] / stay:.3f}"
        moved = [f"{means['moved']:.1f}", f"{said['moved']:.1f}"]
        rows.append(["they stay" if every == NEVER else str(every), *turns, share, *moved])
    print(text_table(HEADER, rows))
    reached = "met" if worst <= CLOSE else "NOT met"
    end = (
        f"the prediction of rows is off by {worst:.1%} at the most (target {CLOSE:.0%}: {reached})"
    )
    print(end)
    page = markdown_report(
        "Replicas that move rows", facts, [markdown_table(HEADER, rows), end], NOTES
    )
    write_results(folder, "balance", {"machine": facts, "found": dict(found)}, page)


def main(words: Sequence[str] | None = None) -> None:
    """Count with each number of turns between."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(words)
    facts = machine()
    found = {}
    for every in EVERY:
        say(f"rows are evened after every {every} turns")
        counted = measured(every, given.iterations)
        found[every] = {"measured": counted, "predicted": predicted(every)}
    report(found, facts, given.results)


if __name__ == "__main__":
    main()
