"""Bodies that make a row set of others; they have all rows of what they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlflow.batch import Batch, concat_rows, lengths, make_batch, ragged, select_rows
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.body import Call, Output

# Numbers of groups and rows that one draw may have, so that those of two draws are never equal.
OF_A_DRAW = 1 << 32


def concat(call: Call) -> Output:
    """The rows of all parts in their order; rows of one group together where parts share them."""
    parts = (inputs_of(call), *call.others)
    shared = call.params.get("groups") == "shared"
    fill = dict(call.params["fill"].values) if "fill" in call.params else {}
    names = sorted(call.wanted - {"group", "sample"})
    columns = [{name: _column(name, part, parts, fill) for name in names} for part in parts]
    if shared:
        columns = [
            column | {"group": part["group"]} for column, part in zip(columns, parts, strict=True)
        ]
    elif "group" in call.wanted:
        numbers = groups_apart(parts, call.drawn * OF_A_DRAW)
        columns = [
            column | {"group": number} for column, number in zip(columns, numbers, strict=True)
        ]
    made = concat_rows(
        [make_batch(column, num_rows(part)) for column, part in zip(columns, parts, strict=True)]
    )
    rows = num_rows(made)
    if shared:
        made = select_rows(made, torch.argsort(made["group"], stable=True))
    fields = {name: made[name] for name in call.wanted if name != "sample"}
    if "sample" in call.wanted:
        fields["sample"] = torch.arange(rows) + call.drawn * OF_A_DRAW
    return Output(fields=fields, rows=rows)


def groups_apart(parts: Sequence[Batch], first: int) -> list[Tensor]:
    """Numbers of the groups of parts, none of two parts alike; rows in no group are one each."""
    made = []
    for part in parts:
        own = torch.arange(num_rows(part))
        if "group" in part.keys():  # noqa: SIM118  a TensorDict iterates over rows, not keys
            own = torch.unique(part["group"], return_inverse=True)[1]
        made.append(own + first)
        first += int(own.max()) + 1 if len(own) else 0
    return made


def _column(
    name: str, part: Batch, parts: Sequence[Batch], fill: Mapping[str, float | int | bool]
) -> Tensor:
    """A field of one part: its own, or the number that fills it, of the others' type."""
    found: Tensor | None = part.get(name, None)
    if found is not None:
        return found
    like = next(other[name] for other in parts if name in other.keys())  # noqa: SIM118
    if not like.is_nested:
        return torch.full((num_rows(part),), fill[name], dtype=like.dtype)
    sizes = lengths(part["response_tokens"])
    return ragged(torch.full((int(sizes.sum()),), fill[name], dtype=like.dtype), sizes)
