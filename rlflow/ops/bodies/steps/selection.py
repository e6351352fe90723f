"""Choices among all tokens of an optimizer step, made before it is cut into micro-batches.

The tokens of all parts are put in the order of their rows and columns, so every part chooses
from the same list, however the batch was split; each then marks its own. The bodies here take
the loss and tensors `[1, tokens]` of all of them, and return such fields.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    column_index,
    flat,
    is_ragged,
    lengths,
    make_batch,
    ragged_like,
    row_index,
)
from rlflow.ops.bodies.common import MASK, model_of, num_rows
from rlflow.ops.body import Call
from rlflow.ops.losses.losses import Loss, PolicyLoss
from rlflow.ops.math.losses import covariance
from rlflow.ops.math.losses.covariance import Order
from rlflow.ops.math.losses.objective import old_log_probs, resolved
from rlflow.ops.math.losses.off_policy import top_entropy as of_top_entropy

ROW = "row_number"
READ = ("advantages", "old_log_probs", "rollout_log_probs", "age")

Tokens = Mapping[str, Tensor]


def chosen_fields(spec: Loss) -> tuple[str, ...]:
    """The token fields that the selections of a loss make."""
    selections = spec.selections() if isinstance(spec, PolicyLoss) else ()
    return tuple(name for selection in selections for name in selection.makes)


def numbered(spec: Loss, batch: Batch, rows: Tensor) -> Batch:
    """The batch with the number of each row in the whole batch, where a selection orders them."""
    return with_fields(batch, {ROW: rows}) if chosen_fields(spec) else batch


def selected(call: Call, spec: Loss, mini: Batch, step: int) -> Batch:
    """The mini-batch with what `spec` chooses among the tokens of all its parts, if it does.

    Makes a forward without gradient; every part of the mini-batch has to be here.
    """
    if not isinstance(spec, PolicyLoss) or not spec.selections():
        return mini
    tokens, places = _own_tokens(call, spec, mini)
    names = tuple(tokens)
    table = torch.stack([tokens[name].double() for name in names], -1)
    everyone = call.peers.gather(table)
    everyone = everyone[_in_order(everyone[:, 0], everyone[:, 1])]
    whole = dict(zip(names, everyone.T.unsqueeze(1), strict=True))
    own = _found(whole, tokens)
    made: dict[str, Tensor] = {}
    for number, selection in enumerate(spec.selections()):

        def order(n: int, salt: int = number) -> Tensor:
            return torch.as_tensor(call.permutation(n, "selection", step, salt))

        for name, values in resolved(selection.body)(spec, whole, order).items():
            field = values.new_zeros(len(flat(mini[MASK])))
            field[places] = values[0, own]
            made[name] = ragged_like(field, mini["response_tokens"])
    return with_fields(mini, made)


def with_fields(batch: Batch, fields: Mapping[str, Tensor]) -> Batch:
    """The batch and further fields."""
    had = {name: batch[name] for name in batch.keys()}  # noqa: SIM118  a TensorDict
    return make_batch({**had, **fields}, num_rows(batch))


def clip_cov(spec: PolicyLoss, tokens: Tokens, order: Order) -> dict[str, Tensor]:
    """The choice of Clip-Cov, and the covariance of every token."""
    counted = torch.ones_like(tokens["log_probs"], dtype=torch.bool)
    chosen = covariance.clip_cov_chosen(
        tokens["log_probs"],
        tokens["old"],
        tokens["advantages"],
        counted,
        clip=spec.clip,
        cov_share=spec.cov_share,
        cov_range=spec.cov_range,
        order=order,
    )
    return {"chosen": chosen, "covariance": _covariance(tokens, counted)}


def kl_cov(spec: PolicyLoss, tokens: Tokens, order: Order) -> dict[str, Tensor]:
    """The choice of KL-Cov, and the covariance of every token."""
    counted = torch.ones_like(tokens["log_probs"], dtype=torch.bool)
    chosen = covariance.kl_cov_chosen(
        tokens["log_probs"], tokens["advantages"], counted, cov_share=spec.cov_share
    )
    return {"chosen": chosen, "covariance": _covariance(tokens, counted)}


def top_entropy(spec: PolicyLoss, tokens: Tokens, order: Order) -> dict[str, Tensor]:
    """The tokens of highest entropy."""
    counted = torch.ones_like(tokens["entropy"], dtype=torch.bool)
    share = 1.0 if spec.top_entropy is None else spec.top_entropy
    return {"uncertain": of_top_entropy(tokens["entropy"], counted, share=share)}


def _covariance(tokens: Tokens, counted: Tensor) -> Tensor:
    return covariance.covariance(tokens["log_probs"], tokens["advantages"], counted)


def _own_tokens(call: Call, spec: PolicyLoss, mini: Batch) -> tuple[dict[str, Tensor], Tensor]:
    """The unmasked tokens that are here, by column of the table, and their flat places."""
    outputs = tuple(dict.fromkeys(name for each in spec.selections() for name in each.outputs))
    temperature = call.params.get("temperature", 1.0)
    made = model_of(call).forward(mini, outputs=outputs, temperature=temperature)
    sizes = lengths(mini["response_tokens"]).cpu()
    rows = row_index(sizes)
    fields = {name: _per_token(mini[name], rows) for name in (MASK, *READ) if name in mini.keys()}  # noqa: SIM118
    found = {ROW: mini[ROW].cpu()[rows], "column": column_index(sizes)}
    found |= {name: made[name] for name in outputs}
    if "log_probs" in made:
        found["advantages"] = fields["advantages"]
        found["old"] = old_log_probs(spec, made["log_probs"], fields)
    places = fields[MASK].nonzero().flatten()
    return {name: values[places] for name, values in found.items()}, places


def _per_token(field: Tensor, rows: Tensor) -> Tensor:
    """A field as flat values `[tokens]`, that of a row for each of its tokens."""
    return flat(field).cpu() if is_ragged(field) else field.cpu()[rows]


def _in_order(rows: Tensor, columns: Tensor) -> Tensor:
    """What puts tokens in the order of their rows, and of their columns within."""
    by_column = columns.argsort(stable=True)
    return by_column[rows[by_column].argsort(stable=True)]


def _found(whole: Tokens, tokens: Tokens) -> Tensor:
    """Where among all tokens, which are in order, those that are here stand."""
    width = whole["column"].max().item() + 1 if whole["column"].numel() else 1
    keys = [
        each[ROW].double().flatten() * width + each["column"].flatten() for each in (whole, tokens)
    ]
    return torch.searchsorted(keys[0].contiguous(), keys[1].contiguous())
