"""The body of a replay buffer: it has all rows of an iteration, and keeps those of some before."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import Batch, concat_rows, make_batch, select_field, select_rows
from rlflow.contract.values import Stat
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.bodies.rows.choices import groups_in_order, groups_of
from rlflow.ops.bodies.rows.sets import OF_A_DRAW
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.body import Call, Output

MADE_IN = "made in"
"""The iteration in which a kept row was made; no field of a user has a blank in its name."""


def replay(call: Call) -> Output:
    """Some groups of all rows there are; what is young enough is kept for the next iteration."""
    inputs, params = inputs_of(call), call.params
    now = make_batch(dict(inputs.items()), num_rows(inputs))
    now[MADE_IN] = torch.full((num_rows(inputs),), call.iteration)
    known = now if call.memory is None else concat_rows([_like(call.memory, now), now])
    group = _apart(known)
    names = groups_in_order(group)
    if params.get("fresh", True):
        first = 0
    else:
        current = groups_in_order(group[known[MADE_IN] == call.iteration])
        first = max(len(names) - len(current), 0)
    chosen = _drawn(call, names, first, int(params["sample"]))
    rows = torch.nonzero(torch.isin(group, chosen)).flatten()
    fields = {name: select_field(known[name], rows) for name in call.wanted - {"sample"}}
    if "group" in fields:
        fields["group"] = group[rows] + call.drawn * OF_A_DRAW
    if "sample" in call.wanted:
        fields["sample"] = torch.arange(len(rows)) + call.drawn * OF_A_DRAW
    young = torch.nonzero(known[MADE_IN] > call.iteration - int(params["keep"])).flatten()
    left = select_rows(known, young)
    ages = (call.iteration - known[MADE_IN][rows]).double()
    metrics: dict[str, Stat | float] = {"age": mean_of(ages), "held": float(num_rows(left))}
    return Output(fields=fields, rows=len(rows), metrics=metrics, memory=left)


def _drawn(call: Call, names: Tensor, first: int, wanted: int) -> Tensor:
    """So many groups: of the first ones, and of the others where those are too few."""
    order = torch.as_tensor(call.permutation(len(names), "replay"), dtype=torch.int64)
    preferred = order[order < first] if first else order
    others = order[order >= first] if first else order[:0]
    return names[torch.cat([preferred, others])[:wanted]]


def _apart(known: Batch) -> Tensor:
    """Numbers of the groups, int64: those of two iterations are never alike."""
    pairs = torch.stack([known[MADE_IN], groups_of(known)], 1)
    group: Tensor = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return group


def _like(memory: Batch, now: Batch) -> Batch:
    """What was kept, its fields in the order of those of now."""
    names = list(now.keys())
    return make_batch({name: memory[name] for name in names}, num_rows(memory))
