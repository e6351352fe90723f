"""Bodies that bring rows in: prompts of a data source, and written responses as tokens."""

from __future__ import annotations

import torch

from rlflow.batch import lengths, ragged_rows, strings, text
from rlflow.data.sources import Row, as_text
from rlflow.errors import DataError, Finding
from rlflow.ops.bodies.common import inputs_of, num_rows, row_numbers, token_rows
from rlflow.ops.body import Call, Output


def prompts(call: Call) -> Output:
    """The rows of this iteration: text columns and their `row_id`.

    With the option `ahead` those of so many iterations later, and the first time all before too.
    """
    data, batch, ahead = call.params["data"], call.params["batch"], call.params.get("ahead", 0)
    draws = range(call.drawn + ahead if call.drawn else 0, call.drawn + ahead + 1)
    return fields_of(call, [row for draw in draws for row in data.batch(draw, batch, call.seed)])


def fields_of(call: Call, rows: list[Row]) -> Output:
    """Rows of a data source as fields: those that somebody reads."""
    fields = {
        name: text(as_text(row[name]) for row in rows)
        for name in call.outputs
        if name in call.wanted and name != "row_id"
    }
    if "row_id" in call.wanted:
        fields["row_id"] = torch.tensor([row["row_id"] for row in rows], dtype=torch.int64)
    return Output(fields=fields, rows=len(rows))


def tokenize(call: Call) -> Output:
    """Prompts and written responses as tokens, EOS at the end of every response."""
    inputs = inputs_of(call)
    tokenizer = call.tokenizer(call.params["tokenizer"])
    written = strings(inputs[call.params["response"]])
    for row, response in zip(row_numbers(call).tolist(), written, strict=True):
        if not response:
            raise DataError(
                Finding(
                    code="E634",
                    what=f"{call.node}: an empty response in row {row}",
                    where=call.where,
                )
            )
    encoded = tokenizer(written, add_special_tokens=False)["input_ids"] if written else []
    responses = ragged_rows([[*ids, tokenizer.eos_token_id] for ids in encoded], torch.int64)
    prompt_tokens = token_rows(call, tokenizer, strings(inputs["prompt"]), "chat" in call.params)
    mask = ragged_rows(
        [torch.ones(size, dtype=torch.bool) for size in lengths(responses).tolist()], torch.bool
    )
    return Output(
        fields={
            "prompt_tokens": prompt_tokens,
            "response_tokens": responses,
            "response_mask": mask,
        },
        rows=num_rows(inputs),
    )
