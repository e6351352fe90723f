"""What a rollout makes beside tokens, and of which of its prompts, as its options say.

Contracts only; nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlflow.graph.fields import row
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op
from rlflow.graph.trace import Handle
from rlflow.ops.rows.experts import known_routing, recording
from rlflow.ops.rows.oversampling import together
from rlflow.ops.rows.pictures import pictures_of, seeing


def rolled(
    op: Op,
    model: Model,
    prompts: tuple[Handle, ...],
    routing: str | None,
    shared: tuple[int | None, int | None],
    *,
    drafted: bool,
) -> tuple[Op, dict[str, Any]]:
    """A rollout with what it makes of experts, pictures and its prompts' fields; and its options.

    How its replicas are `shared` by rows: `first_groups` and `balance`.
    Reports E118 for options that do not go together.
    """
    records = known_routing("a rollout", routing, ("record",), drafted=drafted)
    made = recording(op, model) if records else op
    params: dict[str, Any] = {"routing": routing} if records else {}
    if images := pictures_of("a rollout", prompts, drafted=drafted):
        made, params = seeing(made, model), {**params, "images": images}
    if any(option is not None for option in shared):
        made, chosen = together(made, prompts, *shared, drafted=drafted)
        params |= chosen
    return _carrying(made, prompts), params


def _carrying(op: Op, prompts: tuple[Handle, ...]) -> Op:
    """A rollout that reads every row field of its prompts, and repeats it in its rows."""
    made = {field.name for field in op.outputs}
    offered = {offer.name: offer for handle in prompts for offer in handle.offers}
    carried = [o for o in offered.values() if o.field.level == "row" and o.name not in made]
    read = tuple(Input(name=o.name, dtype=o.field.dtype, levels=("row",)) for o in carried)
    outputs = (*op.outputs, *(row(o.name, o.field.dtype) for o in carried))
    return replace(op, inputs=read or op.inputs, outputs=outputs)
