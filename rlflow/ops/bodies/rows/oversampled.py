"""The body of a rollout whose replicas make their turns together.

All rows begin together. Once enough groups are complete the engine stops, and the first of them are
the rows; what the others have got so far is gone. Replicas of other processes decode their share of
the groups turn by turn together, so the same groups are first for any number of them. Where they
move rows to each other these are the same too.
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
from rlflow.contract.values import Advanced, InFlight, Moving, Stat
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows, token_rows, too_long
from rlflow.ops.bodies.rollout import CARRIED_BY_ENGINE, sample_metrics
from rlflow.ops.bodies.rows.continuous import drawn_of, fields_that_leave, generation, of_all
from rlflow.ops.body import Call, Output


def first_complete(call: Call) -> Output:
    """The groups of prompts that are complete first, prompt-major, with the numbers of a rollout.

    A sample has the random numbers that it has in a rollout of as many prompts. Logs also how many
    `turns` were made; of who drops groups how many were `dropped`, and how many tokens these had by
    then (`dropped_tokens`); of replicas that move rows how many `moved`, and of those that count
    turns `row_turns`: the rows of the replica that has most, summed over turns.
    """
    begun = _begun(call)
    wanted = _wanted(call, begun)
    made = _decoded(call, begun, wanted)
    first = torch.tensor(sorted(made.ended[:wanted]), dtype=torch.int64)
    assert len(first) == wanted, f"{call.node}: {len(made.ended)} groups are complete of {wanted}"
    leaves = torch.isin(begun["group"], first)
    rows = _with(call, begun, made)
    chosen = select_rows(rows, torch.nonzero(leaves).flatten())
    groups = num_rows(begun) // int(call.params["n"])
    metrics: dict[str, float | Stat] = {
        **sample_metrics(call, generation(chosen)),
        "turns": float(lengths(rows["response_tokens"]).max()),
    }
    if "first_groups" in call.params:
        metrics["dropped"] = float(groups - wanted)
        metrics["dropped_tokens"] = float(lengths(rows["response_tokens"])[~leaves].sum())
    if "balance" in call.params:
        metrics |= {"moved": float(made.moved)}
        metrics |= {"row_turns": _row_turns(call, made)} if made.turns else {}
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


def _wanted(call: Call, begun: Batch) -> int:
    """How many groups it makes: the first ones, or all."""
    return int(call.params.get("first_groups", num_rows(begun) // int(call.params["n"])))


def _row_turns(call: Call, made: Advanced) -> float:
    """The live rows of the replica that has most, summed over turns."""
    here = torch.zeros(made.turns, 2, dtype=torch.float64)
    here[:, 0], here[:, 1] = torch.arange(made.turns), torch.tensor(made.live)
    every = call.peers.gather(here)
    most = here.new_zeros(made.turns)
    return float(most.scatter_reduce(0, every[:, 0].long(), every[:, 1], "amax").sum())


def _moving(call: Call) -> Moving | None:
    """How rows move between replicas; None where they do not."""
    if "balance" not in call.params:
        return None
    reread = call.params["moves"] == "reread"
    every = int(call.params["balance"])
    return Moving(every=every, reread=reread, pass_on=call.peers.pass_on)


def _decoded(call: Call, rows: Batch, wanted: int) -> Advanced:
    """What became of all rows until enough groups were complete, of those of all replicas."""
    count = num_rows(rows)

    def met(_: Collection[int], ended: Sequence[int]) -> bool:
        return len(ended) >= wanted

    peers = call.peers
    part = peers.share(1 << 30)
    moving = _moving(call) if part.step > 1 else None
    # Which groups are first depends on the turn in which rows ended; that all have does not.
    waits = moving is not None and "first_groups" not in call.params
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
        tells=moving.every if moving is not None and waits else 1,
        moving=moving,
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
