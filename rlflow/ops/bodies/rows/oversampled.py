"""The body of a rollout that begins more groups than it makes, and drops those that are late.

All rows begin together. Once enough groups are complete the engine stops, and the first of them are
the rows; what the others have got so far is gone. Replicas of other processes decode their share of
the groups turn by turn together, so the same groups are first for any number of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    flat,
    lengths,
    make_batch,
    ragged_like,
    select_field,
    select_rows,
    strings,
)
from rlflow.contract.values import Advanced, InFlight, Stat
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows, token_rows, too_long
from rlflow.ops.bodies.rollout import CARRIED_BY_ENGINE, sample_metrics
from rlflow.ops.bodies.rows.continuous import drawn_of, fields_that_leave, generation, of_all
from rlflow.ops.body import Call, Output


def first_complete(call: Call) -> Output:
    """The groups of prompts that are complete first, prompt-major, with the numbers of a rollout.

    A sample has the random numbers that it has in a rollout of as many prompts. Logs also how many
    groups were `dropped`, how many tokens these had by then (`dropped_tokens`), and how many
    `turns` were made.
    """
    begun = _begun(call)
    made = _decoded(call, begun)
    wanted = int(call.params["first_groups"])
    first = torch.tensor(sorted(made.ended[:wanted]), dtype=torch.int64)
    assert len(first) == wanted, f"{call.node}: {len(made.ended)} groups are complete of {wanted}"
    leaves = torch.isin(begun["group"], first)
    rows = _with(call, begun, made)
    chosen = select_rows(rows, torch.nonzero(leaves).flatten())
    groups = num_rows(begun) // int(call.params["n"])
    metrics: dict[str, float | Stat] = {
        **sample_metrics(call, generation(chosen)),
        "dropped": float(groups - wanted),
        "dropped_tokens": float(lengths(rows["response_tokens"])[~leaves].sum()),
        "turns": float(made.turns),
    }
    fields = fields_that_leave(call, chosen)
    return Output(fields=fields, rows=num_rows(chosen), own=True, metrics=metrics)


def _begun(call: Call) -> Batch:
    """The rows of all prompts, without a token."""
    inputs, model, params = inputs_of(call), model_of(call), call.params
    n, count = int(params["n"]), num_rows(inputs)
    texts = strings(inputs["prompt"])
    tokens = token_rows(call, model.tokenizer, texts, "chat" in params)
    too_long(call, tokens, texts, params["max_new_tokens"], model.context)
    parent = torch.arange(count).repeat_interleave(n)
    group = parent + call.drawn * count
    fields = {
        "prompt_tokens": select_field(tokens, parent),
        "group": group,
        "sample": group * n + torch.arange(n).repeat(count),
    }
    for name in sorted(call.wanted - CARRIED_BY_ENGINE):
        fields[name] = select_field(inputs[name], parent)
    return make_batch(fields, len(parent))


def _decoded(call: Call, rows: Batch) -> Advanced:
    """What became of all rows until enough groups were complete, of those of all replicas."""
    wanted, count = int(call.params["first_groups"]), num_rows(rows)

    def met(_: Collection[int], ended: Sequence[int]) -> bool:
        return len(ended) >= wanted

    peers = call.peers
    part = peers.share(1 << 30)
    flight = InFlight(
        seen=rows["prompt_tokens"],
        made=torch.zeros(count, dtype=torch.int64),
        draws=torch.full((count,), call.drawn, dtype=torch.int64),
        ids=rows["sample"],
        groups=rows["group"],
        begun=frozenset(),
        at_once=count,
        met=met,
        replicas=part.step,
        own=part.start,
        told=lambda ended: peers.union(torch.tensor(ended, dtype=torch.int64)).tolist(),
    )
    made = model_of(call).advance(flight, **drawn_of(call.params))
    return made if part.step == 1 else of_all(made, peers)


def _with(call: Call, rows: Batch, made: Advanced) -> Batch:
    """The rows with what they have got, all of the version that is here."""
    tokens: Tensor = made.response_tokens
    version = torch.full_like(flat(tokens), model_of(call).version)
    fields = dict(rows.items()) | {
        "response_tokens": tokens,
        "rollout_log_probs": made.log_probs,
        "version": ragged_like(version, tokens),
        "finished": made.finished,
    }
    return make_batch(fields, num_rows(rows))
