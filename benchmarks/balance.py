"""How even the rows of two replicas are that move rows, and what was predicted of it.

Counted are the live rows of the replica that has most, summed over turns, in each of which every
live row gets a token, and the rows that move.

python benchmarks/balance.py --iterations 24
"""

from __future__ import annotations

from counted import GROUPS, Counting, Found, N, means, rollouts
from pipelines.tails import LONGEST, MEAN, SPREAD

REPLICAS = 2
# Rows are evened after every so many turns; after so many as no row has they stay.
NEVER = 100_000
EVERY = (NEVER, 64, 16)
COUNTED = ("row_turns", "moved")
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
    settings = {"prompts_per_iteration": GROUPS, "balance": every}
    rows = rollouts(f"balance-{every}", settings, "replicas", "cpu:3", iterations)
    kinds = (*COUNTED, "turns", "length")
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


def table(found: Found) -> tuple[list[list[str]], float]:
    """Its lines, and by how much of the fullest replica's rows a prediction is off."""
    rows, worst = [], 0.0
    stay = means(found[NEVER], COUNTED)["row_turns"]
    for every, each in found.items():
        counted, said = means(each, COUNTED), each["predicted"]
        worst = max(worst, abs(said["row_turns"] / counted["row_turns"] - 1))
        turns = [f"{counted['row_turns']:.0f}", f"{said['row_turns']:.0f}"]
        share = f"{counted['row_turns'] / stay:.3f}"
        moved = [f"{counted['moved']:.1f}", f"{said['moved']:.1f}"]
        rows.append(["they stay" if every == NEVER else str(every), *turns, share, *moved])
    return rows, worst


BALANCE = Counting(
    name="balance",
    title="Replicas that move rows",
    header=HEADER,
    notes=NOTES,
    cases={every: f"rows are evened after every {every} turns" for every in EVERY},
    measured=measured,
    predicted=predicted,
    table=table,
    of=" of rows",
)

if __name__ == "__main__":
    BALANCE.main(iterations=24)
