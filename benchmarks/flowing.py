"""What groups that flow into one optimizer step gain on two pools of one core, and what plans say.

The pipeline is that of `continuous.py`, whose lengths have a long tail; an iteration is one step.
Unstreamed, the update begins with the last row. In chunks it adds up the gradients of groups as
they are complete, while the tail is decoded. Samples are on-policy and the same on all sides.

Seconds are the processor's, as there: each action is counted by the thread that does it, while no
other runs in its process, and the executor plays the plan with those on a virtual clock of two
cores. Sides take turns. The prediction knows the unstreamed side and the distribution of lengths
alone: an action of a chunk takes its part of the whole one's seconds, by the ratio of the plans'
estimates.

python benchmarks/flowing.py --turns 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)
from virtual_clock import PIPELINE, WARMUP, apart, mean_seconds, planned, played, replayed, side

WHOLE = "split"
SIDES = (WHOLE, "stream2", "stream4", "stream8")
CLOSE = 0.10
HEADER = (
    "placement",
    "an iteration",
    "of the unstreamed",
    "predicted",
    "off by",
    "each turn",
    "updates take",
    "predicted",
)
NOTES = (
    "`of the unstreamed` and `predicted` are ratios of seconds to the row of `split`, whose update "
    "begins when all rows have ended; `off by` is of the ratio.",
    "`updates take` is the processor time of all chunks of an update over that of one in one "
    "piece: what it costs to begin early.",
    "Seconds are the processor's, played by the executor on a virtual clock of two cores; ratios "
    "are medians of those within a turn, which `each turn` has. Beside other work on the machine "
    "an action takes up to half as long again, so one turn says little.",
)


def expected_lengths() -> Any:
    """Lengths of responses as they are drawn, for plans."""
    import rlflow as rf

    sys.path.insert(0, str(PIPELINE.parent))
    import tails

    drawn = [tails.length_of((n + 0.5) / 2048) for n in range(2048)]
    return rf.Lengths(response=rf.Length.of(drawn))


def parts_of(placement: str, lengths: Any) -> dict[str, float]:
    """What each action of a side takes of the unstreamed one's of that node, by estimate."""
    whole, plan = planned(WHOLE, lengths), planned(placement, lengths)
    alone = {action.id: action.cost.seconds for action in whole.actions}
    return {
        action.id: (action.cost.seconds or 0.0) / alone[action.node or action.id]
        for action in plan.actions
        if alone.get(action.node or action.id)
    }


def predicted(placement: str, unstreamed: Mapping[str, Any], lengths: Any) -> dict[str, float]:
    """Seconds of an iteration on the virtual clock, and what all chunks of an update take of it."""
    plan, parts = planned(placement, lengths), parts_of(placement, lengths)
    seconds, nodes = mean_seconds(unstreamed), {a.id: a.node or a.id for a in plan.actions}

    def taken(action: Any, iteration: int) -> float:
        return seconds.get(nodes[action.id], 0.0) * parts.get(action.id, 0.0)

    ends = played(plan, taken, 4 * WARMUP)
    updates = sum(part for name, part in parts.items() if nodes[name] == "actor.update")
    return {"iteration": per_iteration(ends), "updates": updates}


def per_iteration(ends: Sequence[float]) -> float:
    """Seconds of an iteration from the first ones on to the last."""
    return (ends[-1] - ends[WARMUP - 1]) / (len(ends) - WARMUP)


def updates_take(found: Mapping[str, Any]) -> float:
    """Processor seconds of an iteration's updates, of all chunks."""
    means = mean_seconds(found)
    return sum(took for name, took in means.items() if name.startswith("actor.update"))


def figures(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each side beside the unstreamed one of its turn, and what was predicted from that.

    Medians over the turns, in each of which the machine is about as busy for all sides.
    """
    lengths = expected_lengths()
    alone = [predicted(WHOLE, whole, lengths)["iteration"] for whole in turns[WHOLE]]
    made = {}
    for name, found in turns.items():
        said = [predicted(name, whole, lengths) for whole in turns[WHOLE]]
        pairs = list(zip(found, turns[WHOLE], strict=True))
        each = [per_iteration(a["own"]) / per_iteration(b["own"]) for a, b in pairs]
        promised = [one["iteration"] / whole for one, whole in zip(said, alone, strict=True)]
        ratio, expected = statistics.median(each), statistics.median(promised)
        made[name] = {
            "iteration": statistics.median(per_iteration(one["own"]) for one in found),
            "ratio": ratio,
            "predicted": expected,
            "off": expected / ratio - 1,
            "each": each,
            "updates": statistics.median(updates_take(a) / updates_take(b) for a, b in pairs),
            "updates_predicted": statistics.median(one["updates"] for one in said),
        }
    return made


def report(found: Mapping[str, Any], facts: Mapping[str, Any], folder: Path) -> None:
    """Print the table, and write it."""
    rows = [
        (
            name,
            f"{1e3 * each['iteration']:.0f} ms",
            f"{each['ratio']:.2f}",
            f"{each['predicted']:.2f}",
            f"{100 * each['off']:+.1f} %",
            " ".join(f"{ratio:.2f}" for ratio in each["each"]),
            f"{each['updates']:.2f}",
            f"{each['updates_predicted']:.2f}",
        )
        for name, each in found.items()
    ]
    print(text_table(HEADER, rows))
    worst = max(abs(each["off"]) for each in found.values())
    best = min(found, key=lambda name: found[name]["ratio"])
    reached = "met" if worst <= CLOSE else "NOT met"
    end = f"an iteration takes {found[best]['ratio']:.2f} of the unstreamed with {best}; the "
    end += f"prediction is off by {worst:.1%} at the most (target {CLOSE:.0%}: {reached})"
    print(end)
    page = markdown_report(
        "Groups that flow into one step", facts, [markdown_table(HEADER, rows), end], NOTES
    )
    write_results(folder, "flowing", {"machine": dict(facts), "found": dict(found)}, page)


def main() -> None:
    """Measure the sides in turns, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--placements", nargs="*", default=list(SIDES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ["RLFLOW_COSTS"] = "off"
    if given.side:
        found = side(given.side, given.iterations)
        found["own"] = replayed(given.side, found)
        given.out.write_text(json.dumps(found), encoding="utf-8")
        return
    facts = machine()
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in given.placements}
    for number in range(given.turns):
        for name, found in turns.items():
            say(f"{name}: turn {number + 1} of {given.turns}")
            words = ["--side", name, "--iterations", str(given.iterations)]
            found.append(apart(__file__, words, f"flowing-{name}-{number}"))
            assert found[0]["length"] == turns[WHOLE][0]["length"], "sides have other samples"
    facts["load at the end"] = machine()["load"]
    report(figures(turns), facts, given.results)


if __name__ == "__main__":
    main()
