"""The body of a continuous rollout: rows that live through several updates of the weights.

Each call goes on with the rows of the one before, lets new ones begin, and hands on as many groups
as an iteration has. What stays is its memory: a checkpoint holds it, and a run that goes on from
there reads it again, as every call does. Which groups are handed on, and when, and which replica
decodes them, `rlflow.graph.rules.in_flight` says. Replicas of other processes have the same rows
and the same memory: each decodes those that are its own, and they tell each other what became of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    concat_rows,
    flat,
    joined_rows,
    lengths,
    make_batch,
    ragged,
    select_field,
    select_rows,
    split_rows,
    strings,
)
from rlflow.contract.values import Advanced, Generation, InFlight, Stat
from rlflow.graph.rules.in_flight import Bound, Pace
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows, token_rows, too_long
from rlflow.ops.bodies.rollout import CARRIED_BY_ENGINE, responses, sample_metrics
from rlflow.ops.bodies.stats import max_of, mean_of
from rlflow.ops.body import Call, Output, Peers

# No field of a user has a blank in its name. In which iteration a row's group began, -1 of one that
# waits; whether the row has ended; and as which of the groups that were complete its own was. All
# rows have the same mean of turns.
BEGUN, OVER, ENDED, TURNS = "begun in", "is over", "ended as", "mean of turns"


def go_on(call: Call) -> Output:
    """Hand on the groups of prompts that are complete first, as far as their age allows.

    Rows have the numbers and the random numbers that they have in a rollout that drains: `group`
    is the number of the prompt, counted from the first of all. Logs also how many updates old the
    oldest token of a row is (`lag`, `lag_max`), how many rows are `in_flight`, how many groups
    are `complete` beyond those that leave, and how many `turns` were made.
    """
    rows = _here(call)
    bound, begun, ended = _bound(call, rows), _begun(rows), _ended(rows)
    pace = _pace(call)
    going, made = _advanced(call, rows, bound, pace, begun, ended)
    begun |= {group: call.iteration for group in made.begun if group not in begun}
    ended += made.ended
    taken = bound.taken(begun, ended, call.iteration)
    rows = _numbered(_with(call, rows, going, made), pace.after(made.turns), begun, ended)
    leaves = torch.isin(rows["group"], torch.tensor(taken, dtype=torch.int64))
    gone = select_rows(rows, torch.nonzero(leaves).flatten())
    left = select_rows(rows, torch.nonzero(~leaves).flatten())
    ages = _ages(call, gone)
    _require_young(ages, call)
    metrics: dict[str, float | Stat] = {
        **sample_metrics(call, generation(gone)),
        "lag": mean_of(ages),
        "lag_max": max_of(ages),
        "in_flight": float((left[BEGUN] >= 0).sum() - left[OVER].sum()),
        "complete": float(len(ended) - len(taken)),
        "turns": float(made.turns),
    }
    fields = fields_that_leave(call, gone)
    return Output(fields=fields, rows=num_rows(gone), own=True, memory=left, metrics=metrics)


def _bound(call: Call, rows: Batch) -> Bound:
    """How many groups leave in an iteration, and for how many they may stay."""
    span, n = int(call.params["keep"]), int(call.params["n"])
    return Bound(batch=num_rows(rows) // n // (span + 1), span=span)


def _pace(call: Call) -> Pace:
    """How many turns the iterations before have made in the mean."""
    return Pace() if call.memory is None else Pace(float(call.memory[TURNS][0]))


def _here(call: Call) -> Batch:
    """The rows of the iterations before, and those of the prompts that have come."""
    inputs, model, params = inputs_of(call), model_of(call), call.params
    n, count = int(params["n"]), num_rows(inputs)
    texts = strings(inputs["prompt"])
    tokens = token_rows(call, model.tokenizer, texts, "chat" in params)
    too_long(call, tokens, texts, params["max_new_tokens"], model.context)
    first = 0
    if call.memory is not None:
        first = (call.iteration + int(params["keep"])) * count
    parent = torch.arange(count).repeat_interleave(n)
    group = first + parent
    none = torch.zeros(len(parent), dtype=torch.int64)
    fields = {
        "prompt_tokens": select_field(tokens, parent),
        "response_tokens": ragged(none[:0], none),
        "rollout_log_probs": ragged(torch.zeros(0), none),
        "version": ragged(none[:0], none),
        "finished": none.bool(),
        "group": group,
        "sample": group * n + torch.arange(n).repeat(count),
        BEGUN: none - 1,
        OVER: none.bool(),
        ENDED: none - 1,
    }
    for name in sorted(call.wanted - CARRIED_BY_ENGINE):
        fields[name] = select_field(inputs[name], parent)
    new = make_batch(fields, len(parent))
    if call.memory is None:
        assert call.iteration == 0, f"{call.node} has lost its rows before {call.iteration}"
        return new
    known = make_batch({name: call.memory[name] for name in fields}, num_rows(call.memory))
    return concat_rows([known, new])


def _begun(rows: Batch) -> dict[int, int]:
    """In which iteration each group began that has."""
    found = zip(rows["group"].tolist(), rows[BEGUN].tolist(), strict=True)
    return {group: begun for group, begun in found if begun >= 0}


def _ended(rows: Batch) -> list[int]:
    """The groups that are complete, the earliest first."""
    order = dict(zip(rows["group"].tolist(), rows[ENDED].tolist(), strict=True))
    return sorted((group for group, place in order.items() if place >= 0), key=order.__getitem__)


def _advanced(
    call: Call,
    rows: Batch,
    bound: Bound,
    pace: Pace,
    begun: Mapping[int, int],
    ended: Sequence[int],
) -> tuple[Tensor, Advanced]:
    """Go on with the rows that are not over; which those are, and what they have got."""
    going = torch.nonzero(~rows[OVER]).flatten()
    here = select_rows(rows, going)
    size = num_rows(rows) // (bound.span + 1)

    def met(all_begun: Collection[int], now_ended: Sequence[int]) -> bool:
        new = {group: call.iteration for group in all_begun if group not in begun}
        return bound.met({**begun, **new}, [*ended, *now_ended], call.iteration)

    peers = call.peers
    part = peers.share(1 << 30)
    flight = InFlight(
        seen=joined_rows(here["prompt_tokens"], here["response_tokens"]),
        made=lengths(here["response_tokens"]),
        draws=here["group"] // bound.batch,
        ids=here["sample"],
        groups=here["group"],
        begun=frozenset(here["group"][here[BEGUN] >= 0].tolist()),
        at_once=size,
        met=met,
        least=pace.least,
        few=pace.few(size),
        replicas=part.step,
        own=part.start,
        told=lambda ended: peers.union(torch.tensor(ended, dtype=torch.int64)).tolist(),
    )
    made = model_of(call).advance(flight, **drawn_of(call.params))
    return going, made if part.step == 1 else of_all(made, peers)


def of_all(made: Advanced, peers: Peers) -> Advanced:
    """What became of the rows of all replicas, of which `made` has the tokens of those here."""
    count = len(made.over)
    rows = torch.arange(count).repeat_interleave(lengths(made.response_tokens))
    places = torch.zeros_like(rows) if made.places is None else made.places
    columns = rows, flat(made.response_tokens), flat(made.log_probs), places
    # Numbers of 24 bits and token ids are exact in float64.
    found = peers.gather(torch.stack([column.double() for column in columns], 1))
    # Rows that have moved lie here and there: by row, and within it by place.
    found = found[torch.argsort(found[:, 3], stable=True)]
    found = found[torch.argsort(found[:, 0], stable=True)]
    sizes = torch.bincount(found[:, 0].long(), minlength=count)
    finished = torch.zeros(count, dtype=torch.bool)
    finished[peers.union(torch.nonzero(made.finished).flatten())] = True
    return replace(
        made,
        response_tokens=ragged(found[:, 1].long(), sizes),
        log_probs=ragged(found[:, 2].float(), sizes),
        finished=finished,
    )


def drawn_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """How tokens are drawn, as `advance` wants it."""
    return {
        "max_new_tokens": params["max_new_tokens"],
        "temperature": params["temperature"],
        "top_p": params.get("top_p", 1.0),
        "top_k": params.get("top_k", 0),
        "ignore_eos": "ignore_eos" in params,
    }


def _with(call: Call, rows: Batch, going: Tensor, made: Advanced) -> Batch:
    """The rows with what those that went on have got, of the version that is here."""
    more = torch.zeros(num_rows(rows), dtype=torch.int64)
    more[going] = lengths(made.response_tokens)
    version = torch.full_like(flat(made.response_tokens), model_of(call).version)
    found = {
        "response_tokens": flat(made.response_tokens),
        "rollout_log_probs": flat(made.log_probs),
        "version": version,
    }
    fields = dict(rows.items())
    fields |= {name: joined_rows(fields[name], ragged(got, more)) for name, got in found.items()}
    fields["finished"], fields[OVER] = rows["finished"].clone(), rows[OVER].clone()
    fields["finished"][going] = made.finished
    fields[OVER][going] = made.over
    return make_batch(fields, num_rows(rows))


def _numbered(rows: Batch, pace: Pace, begun: Mapping[int, int], ended: Sequence[int]) -> Batch:
    """The rows with what is known of their groups, and the pace."""
    groups = rows["group"].tolist()
    order = {group: place for place, group in enumerate(ended)}
    fields = dict(rows.items())
    fields[BEGUN] = torch.tensor([begun.get(group, -1) for group in groups])
    fields[ENDED] = torch.tensor([order.get(group, -1) for group in groups])
    fields[TURNS] = torch.full((len(groups),), pace.mean, dtype=torch.float64)
    return make_batch(fields, num_rows(rows))


def _ages(call: Call, rows: Batch) -> Tensor:
    """How many updates old the oldest token of each row is, int64 `[rows]`."""
    oldest = [int(each.min()) for each in split_rows(rows["version"])]
    since = {version: call.updates_since(version) for version in set(oldest)}
    return torch.tensor([since[version] for version in oldest], dtype=torch.int64)


def _require_young(ages: Tensor, call: Call) -> None:
    oldest = int(ages.max())
    assert oldest <= call.staleness, f"{call.node}: a row is {oldest} updates old"


def generation(rows: Batch) -> Generation:
    """Rows as what an engine has generated."""
    tokens, log_probs = rows["response_tokens"], rows["rollout_log_probs"]
    return Generation(response_tokens=tokens, log_probs=log_probs, finished=rows["finished"])


def fields_that_leave(call: Call, gone: Batch) -> dict[str, Tensor]:
    """The fields of the rows that leave which somebody reads."""
    fields = responses(call, generation(gone))
    own = ("prompt_tokens", "group", "sample", "version")
    names = [*own, *sorted(call.wanted - CARRIED_BY_ENGINE)]
    return fields | {name: gone[name] for name in names if name in call.wanted}
