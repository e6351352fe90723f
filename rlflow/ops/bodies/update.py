"""The body of `update`: mini-batches, epochs, and the loss of each micro-batch.

The engine cuts a mini-batch into micro-batches as it likes; the loss is scaled by the
counts of the whole mini-batch, all parts together, so the gradient is the same for every cut.
What a loss chooses among the tokens of a mini-batch is chosen before it is cut (`selection`).
A loss of no rows is 0.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.batch import Batch, flat, lengths, make_batch, pad, ragged_like, select_rows, to_device
from rlflow.contract.values import Stat, StepResult
from rlflow.errors import Finding, NumericsError, RunError
from rlflow.ops.bodies.common import (
    MASK,
    model_of,
    num_rows,
    padded_fields,
    row_numbers,
    total_rows,
)
from rlflow.ops.bodies.finite import finite_inputs, spoiled
from rlflow.ops.bodies.stats import max_of, mean_of
from rlflow.ops.bodies.steps import adaptive
from rlflow.ops.bodies.steps.batchwise import prepared
from rlflow.ops.bodies.steps.in_calls import in_calls, step_in_calls
from rlflow.ops.bodies.steps.selection import numbered, selected
from rlflow.ops.body import Call, Output
from rlflow.ops.losses.losses import Loss, PolicyLoss
from rlflow.ops.losses.preference import BatchwiseLoss
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.math.diagnostics import finished
from rlflow.ops.math.losses.batchwise import SHARES, SLOPES
from rlflow.ops.math.losses.mismatch import step_sums

if TYPE_CHECKING:
    from rlflow.contract.values import LossFunction

READ_BY_LOSSES = (
    MASK,
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "age",
    "values",
    "returns",
    "chosen",
    "covariance",
    "uncertain",
    "teacher_log_probs",
    "top_log_probs",
    "top_ids",
    "top_rest",
    SLOPES,
    SHARES,
)


def update(call: Call) -> Output:
    """Train on the batch: `epochs` times `mini_batches` optimizer steps.

    Every part makes every step, without a row of its own where it has none of a mini-batch.
    Raises NumericsError where every step had to be skipped because a number was not finite; a
    single skipped step is counted in the metrics. Raises RunError for a field that is not finite
    and for a sample that is older than declared. Where the steps of an iteration take several
    calls, or its one step does, the last one of these logs the numbers of all.
    """
    batch, model, params = finite_inputs(call), model_of(call), call.params
    ages = staleness(call, batch)
    spec: Loss = params["loss"]
    if isinstance(spec, PolicyLoss):
        require_whole(call, spec, batch)
        spec = spec.model_copy(update={"old": params["old"]})
        if spec.old == "loglinear":
            batch = with_age(call, batch)
    at_first = {**adaptive.acting(spec, call.state), "lr": model.learning_rate}
    carried = call.carried if call.piece[1] > 1 else {}
    at_first = carried.setdefault("at first", at_first)
    steps: list[StepResult] = carried.setdefault("steps", [])
    batch = numbered(spec, batch, row_numbers(call))
    made = _added_up(call, spec, batch) if in_calls(call) else _stepped(call, spec, batch, steps)
    for step, totals in made:
        steps.append(step)
        if step.applied:
            adaptive.follow(spec, call.state, step.metrics, totals)
    if call.piece[0] + 1 < call.piece[1]:
        return Output(metrics=ages)
    if not any(step.applied for step in steps):
        raise NumericsError(_not_finite(call, steps))
    return Output(metrics={**step_metrics(steps), **at_first, **ages})


def _stepped(
    call: Call, spec: Loss, batch: Batch, before: list[StepResult]
) -> Iterator[tuple[StepResult, Totals]]:
    """An optimizer step on each mini-batch, after those `before`, and what it covers."""
    for number, cut in enumerate(cut_mini_batches(call, batch), len(before)):
        if isinstance(spec, BatchwiseLoss):
            mini = prepared(call, spec, cut)
        else:
            mini = selected(call, spec, cut, number)
        totals = step_totals(call, spec, mini)
        step = model_of(call).step(
            mini,
            loss_function(adaptive.at_this_step(spec, call.state), totals),
            outputs=spec.outputs(),
            temperature=call.params.get("temperature", 1.0),
            max_grad_norm=call.params["max_grad_norm"],
        )
        yield step, totals


def _added_up(call: Call, spec: Loss, batch: Batch) -> Iterator[tuple[StepResult, Totals]]:
    """The one optimizer step of all calls, in the last of them."""
    totals, acting = step_totals(call, spec, batch), adaptive.at_this_step(spec, call.state)
    made = step_in_calls(call, spec, batch, totals, functools.partial(loss_function, acting))
    if made is not None:
        yield made


def step_totals(call: Call, spec: Loss, mini: Batch) -> Totals:
    """The counts of an optimizer step over all parts, and other sums that its loss asks for."""
    sums = step_sums(spec, lambda: padded_fields(mini, READ_BY_LOSSES))
    own = [float(flat(mini[MASK]).sum()), float(num_rows(mini)), *sums.values()]
    tokens, rows, *others = call.peers.sum(own)
    return Totals(tokens=tokens, rows=rows, sums=dict(zip(sums, others, strict=True)))


def with_age(call: Call, batch: Batch) -> Batch:
    """The batch with how many updates the weights here are ahead of those of each token."""
    versions = batch["version"]
    fields = {name: batch[name] for name in batch.keys()}  # noqa: SIM118  a TensorDict
    fields["age"] = ragged_like(ages_of(call, flat(versions)), versions)
    return make_batch(fields, num_rows(batch))


def ages_of(call: Call, versions: Tensor) -> Tensor:
    """How many updates of the model each of int64 `versions` is old."""
    known, places = versions.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    ages = [call.updates_since(int(version)) for version in known]
    return torch.tensor(ages, dtype=torch.int64)[places]


def staleness(call: Call, batch: Batch) -> dict[str, Stat]:
    """How many updates old the tokens here are, where they say their version.

    Raises RunError where one that counts is older than the node's `staleness`.
    """
    versions = batch.get("version", None)
    if versions is None:
        return {}
    counted = flat(versions)[flat(batch[MASK])]
    ages, allowed = ages_of(call, counted), call.params.get("staleness", 0)
    if len(ages) and int(ages.max()) > allowed:
        raise RunError(
            Finding(
                code="E764",
                what=f"{call.node}: a sample of iteration {call.iteration} is older than declared",
                where=call.where,
                got=f"version {int(counted.min())}, {int(ages.max())} updates old",
                expected=f"version {max(call.iteration - allowed, 0)} or newer: "
                f"staleness={allowed}",
                fix="report it as a bug: a plan never trains on older samples than it says",
            )
        )
    return {"staleness/mean": mean_of(ages), "staleness/max": max_of(ages)}


def require_whole(call: Call, spec: PolicyLoss, batch: Batch) -> None:
    """Raise RunError where a KL over the vocabulary lacks some of the reference's tokens.

    The compiler refuses it where it knows the vocabulary.
    """
    if spec.full_kl and bool(torch.isfinite(flat(batch["top_rest"])[flat(batch[MASK])]).any()):
        raise RunError(
            Finding(
                code="E637",
                what=f"{call.node}: kl='full' sums over the vocabulary, and some of it is missing",
                where=call.where,
                got=f"the {flat(batch['top_ids']).shape[-1]} likeliest tokens of the reference",
                expected="top_k as large as the vocab_size of its config.json",
                fix="an estimate: kl='k3'",
            )
        )


def cut_mini_batches(call: Call, batch: Batch) -> Iterator[Batch]:
    """The mini-batches of all epochs, of each the rows that are here; groups stay together.

    They are cut from the groups of all parts, so they do not depend on who has which rows.
    """
    epochs, parts = call.params["epochs"], call.params["mini_batches"]
    if not call.params.get("shuffle", True):
        for _ in range(epochs):
            yield from _in_order(call, batch)
        return
    if parts == 1:
        for _ in range(epochs):
            yield batch
        return
    groups = batch.get("group", None)
    if groups is None:
        groups = row_numbers(call)
    names = call.peers.union(groups)
    member = torch.searchsorted(names, groups.contiguous())
    for epoch in range(epochs):
        order = torch.as_tensor(call.permutation(len(names), "mini-batches", epoch))
        for chosen in order.chunk(parts):
            rank = torch.full((len(names),), -1)
            rank[chosen] = torch.arange(len(chosen))
            rows = torch.argsort(rank[member], stable=True)
            yield select_rows(batch, rows[(rank[member] < 0).sum() :])


def _in_order(call: Call, batch: Batch) -> Iterator[Batch]:
    """The mini-batches of one pass over the rows of this call, each the next part of all rows.

    A group belongs to the mini-batch of its first row. Of several calls each has its share of the
    rows, and so of the mini-batches.
    """
    index, count = call.piece
    parts, numbers = call.params["mini_batches"], row_numbers(call)
    groups = batch.get("group", None)
    if groups is None:
        groups = numbers
    known, member = torch.unique(groups, return_inverse=True)
    own = torch.full((len(known),), total_rows(call)).scatter_reduce(0, member, numbers, "amin")
    met = call.peers.gather(torch.stack((known, own), 1).double()).long()
    names, places = torch.unique(met[:, 0], return_inverse=True)
    first = torch.full((len(names),), total_rows(call)).scatter_reduce(0, places, met[:, 1], "amin")
    place = first[torch.searchsorted(names, groups.contiguous())] * parts // total_rows(call)
    for part in range(parts * index // count, parts * (index + 1) // count):
        yield select_rows(batch, (place == part).nonzero().flatten())


def loss_function(spec: Loss, totals: Totals) -> LossFunction:
    """The loss of one micro-batch in the reference form, scaled by the step's totals.

    It is computed where the outputs of the forward are; rows come from the host.
    """
    objective = pkgutil.resolve_name(spec.body)

    def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        sizes = lengths(micro["response_tokens"])
        padded = {name: pad(value, sizes) for name, value in outputs.items()}
        fields = padded_fields(micro, tuple(dict.fromkeys((*READ_BY_LOSSES, *spec.needs()))))
        for device in {value.device for value in padded.values()}:
            fields = {name: to_device(value, device) for name, value in fields.items()}
        result: tuple[Tensor, dict[str, Tensor]] = objective(spec, padded, fields, totals)
        return spoiled(result[0], padded, fields[MASK]), result[1]

    return loss


def step_metrics(steps: list[StepResult]) -> dict[str, float]:
    """Means over the applied optimizer steps, maxima for names ending in `_max`."""
    applied = [step for step in steps if step.applied]
    measured = [finished(step.metrics) for step in applied]
    metrics = {}
    for name in measured[0]:
        found = [values[name] for values in measured]
        metrics[name] = max(found) if name.endswith("_max") else math.fsum(found) / len(found)
    metrics["grad_norm"] = math.fsum(step.grad_norm for step in applied) / len(applied)
    metrics["skipped"] = float(len(steps) - len(applied))
    return metrics


def _not_finite(call: Call, steps: list[StepResult]) -> Finding:
    found: dict[str, Any] = {"gradient norm": steps[-1].grad_norm, **finished(steps[-1].metrics)}
    shown = ", ".join(f"{name} {value}" for name, value in found.items())
    return Finding(
        code="E650",
        what=f"{call.node}: no optimizer step of iteration {call.iteration} was finite",
        where=call.where,
        got=shown,
        expected="finite losses and gradients; the weights are as they were before",
        fix="a lower lr, or max_grad_norm=1.0",
    )
