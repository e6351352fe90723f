"""Experts that SGLang tells of, as fields of rows.

It tells them of every token that it has read, prompt first, and of all layers; those without
experts have zeros. This file knows no process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlflow.batch import lengths, ragged
from rlflow.contract.values import Generation
from rlflow.errors import Finding, RunError
from rlflow.modelfiles.configs import LAYERS, text_config, text_value
from rlflow.modelfiles.mixtures.layers import experts_a_token, mixture_layers

if TYPE_CHECKING:
    from rlflow.contract.engines import LoadedModel

NONE = -1


def with_experts(
    made: Generation, told: Mapping[int, bytes], prompts: Tensor, n: int, model: LoadedModel
) -> Generation:
    """What was generated, with what an engine has told of each row, by its number.

    Raises RunError (E590) where that is not of as many tokens as the row has.
    """
    config = text_config(model.config.to_dict())
    layers, chosen = text_value(config, *LAYERS), experts_a_token(config)
    of = torch.tensor(mixture_layers(config), dtype=torch.int64)
    sizes = lengths(made.response_tokens)
    rows = range(len(sizes)) if made.rows is None else made.rows.tolist()
    prompt_sizes = lengths(prompts)[torch.tensor(list(rows), dtype=torch.int64) // n]
    width = len(of) * chosen
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for row, size, before in zip(rows, sizes.tolist(), prompt_sizes.tolist(), strict=True):
        values = torch.full((before + size, width), NONE, dtype=torch.int16)
        raw = bytearray(told[row])
        read = before + size - 1 if size else 0
        if len(raw) != 4 * read * layers * chosen:
            raise RunError(_of_other_tokens(model.name, row, len(raw), 4 * read * layers * chosen))
        if read:
            given = torch.frombuffer(raw, dtype=torch.int32).view(read, layers, chosen)
            values[:read] = given[:, of].reshape(read, width).to(torch.int16)
        found[0].append(values[:before])
        found[1].append(values[before:])
    none = torch.empty(0, width, dtype=torch.int16)
    return replace(
        made,
        prompt_experts=ragged(torch.cat([none, *found[0]]), prompt_sizes),
        experts=ragged(torch.cat([none, *found[1]]), sizes),
    )


def _of_other_tokens(name: str, row: int, got: int, expected: int) -> Finding:
    return Finding(
        code="E590",
        what=f"the engine of {name!r} does not tell which experts the tokens of row {row} chose",
        got=f"{got} bytes" if got else "nothing",
        expected=f"{expected} bytes, of every token that it has read and every layer",
        fix='leave out routing="record", or take a version of SGLang that returns routed experts',
    )
