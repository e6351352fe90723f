"""What a rollout saves that begins more groups than its batch has, and what was predicted of it.

Counted are turns, in each of which every live row gets a token, tokens that are decoded, and tokens
of the rows that stay.

python benchmarks/oversample.py --iterations 48
"""

from __future__ import annotations

from counted import GROUPS, Counting, Found, N, means, rollouts
from pipelines.tails import LONGEST, MEAN, SPREAD

BEGUN = (16, 18, 20, 24, 32)
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
    settings = {"prompts_per_iteration": begun, "first_groups": GROUPS}
    rows = rollouts(f"oversample-{begun}", settings, "split", "cpu:2", iterations)
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


def table(found: Found) -> tuple[list[list[str]], float]:
    """Its lines, and by how much a prediction is off."""
    rows, worst = [], 0.0
    drained = means(found[GROUPS], COUNTED)["turns"]
    for begun, each in found.items():
        counted, said = means(each, COUNTED), each["predicted"]
        worst = max(worst, *(abs(said[name] / counted[name] - 1) for name in COUNTED))
        cells = [[f"{counted[name]:.1f}", f"{said[name]:.1f}"] for name in COUNTED]
        share = f"{counted['turns'] / drained:.2f}"
        rows.append([str(begun), *cells[0], share, *cells[1], *cells[2]])
    return rows, worst


OVERSAMPLE = Counting(
    name="oversample",
    title="Rollouts that drop who is late",
    header=HEADER,
    notes=NOTES,
    cases={begun: f"{begun} groups begin" for begun in BEGUN},
    measured=measured,
    predicted=predicted,
    table=table,
)

if __name__ == "__main__":
    OVERSAMPLE.main(iterations=48)
