"""Bodies that generate: the rollout of an iteration, and the evaluation on held-out data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.batch import flat, lengths, ragged_like, select_field, split_rows, strings, text
from rlflow.ops.bodies.common import inputs_of, model_of, num_rows, token_rows, too_long
from rlflow.ops.bodies.data import as_text
from rlflow.ops.bodies.reward import score
from rlflow.ops.body import Call, Generated, Output

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
    }
)


def rollout(call: Call) -> Output:
    """Sample n responses to every prompt; rows are prompt-major."""
    inputs, model, params = inputs_of(call), model_of(call), call.params
    n, count = params["n"], num_rows(inputs)
    texts = strings(inputs["prompt"])
    prompt_tokens = token_rows(call, model.tokenizer, texts, "chat" in params)
    too_long(call, prompt_tokens, texts, params["max_new_tokens"], model.context)
    first = call.iteration * count * n
    sample = torch.arange(first, first + count * n)
    made = model.generate(
        prompt_tokens,
        sample,
        n=n,
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params.get("top_p", 1.0),
        top_k=params.get("top_k", 0),
        ignore_eos="ignore_eos" in params,
    )
    parent = torch.arange(count).repeat_interleave(n)
    fields: dict[str, Tensor] = {
        "prompt_tokens": select_field(prompt_tokens, parent),
        "response_tokens": made.response_tokens,
        "rollout_log_probs": made.log_probs,
        "finished": made.finished,
        "group": parent + call.iteration * count,
        "sample": sample,
    }
    if "response_mask" in call.wanted:
        everything = torch.ones(len(flat(made.response_tokens)), dtype=torch.bool)
        fields["response_mask"] = ragged_like(everything, made.response_tokens)
    if "response" in call.wanted:
        fields["response"] = text(responses(model.tokenizer, made))
    for name in call.wanted - CARRIED_BY_ENGINE:
        fields[name] = select_field(inputs[name], parent)
    sizes = lengths(made.response_tokens)
    metrics = {
        "length": sizes.double().mean().item(),
        "length_max": float(sizes.max()),
        "finished": made.finished.double().mean().item(),
    }
    kept = {name: value for name, value in fields.items() if name in call.wanted}
    return Output(fields=kept, rows=count * n, metrics=metrics)


def responses(tokenizer: Any, made: Generated) -> list[str]:
    """The responses as text, special tokens left out."""
    decoded: list[str] = tokenizer.batch_decode(
        [row.tolist() for row in split_rows(made.response_tokens)], skip_special_tokens=True
    )
    return decoded


def evaluate(call: Call) -> Output:
    """Mean reward of held-out rows with the weights as they are."""
    model, params = model_of(call), call.params
    rows = list(params["data"].rows()[: params["limit"]])
    texts = [as_text(row["prompt"]) for row in rows]
    prompt_tokens = token_rows(call, model.tokenizer, texts, "chat" in params)
    too_long(call, prompt_tokens, texts, params["max_new_tokens"], model.context)
    made = model.generate(
        prompt_tokens,
        torch.arange(len(rows)),
        n=1,
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=1.0,
        top_k=0,
        ignore_eos=False,
    )
    columns = {name: [as_text(row[name]) for row in rows] for name in rows[0] if name != "row_id"}
    columns["response"] = responses(model.tokenizer, made)
    scores = score(call, params["function"], columns, len(rows), params["batched"])
    sizes = lengths(made.response_tokens)
    return Output(
        metrics={
            "reward": sum(scores) / len(scores),
            "length": sizes.double().mean().item(),
            "finished": made.finished.double().mean().item(),
        }
    )
