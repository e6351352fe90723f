"""Bodies that generate: the rollout of an iteration, and the evaluation on held-out data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.batch import flat, lengths, ragged_like, select_field, split_rows, strings, text
from rlflow.ops.bodies.common import (
    inputs_of,
    model_of,
    num_rows,
    row_numbers,
    token_rows,
    too_long,
    total_rows,
)
from rlflow.ops.bodies.data import as_text
from rlflow.ops.bodies.reward import score
from rlflow.ops.bodies.stats import max_of, mean_of
from rlflow.ops.body import Call, Generated, Output, Stat

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
    }
)


def rollout(call: Call) -> Output:
    """Sample n responses to every prompt; rows are prompt-major.

    Sample s of row p of the batch has the same number, and so the same random numbers, in
    whichever part the row is. The version of a token is that of the weights that sampled it.
    """
    inputs, model, params = inputs_of(call), model_of(call), call.params
    n, count, numbers = params["n"], num_rows(inputs), row_numbers(call)
    texts = strings(inputs["prompt"])
    prompt_tokens = token_rows(call, model.tokenizer, texts, "chat" in params)
    room = params["max_new_tokens"]
    too_long(call, prompt_tokens, texts, room, model.context, numbers.tolist())
    parent = torch.arange(count).repeat_interleave(n)
    group = numbers[parent] + call.iteration * total_rows(call)
    sample = group * n + torch.arange(n).repeat(count)
    made = model.generate(
        prompt_tokens,
        sample,
        n=n,
        max_new_tokens=room,
        temperature=params["temperature"],
        top_p=params.get("top_p", 1.0),
        top_k=params.get("top_k", 0),
        ignore_eos="ignore_eos" in params,
    )
    fields: dict[str, Tensor] = {
        "prompt_tokens": select_field(prompt_tokens, parent),
        "response_tokens": made.response_tokens,
        "rollout_log_probs": made.log_probs,
        "finished": made.finished,
        "group": group,
        "sample": sample,
    }
    if "response_mask" in call.wanted:
        everything = torch.ones(len(flat(made.response_tokens)), dtype=torch.bool)
        fields["response_mask"] = ragged_like(everything, made.response_tokens)
    if "version" in call.wanted:
        versions = torch.full_like(flat(made.response_tokens), model.version)
        fields["version"] = ragged_like(versions, made.response_tokens)
    if "response" in call.wanted:
        fields["response"] = text(responses(model.tokenizer, made))
    for name in call.wanted - CARRIED_BY_ENGINE:
        fields[name] = select_field(inputs[name], parent)
    kept = {name: value for name, value in fields.items() if name in call.wanted}
    longest = max_of(lengths(made.response_tokens))
    metrics = {**_ended(made), "length_max": longest}
    return Output(fields=kept, rows=count * n, factor=n, metrics=metrics)


def _ended(made: Generated) -> dict[str, Stat]:
    """How long responses are on average, and how many ended by themselves."""
    sizes = lengths(made.response_tokens)
    return {"length": mean_of(sizes), "finished": mean_of(made.finished)}


def responses(tokenizer: Any, made: Generated) -> list[str]:
    """The responses as text, special tokens left out."""
    rows = [row.tolist() for row in split_rows(made.response_tokens)]
    # Of no rows the tokenizer makes one empty text.
    decoded: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True) if rows else []
    return decoded


def evaluate(call: Call) -> Output:
    """Mean reward of held-out rows with the weights as they are, this part's share of them."""
    model, params = model_of(call), call.params
    held_out = params["data"].rows()[: params["limit"]]
    share = call.peers.share(len(held_out))
    rows = [held_out[number] for number in share]
    texts = [as_text(row["prompt"]) for row in rows]
    prompt_tokens = token_rows(call, model.tokenizer, texts, "chat" in params)
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
    )
    names = [name for name in held_out[0] if name != "row_id"]
    columns = {name: [as_text(row[name]) for row in rows] for name in names}
    columns["response"] = responses(model.tokenizer, made)
    scores = score(call, params["function"], columns, share, params["batched"])
    reward = Stat(kind="mean", total=float(sum(scores)), count=float(len(scores)))
    return Output(metrics={"reward": reward, **_ended(made)})
