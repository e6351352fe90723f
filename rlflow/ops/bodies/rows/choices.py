"""Bodies that keep, repeat or divide rows; they have all rows of what they read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.batch import Batch, select_field
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.bodies.loops.loops import wanted_groups
from rlflow.ops.bodies.rows.sets import OF_A_DRAW
from rlflow.ops.body import Call, Output


def keep(call: Call) -> Output:
    """The rows or groups whose flag is true, in their order; filled up where too few are."""
    inputs, params = inputs_of(call), call.params
    flag, group = inputs[params["by"]], groups_of(inputs)
    if params["per"] == "group":
        flag = torch.isin(group, wanted_groups(flag, group))
    exact = params.get("groups")
    wanted = int(params["at_least"] if exact is None else exact)
    found = groups_in_order(group[flag])
    if len(found) < wanted and params.get("short") != "fill":
        raise RunError(_too_few(call, len(found), wanted))
    filled = max(wanted - len(found), 0)
    if filled:
        others = groups_in_order(group)
        others = others[~torch.isin(others, found)][:filled]
        flag = flag | torch.isin(group, others)
    if exact is not None:
        flag = flag & torch.isin(group, groups_in_order(group[flag])[:wanted])
    chosen = torch.nonzero(flag).flatten()
    metrics = {"kept": len(chosen) / max(len(group), 1), "filled": float(filled)}
    return _chosen(call, inputs, chosen, metrics)


def duplicate(call: Call) -> Output:
    """Every row several times: after itself in its group, or after all others in one of its own."""
    inputs, times = inputs_of(call), int(call.params["times"])
    rows = torch.arange(num_rows(inputs))
    if call.params["groups"] == "shared":
        return _chosen(call, inputs, rows.repeat_interleave(times), {}, anew=True)
    _, member = torch.unique(groups_of(inputs), return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    copies = torch.cat([member + count * copy for copy in range(times)])
    made = _chosen(call, inputs, rows.repeat(times), {}, anew=True)
    if "group" not in call.wanted:
        return made
    fields = {**made.fields, "group": copies + call.drawn * OF_A_DRAW}
    return Output(fields=fields, rows=made.rows)


def split(call: Call) -> Output:
    """The rows of the groups of one part."""
    inputs, (first, last) = inputs_of(call), call.params["groups"]
    group = groups_of(inputs)
    own = groups_in_order(group)[first:last]
    return _chosen(call, inputs, torch.nonzero(torch.isin(group, own)).flatten(), {})


def groups_of(inputs: Batch) -> Tensor:
    """The group of every row, int64; rows that are in none are one each."""
    found: Tensor | None = inputs.get("group", None)
    return torch.arange(num_rows(inputs)) if found is None else found


def groups_in_order(group: Tensor) -> Tensor:
    """The distinct groups, int64, in the order of their first row."""
    return wanted_groups(torch.ones_like(group, dtype=torch.bool), group)


def _chosen(
    call: Call,
    inputs: Batch,
    rows: Tensor,
    metrics: Mapping[str, float],
    *,
    anew: bool = False,
) -> Output:
    fields = {name: select_field(inputs[name], rows) for name in call.wanted}
    if anew and "sample" in fields:
        fields["sample"] = torch.arange(len(rows)) + call.drawn * OF_A_DRAW
    return Output(fields=fields, rows=len(rows), metrics=metrics)


def _too_few(call: Call, found: int, wanted: int) -> Finding:
    what = "groups" if "group" in inputs_of(call).keys() else "rows"  # noqa: SIM118
    return Finding(
        code="E790",
        what=f"{call.node}: too few {what} stay in iteration {call.iteration}",
        where=call.where,
        got=f"{found} with a true {call.params['by']}",
        expected=f"{wanted} or more",
        fix='short="fill", a smaller number, or ops.repeat to draw until there are enough',
    )
