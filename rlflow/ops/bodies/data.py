"""Bodies that bring rows in: prompts of a data source, and written responses as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlflow.batch import lengths, ragged, ragged_rows, strings, text
from rlflow.data.pictures.columns import Picture, encoded_pictures
from rlflow.data.sources import Row, as_text
from rlflow.errors import DataError, Finding
from rlflow.graph.fields import IMAGE
from rlflow.ops.bodies.common import inputs_of, num_rows, row_numbers, token_rows
from rlflow.ops.bodies.rows.pictures import picture_fields, seen_rows
from rlflow.ops.body import Call, Output


def prompts(call: Call) -> Output:
    """The rows of this iteration: text columns and their `row_id`.

    With the option `ahead` those of so many iterations later, and the first time all before too.
    """
    data, batch, ahead = call.params["data"], call.params["batch"], call.params.get("ahead", 0)
    draws = range(call.drawn + ahead if call.drawn else 0, call.drawn + ahead + 1)
    return fields_of(call, [row for draw in draws for row in data.batch(draw, batch, call.seed)])


def fields_of(call: Call, rows: list[Row]) -> Output:
    """Rows of a data source as fields: those that somebody reads; pictures are read from files."""
    images = {made.name for made in call.op.outputs if made.dtype == IMAGE}
    fields = {
        name: text(as_text(row[name]) for row in rows)
        for name in call.outputs
        if name in call.wanted - images and name != "row_id"
    }
    for name in images & call.wanted:
        fields[name] = encoded_field(row[name] for row in rows)
    if "row_id" in call.wanted:
        fields["row_id"] = torch.tensor([row["row_id"] for row in rows], dtype=torch.int64)
    return Output(fields=fields, rows=len(rows))


def encoded_field(rows: Iterable[Sequence[Picture]]) -> Tensor:
    """Pictures of rows as the field of them: ragged uint8, in the form of their files."""
    parts = [encoded_pictures(row) for row in rows]
    blob = bytearray(b"".join(parts))
    none = torch.empty(0, dtype=torch.uint8)
    values = torch.frombuffer(blob, dtype=torch.uint8) if blob else none
    return ragged(values, torch.tensor([len(part) for part in parts], dtype=torch.int64))


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
    texts, chat = strings(inputs["prompt"]), "chat" in call.params
    shown: dict[str, Tensor] = {}
    if (images := call.params.get("images")) is not None:
        reader = call.reader(call.params["tokenizer"])
        prompt_tokens, seen = seen_rows(call, tokenizer, reader, texts, inputs[images], chat=chat)
        shown = {n: f for n, f in picture_fields(seen).items() if n in call.wanted}
    else:
        prompt_tokens = token_rows(call, tokenizer, texts, chat)
    mask = ragged_rows(
        [torch.ones(size, dtype=torch.bool) for size in lengths(responses).tolist()], torch.bool
    )
    return Output(
        fields={
            "prompt_tokens": prompt_tokens,
            "response_tokens": responses,
            "response_mask": mask,
            **shown,
        },
        rows=num_rows(inputs),
    )
