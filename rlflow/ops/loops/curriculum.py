"""Pass rates of prompts as they are measured, and prompts drawn by them.

Contracts only: what is kept and how weights follow is in `rlflow.ops.bodies.loops.curriculum`.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from rlflow.data import DataSource
from rlflow.data.sources import ROW_ID
from rlflow.errors import Finding, known_names, near_names
from rlflow.graph.op import Input, Op, register
from rlflow.graph.roles import Sharing
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, declared_names, declared_node, report_finding
from rlflow.ops.missing_reward import on_valid_rows
from rlflow.ops.spec import Spec

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DRAWN = "rlflow.ops.bodies.loops.curriculum:prompts_by_pass_rate"
TRACK = register(
    Op(
        name="track",
        body="rlflow.ops.bodies.loops.curriculum:track",
        roles=(Sharing,),
        inputs=(Input(name="reward", dtype="float32", levels=("row",)),),
        outputs=(),
        per="batch",
        rows="none",
        effect="effectful",
    )
)


class PassRates(Spec):
    """Pass rates of prompts, measured in buckets, and the draws that follow from them.

    A bucket is the rows with one value of the column `by`, or one row each. `ops.track` measures,
    and `ops.prompts(..., weights=...)` draws by what is measured. With p the pass rate of a
    bucket, its share of the draws is

        floor / buckets + (1 - floor) * weight(p) / sum of weight(p)

    with weight(p) = p (1 - p) for `learnability` (Foster and Foerster 2025, arXiv 2502.12272,
    section 3: the variance of a reward that is 0 or 1), and 1 - p for `difficulty`. Where all
    weights are 0 the shares are equal.

    The pass rate is (prior * prior_samples + passed) / (prior_samples + seen). Here `passed` and
    `seen` sum over samples, and each newer batch with samples of the bucket multiplies those
    before it by `decay`.
    """

    name: str
    """The name of the op that tracks them."""
    by: str = ROW_ID
    weight: Literal["learnability", "difficulty"] = "learnability"
    floor: Share = 0.1
    """The part of all draws that goes to all buckets alike."""
    decay: Share = 0.9
    """What older samples count for; 1 for all alike, 0 for those of one batch only."""
    prior: Share = 0.5
    """The pass rate of a bucket without samples."""
    prior_samples: Above = 1.0
    """How many samples the prior counts for."""
    threshold: float | None = Field(default=None, allow_inf_nan=False)
    """A sample passes with a reward of this or more; None: its reward, from 0 to 1, is a part."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(**{"name": name, **options})


def track(passes: PassRates, *handles: Handle) -> Handle:
    """Measure pass rates of an iteration's samples, by which `ops.prompts` draws.

    Reads `reward` and the column that `passes` is by. Samples that are not `valid` are left out.
    In iteration i it writes version i + 1 of the pass rates. With staleness k, prompts of
    iteration i read version i - k, as rollouts do of their weights.
    """
    known = [name for name in declared_names() if declared_node(name).shares == passes.name]
    again = any(declared_node(name).op.name == TRACK.name for name in known)
    by_id = passes.by == ROW_ID
    key = Input(name=passes.by, dtype="int64" if by_id else "text", levels=("row",))
    op = replace(TRACK, inputs=(*TRACK.inputs, key))
    op, handles, validity = on_valid_rows(op, handles)
    params = {"weights": passes, "state": passes.name, **validity}
    return add_node(op, handles, params=params, name=f"{passes.name}_2" if again else passes.name)


def drawn_by_pass_rates(op: Op, data: DataSource, weights: PassRates) -> tuple[Op, dict[str, Any]]:
    """The op that draws prompts by pass rates, and its options.

    Reports a column that the data lacks.
    """
    columns = (*data.columns, ROW_ID)
    if weights.by not in columns:
        near = near_names(weights.by, columns)
        report_finding(
            Finding(
                code="E644",
                what=f"pass rates {weights.name!r} are by {weights.by!r}, which the data lacks",
                where=declared_at(),
                got=f"columns of {data.describe()}: {known_names(columns)}",
                near=near,
                fix=f'by="{near[0]}"' if near else f'by="{ROW_ID}"',
            )
        )
    return replace(op, body=DRAWN), {"weights": weights, "state": weights.name}
