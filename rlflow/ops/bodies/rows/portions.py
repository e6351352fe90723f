"""The body that puts the parts of a rollout together; it has all rows of each."""

from __future__ import annotations

from rlflow.batch import concat_rows, make_batch
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.bodies.rollout import sample_metrics
from rlflow.ops.bodies.rows.continuous import generation
from rlflow.ops.body import Call, Output


def put_together(call: Call) -> Output:
    """The rows of all parts in the order of their prompts, every field as it is.

    Numbers of groups and samples are those of the whole rollout already. Logs what one rollout
    of all prompts logs.
    """
    parts = (inputs_of(call), *call.others)
    names = sorted({*call.wanted, "response_tokens", "rollout_log_probs", "finished"})
    columns = [make_batch({name: part[name] for name in names}, num_rows(part)) for part in parts]
    made = concat_rows(columns)
    fields = {name: made[name] for name in sorted(call.wanted)}
    return Output(
        fields=fields, rows=num_rows(made), metrics=sample_metrics(call, generation(made))
    )
