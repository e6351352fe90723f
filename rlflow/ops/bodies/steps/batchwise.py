"""What is done with a mini-batch before it is cut, for losses that join its rows.

One pass without gradient gives the outputs of all rows; with them every row gets the slopes
of its tokens (`rlflow.ops.math.losses.batchwise`). Rows that the loss does not read are left out.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    flat,
    lengths,
    make_batch,
    pad,
    ragged,
    ragged_like,
    select_rows,
    unpad,
)
from rlflow.errors import Finding, RunError
from rlflow.graph.fields import PICTURES, PIXELS
from rlflow.ops.bodies.common import MASK, model_of, num_rows, padded_fields
from rlflow.ops.body import Call, Peers
from rlflow.ops.losses.preference import BatchwiseLoss, DPOLoss, RewardModelLoss
from rlflow.ops.math.losses.batchwise import (
    SHARES,
    SLOPES,
    Gather,
    preference_terms,
    score_pair_terms,
    score_terms,
)
from rlflow.ops.math.pairs import NO_PAIR

Forward = Callable[[Batch], dict[str, Tensor]]
"""What a loss measures of every response token, flat, without gradient."""

TOKENS = ("prompt_tokens", "response_tokens")


def prepared(call: Call, spec: BatchwiseLoss, mini: Batch) -> Batch:
    """A mini-batch as the loss wants it; every part calls it, also without a row of its own.

    Raises RunError for a reward that the loss cannot fit.
    """
    if isinstance(spec, RewardModelLoss) and spec.kind == "logistic":
        _require_probabilities(call, mini["reward"])
    model, temperature = model_of(call), call.params.get("temperature", 1.0)

    def forward(batch: Batch) -> dict[str, Tensor]:
        return model.forward(batch, outputs=spec.measured, temperature=temperature)

    made: Batch = pkgutil.resolve_name(spec.prepare)(spec, mini, forward, call.peers)
    return made


def prepare_pairs(spec: DPOLoss, mini: Batch, forward: Forward, peers: Peers) -> Batch:
    """The rows that stand in a pair, with the slopes of a loss of pairs."""
    rows = torch.nonzero(mini["pair"] != NO_PAIR)[:, 0]
    mini = select_rows(mini, rows)
    sizes = lengths(mini["response_tokens"])
    measured = {name: pad(values, sizes) for name, values in forward(mini).items()}
    fields = {**padded_fields(mini, spec.needs()), **measured}
    terms = preference_terms(spec, measured["log_probs"], fields, gather_over(peers))
    return _made_ready(mini, mini[MASK], unpad(terms[SLOPES], sizes), terms[SHARES])


def prepare_scores(spec: RewardModelLoss, mini: Batch, forward: Forward, peers: Peers) -> Batch:
    """The rows that are scored, one token longer, with the slope of each row's score."""
    if spec.kind == "pairwise":
        mini = select_rows(mini, torch.nonzero(mini["pair"] != NO_PAIR)[:, 0])
    longer = scored(mini)
    last = lengths(longer["response_tokens"]).cumsum(0) - 1
    scores = forward(longer)["values"][last]
    if spec.kind == "pairwise":
        fields = {name: mini[name] for name in spec.needs()}
        terms = score_pair_terms(spec, scores, fields, gather_over(peers))
    else:
        (rows,) = peers.sum([float(num_rows(mini))])
        terms = score_terms(spec, scores, mini["reward"], rows)
    total = int(lengths(longer["response_tokens"]).sum())
    mask = torch.zeros(total, dtype=torch.bool).index_fill(0, last, value=True)
    slopes = torch.zeros(total, dtype=torch.float64).index_copy(0, last, terms[SLOPES])
    return _made_ready(longer, ragged_like(mask, longer["response_tokens"]), slopes, terms[SHARES])


def scored(batch: Batch) -> Batch:
    """Prompts and responses with one more token, whose value is that of the whole response.

    A value belongs to the state before its token, so what the token is changes nothing.
    """
    responses = batch["response_tokens"]
    sizes = lengths(responses)
    total = int(sizes.sum()) + len(sizes)
    last = (sizes + 1).cumsum(0) - 1
    kept = torch.ones(total, dtype=torch.bool).index_fill(0, last, value=False)
    longer = torch.zeros(total, dtype=torch.int64)
    longer[kept] = flat(responses)
    fields = {"prompt_tokens": batch["prompt_tokens"], "response_tokens": ragged(longer, sizes + 1)}
    return make_batch(fields, num_rows(batch))


def gather_over(peers: Peers) -> Gather:
    """Rows of numbers of all parts, by ascending id; an id is on one part."""

    def gather(ids: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        names = peers.union(ids)
        places = torch.searchsorted(names, ids.contiguous())
        table = columns.new_zeros(len(names), columns.shape[1]).index_copy(0, places, columns)
        summed = peers.sum(table.flatten().tolist())
        return torch.tensor(summed, dtype=columns.dtype).view_as(table), places

    return gather


def _require_probabilities(call: Call, rewards: Tensor) -> None:
    """Refuse targets of a cross-entropy that are no probabilities."""
    outside = rewards[(rewards < 0) | (rewards > 1)]
    if len(outside):
        raise RunError(
            Finding(
                code="E271",
                what=f"{call.node}: a reward is no probability, which the logistic loss fits",
                where=call.where,
                got=f"{float(outside[0])}, in {len(outside)} of {len(rewards)} rows",
                expected="rewards between 0 and 1",
                fix='rf.RewardModelLoss("regression")',
            )
        )


def _made_ready(batch: Batch, mask: Tensor, slopes: Tensor, shares: Tensor) -> Batch:
    fields = {name: batch[name] for name in (*TOKENS, PIXELS, PICTURES) if name in batch}
    fields[MASK] = mask
    fields[SLOPES] = ragged_like(slopes, batch["response_tokens"])
    fields[SHARES] = shares
    return make_batch(fields, num_rows(batch))
