"""Bodies that generate: the rollout of an iteration, and the evaluation on held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import (
    flat,
    joined_rows,
    lengths,
    ragged,
    ragged_like,
    select_field,
    shared_rows,
    split_rows,
    strings,
    text,
)
from rlflow.contract.pictures import Pictures
from rlflow.contract.tokenizers import Tokenizer
from rlflow.contract.values import Generation, Stat
from rlflow.data.pictures.columns import IMAGES
from rlflow.data.sources import as_text
from rlflow.graph.fields import PICTURES, PIXELS
from rlflow.ops.bodies.common import (
    inputs_of,
    model_of,
    num_rows,
    row_numbers,
    token_rows,
    too_long,
    total_rows,
)
from rlflow.ops.bodies.data import encoded_field
from rlflow.ops.bodies.reward import score
from rlflow.ops.bodies.rows.pictures import picture_fields, seen_rows
from rlflow.ops.bodies.stats import max_of, mean_of
from rlflow.ops.body import Call, Output

CARRIED_BY_ENGINE = frozenset(
    {
        "prompt_tokens",
        "response_tokens",
        "response_mask",
        "rollout_log_probs",
        "response",
        "finished",
        "group",
        "sample",
        "version",
        "prompt_experts",
        "routed_experts",
        PIXELS,
        PICTURES,
    }
)


def rollout(call: Call) -> Output:
    """Sample n responses to every prompt; rows are prompt-major.

    Sample s of row p of the batch has the same number, and so the same random numbers, in
    whichever part it is drawn; where prompts lie in pieces, a piece has a share of the samples.
    A rollout of a part of the prompts (`from_prompt`, `of_prompts`) numbers them among all, and
    leaves it to who puts the parts together to log what they are like.
    The version of a token is that of the weights that sampled it.
    With the option `until` responses stop after so many tokens.
    """
    inputs, model, params = inputs_of(call), model_of(call), call.params
    n, count, numbers = params["n"] // call.pieces, num_rows(inputs), row_numbers(call)
    texts = strings(inputs["prompt"])
    images = inputs[params["images"]] if "images" in params else None
    prompt_tokens, pictures = _prompts(call, texts, images)
    room = params["max_new_tokens"]
    too_long(call, prompt_tokens, texts, room, model.context, (numbers // call.pieces).tolist())
    parent = torch.arange(count).repeat_interleave(n)
    before = params.get("from_prompt", 0), params.get("of_prompts", 0)
    all_pieces = before[1] * call.pieces or total_rows(call)
    piece = numbers[parent] + before[0] * call.pieces + call.drawn * all_pieces
    sample = piece * n + torch.arange(n).repeat(count)
    group = piece // call.pieces
    until = params.get("until")
    seen: dict[str, Any] = {} if pictures is None else {"pictures": pictures}
    made = model.generate(prompt_tokens, sample, n=n, until=until, **drawn(params), **seen)
    if made.rows is not None:
        parent, group, sample = parent[made.rows], group[made.rows], sample[made.rows]
    fields = responses(call, made) | {
        "prompt_tokens": select_field(prompt_tokens, parent),
        "group": group,
        "sample": sample,
    }
    if "routing" in params:
        assert made.prompt_experts is not None
        assert made.experts is not None
        fields |= {"prompt_experts": made.prompt_experts, "routed_experts": made.experts}
    if pictures is not None:
        shown = picture_fields(pictures)
        fields |= {name: shared_rows(field, parent) for name, field in shown.items()}
    for name in sorted(call.wanted - CARRIED_BY_ENGINE):
        fields[name] = select_field(inputs[name], parent)
    kept = {name: value for name, value in fields.items() if name in call.wanted}
    metrics = sample_metrics(call, made) if until is None else {"paused": mean_of(~made.finished)}
    metrics = metrics if "portion_of" not in params else {}
    return Output(fields=kept, rows=len(parent), factor=n, kept=made.rows, metrics=metrics)


def _prompts(call: Call, texts: list[str], images: Tensor | None) -> tuple[Tensor, Pictures | None]:
    """Prompts as tokens, and their pictures, of `images` as the field of them has these."""
    model, chat = model_of(call), "chat" in call.params
    if images is None:
        return token_rows(call, model.tokenizer, texts, chat), None
    return seen_rows(call, model.tokenizer, model.pictures, texts, images, chat=chat)


def resume(call: Call) -> Output:
    """Go on with the rows that a rollout has left unfinished after `first` tokens.

    What a row has so far is read with the weights as they are; its next tokens are drawn with
    the random numbers of their positions, so where a row is paused changes none of those.
    """
    inputs, model, params = inputs_of(call), model_of(call), call.params
    first, begun = params["first"], inputs["response_tokens"]
    going = ~inputs["finished"] & (lengths(begun) == first)
    places = torch.nonzero(going).flatten()
    seen = joined_rows(inputs["prompt_tokens"], begun)
    made = model.generate(
        select_field(seen, places), inputs["sample"][places], n=1, first=first, **drawn(params)
    )
    finished = inputs["finished"].clone()
    finished[places] = made.finished
    whole = Generation(
        response_tokens=_appended(begun, made.response_tokens, places),
        log_probs=_appended(inputs["rollout_log_probs"], made.log_probs, places),
        finished=finished,
        drafted=made.drafted,
        accepted=made.accepted,
    )
    fields = responses(call, whole)
    if "version" in call.wanted:
        newer = torch.full_like(flat(made.response_tokens), model.version)
        newer = ragged_like(newer, made.response_tokens)
        fields["version"] = _appended(inputs["version"], newer, places)
    metrics = {**sample_metrics(call, whole), "resumed": mean_of(going)}
    return Output(fields=fields, rows=num_rows(inputs), metrics=metrics)


def _appended(begun: Tensor, more: Tensor, places: Tensor) -> Tensor:
    """A ragged field, with `more` at the end of the rows `places`."""
    sizes = torch.zeros(len(lengths(begun)), dtype=torch.int64)
    sizes[places] = lengths(more)
    return joined_rows(begun, ragged(flat(more), sizes))


def drawn(params: Mapping[str, Any]) -> dict[str, Any]:
    """How a node's tokens are drawn, as `generate` wants it."""
    return {
        "max_new_tokens": params["max_new_tokens"],
        "temperature": params["temperature"],
        "top_p": params.get("top_p", 1.0),
        "top_k": params.get("top_k", 0),
        "ignore_eos": "ignore_eos" in params,
        "draft_tokens": params.get("draft_tokens", 0),
        **({"draft_rows": params["draft_rows"]} if "draft_rows" in params else {}),
        **({"routing": True} if "routing" in params else {}),
    }


def responses(call: Call, made: Generation) -> dict[str, Tensor]:
    """The fields of a response that somebody reads."""
    tokens, model = made.response_tokens, model_of(call)
    fields = {
        "response_tokens": tokens,
        "rollout_log_probs": made.log_probs,
        "finished": made.finished,
    }
    if "response_mask" in call.wanted:
        everything = torch.ones(len(flat(tokens)), dtype=torch.bool)
        fields["response_mask"] = ragged_like(everything, tokens)
    if "version" in call.wanted:
        versions = torch.full_like(flat(tokens), model.version)
        fields["version"] = ragged_like(versions, tokens)
    if "response" in call.wanted:
        fields["response"] = text(as_texts(model.tokenizer, tokens))
    return {name: value for name, value in fields.items() if name in call.wanted}


def _ended(made: Generation) -> dict[str, Stat]:
    """How long responses are on average, and how many ended by themselves."""
    sizes = lengths(made.response_tokens)
    return {"length": mean_of(sizes), "finished": mean_of(made.finished)}


def sample_metrics(call: Call, made: Generation) -> dict[str, Stat]:
    """As `_ended`, the longest length, the entropy, and the share of a drafter's tokens kept.

    The entropy of a token, in nats, is estimated without bias by the mean of minus the log-prob
    of what was drawn; responses that are not drawn, at temperature 0, have none.
    """
    greedy = not call.params["temperature"]
    drafts = Stat(kind="mean", total=made.accepted, count=made.drafted)
    return {
        **_ended(made),
        "length_max": max_of(lengths(made.response_tokens)),
        **({} if greedy else {"entropy": mean_of(-flat(made.log_probs))}),
        **({"acceptance": drafts} if made.drafted else {}),
    }


def as_texts(tokenizer: Tokenizer, tokens: Tensor) -> list[str]:
    """Ragged tokens as text, special ones left out."""
    rows = [row.tolist() for row in split_rows(tokens)]
    # Of no rows the tokenizer makes one empty text.
    return tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []


def evaluate(call: Call) -> Output:
    """Mean reward of held-out rows with the weights as they are, this part's share of them."""
    model, params = model_of(call), call.params
    held_out = params["data"].rows()[: params["limit"]]
    share = call.peers.share(len(held_out))
    rows = [held_out[number] for number in share]
    texts = [as_text(row["prompt"]) for row in rows]
    pictured = params["data"].pictured
    images = encoded_field(row[IMAGES] for row in rows) if pictured else None
    prompt_tokens, pictures = _prompts(call, texts, images)
    seen: dict[str, Any] = {} if pictures is None else {"pictures": pictures}
    too_long(call, prompt_tokens, texts, params["max_new_tokens"], model.context, share)
    made = model.generate(
        prompt_tokens,
        torch.tensor(share, dtype=torch.int64),
        n=1,
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=1.0,
        top_k=0,
        ignore_eos=False,
        **seen,
    )
    unread = {"row_id", *((IMAGES,) if pictured else ())}
    names = [name for name in held_out[0] if name not in unread]
    columns = {name: [as_text(row[name]) for row in rows] for name in names}
    columns["response"] = as_texts(model.tokenizer, made.response_tokens)
    scores = score(call, params["function"], columns, share, params["batched"])
    reward = Stat(kind="mean", total=float(sum(scores)), count=float(len(scores)))
    return Output(metrics={"reward": reward, **_ended(made)})
