"""Bodies of loops: which groups are worth keeping, when a loop is over, and what it leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import concat_rows, select_field, select_rows
from rlflow.contract.values import Stat
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.bodies.finite import finite_inputs
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.body import Call, Output

BINS = 5


def informative(call: Call) -> Output:
    """Rows of groups whose rewards differ; a row that is not valid has none.

    Raises RunError for a reward that is not finite.
    """
    inputs = finite_inputs(call)
    reward, group = inputs["reward"], inputs["group"]
    names, member = torch.unique(group, return_inverse=True)
    low, high = reward.new_full((2, len(names)), torch.inf)
    rated = inputs["valid"] if "valid" in inputs.keys() else torch.ones_like(member).bool()  # noqa: SIM118
    low = low.scatter_reduce(0, member[rated], reward[rated], "amin")
    high = -high.scatter_reduce(0, member[rated], -reward[rated], "amin")
    differs = high > low
    share = {"share": mean_of(differs)} if len(names) else {}
    return Output(fields={"informative": differs[member]}, rows=len(reward), metrics=share)


def groups_reached(call: Call) -> Output:
    """How many groups of a trip count: those of which every row does, and what was left over."""
    inputs = inputs_of(call)
    kept = wanted_groups(inputs[call.params["when"]], inputs["group"])
    left = 0 if call.surplus is None else torch.unique(call.surplus["group"]).numel()
    return Output(metrics={"reached": float(len(kept) + left)})


def all_done(call: Call) -> Output:
    """1 where every row is done."""
    done = inputs_of(call)[call.params["when"]]
    return Output(metrics={"reached": float(bool(done.all()))})


def wanted_groups(flag: Tensor, group: Tensor) -> Tensor:
    """The groups of which every row has a true flag, int64, in the order of their first row."""
    names, member = torch.unique(group, return_inverse=True)
    every = torch.ones(len(names), dtype=torch.bool)
    every = every.index_put((member[~flag],), torch.tensor(False))
    first = torch.full((len(names),), len(group))
    first = first.scatter_reduce(0, member, torch.arange(len(group)), "amin")
    order = torch.argsort(first)
    wanted: Tensor = names[order][every[order]]
    return wanted


def gather(call: Call) -> Output:
    """The rows of the first groups that count, in the order of trips, after those left over.

    Raises RunError with what every trip has found where there are too few of them.
    """
    inputs, params = inputs_of(call), call.params
    if call.surplus is not None:
        inputs = concat_rows([call.surplus, inputs])
    group, wanted = inputs["group"], int(params["batch"])
    kept = wanted_groups(inputs[params["when"]], group)
    found = len(kept)
    if found < wanted:
        if params["exhausted"] == "error":
            raise RunError(_exhausted(call, group, found))
        others = wanted_groups(torch.ones_like(group, dtype=torch.bool), group)
        others = others[~torch.isin(others, kept)]
        kept = torch.cat([kept, others])
    chosen = _rows_of(kept[:wanted], group)
    fields = {name: select_field(inputs[name], chosen) for name in call.wanted}
    left = None
    if params.get("surplus") == "keep" and found > wanted:
        left = select_rows(inputs, _rows_of(kept[wanted : 2 * wanted], group))
    groups = torch.unique(group).numel()
    metrics = {
        "trips": float(call.trips),
        "kept": found / max(groups, 1),
        "surplus": float(max(found - wanted, 0)),
        "filled": float(max(wanted - found, 0)),
    }
    return Output(fields=fields, rows=len(chosen), metrics=metrics, surplus=left)


def _rows_of(groups: Tensor, group: Tensor) -> Tensor:
    """The rows of some groups, int64, in their order; `groups` are distinct."""
    rank = torch.argsort(groups)
    at = torch.searchsorted(groups[rank], group).clamp(max=max(len(groups) - 1, 0))
    member = rank[at]
    chosen = torch.nonzero(groups[member] == group).flatten()
    return chosen[torch.argsort(member[chosen], stable=True)]


def last(call: Call) -> Output:
    """The rows as the last trip has left them."""
    inputs = inputs_of(call)
    done = inputs[call.params["when"]]
    fields = {name: inputs[name] for name in call.wanted}
    metrics: dict[str, float | Stat] = {"trips": float(call.trips), "done": mean_of(done)}
    return Output(fields=fields, rows=num_rows(inputs), metrics=metrics)


def _exhausted(call: Call, group: Tensor, found: int) -> Finding:
    inputs, params = inputs_of(call), call.params
    groups = torch.unique(group).numel()
    lines = [f"{found} of {groups} groups in {call.trips} trips have {params['when']}"]
    if "reward" in inputs.keys():  # noqa: SIM118  a TensorDict iterates over rows, not keys
        lines += _histogram(inputs["reward"], group)
    return Finding(
        code="E766",
        what=f"{call.node}: {params['at_most']} trips did not bring {params['batch']} groups in "
        f"iteration {call.iteration}",
        where=call.where,
        got="\n".join(lines),
        expected=f"{params['batch']} groups with a true {params['when']}",
        fix='a larger at_most, a larger batch of prompts, other prompts, or exhausted="fill"',
    )


def _histogram(reward: Tensor, group: Tensor) -> list[str]:
    """How many groups have which mean reward, a line a bin; rows without a reward are NaN."""
    names, member = torch.unique(group, return_inverse=True)
    rated = reward.isfinite()
    total = torch.zeros(len(names), dtype=torch.float64)
    total = total.index_add(0, member[rated], reward[rated].double())
    count = torch.bincount(member[rated], minlength=len(names))
    without = int((count == 0).sum())
    lines = [f"no reward: {_groups(without)}"] if without else []
    mean = total[count > 0] / count[count > 0]
    if not len(mean):
        return lines
    low, high = float(mean.min()), float(mean.max())
    if low == high:
        return [f"mean reward {low:.3g}: {_groups(len(mean))}", *lines]
    width = (high - low) / BINS
    bins = ((mean - low) / width).long().clamp(max=BINS - 1)
    counts = torch.bincount(bins, minlength=BINS).tolist()
    found = [
        f"mean reward {low + width * b:.3g} to {low + width * (b + 1):.3g}: {_groups(here)}"
        for b, here in enumerate(counts)
    ]
    return [*found, *lines]


def _groups(count: int) -> str:
    return f"{count} group{'' if count == 1 else 's'}"
