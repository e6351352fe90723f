"""Bodies that make pairs of the samples of a group, and score samples with a reward model."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import lengths
from rlflow.contract.values import Stat
from rlflow.ops.bodies.common import MASK, inputs_of, model_of, num_rows, padded_fields
from rlflow.ops.bodies.finite import finite_inputs
from rlflow.ops.bodies.stats import max_of, mean_of, min_of, std_of
from rlflow.ops.bodies.steps.batchwise import scored
from rlflow.ops.body import Call, Output
from rlflow.ops.math.pairs import best_against_worst, penalise_unfinished


def pair(call: Call) -> Output:
    """The best row of every group against its worst; metrics are shares of the groups."""
    inputs, params = finite_inputs(call), call.params
    fields = padded_fields(inputs, ("reward", "group", "sample", "finished", MASK))
    reward = fields["reward"].double()
    penalty = params.get("missing_eos_penalty")
    if penalty is not None:
        reward = penalise_unfinished(reward, fields["finished"], penalty)
    found = best_against_worst(
        reward,
        fields["group"],
        valid=fields["finished"] if "require_eos" in params else None,
        usable=fields[MASK].any(-1),
        order=fields.get("sample"),
    )
    groups = found.kept + found.ties + found.invalid + found.single
    counts = {"pairs": found.kept, "ties": found.ties, "invalid": found.invalid}
    counts["single"] = found.single
    metrics: dict[str, Stat | float] = {
        name: Stat(kind="mean", total=float(number), count=float(groups))
        for name, number in counts.items()
    }
    metrics["margin"] = mean_of(found.margin[found.chosen])
    made = {"pair": found.pair, "chosen": found.chosen, "pair_margin": found.margin.float()}
    return Output(fields=made, rows=num_rows(inputs), metrics=metrics)


def scores(call: Call) -> Output:
    """The value that the model gives each whole response, read after its last token."""
    inputs = inputs_of(call)
    longer = scored(inputs)
    values: Tensor = model_of(call).forward(longer, outputs=("values",), temperature=1.0)["values"]
    made = values[lengths(longer["response_tokens"]).cumsum(0) - 1].to(torch.float32)
    metrics = {"mean": mean_of(made), "std": std_of(made)}
    metrics |= {"min": min_of(made), "max": max_of(made)}
    return Output(fields={call.outputs[0]: made}, rows=num_rows(inputs), metrics=metrics)
