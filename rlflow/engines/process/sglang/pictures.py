"""Pictures of prompts as SGLang takes what a model's processor has made of them.

Prompts come with a token for each part of a picture, so that nothing is expanded there; pixels and
positions are those that training sees. This file knows no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import split_rows
from rlflow.contract.pictures import Pictures
from rlflow.engines.hf.pictures.passes import forward_inputs, turned_positions
from rlflow.modelfiles.pictures.sights import Sight

# A tensor: its dtype, its shape, its bytes.
Sent = tuple[str, tuple[int, ...], bytes]


def sent_pictures(sight: Sight, prompts: Tensor, pictures: Pictures) -> list[dict[str, Sent]]:
    """What a forward takes of each prompt's pictures, by name; nothing of a prompt without any.

    `prompts` are ragged tokens.
    """
    rows = zip(
        split_rows(prompts), split_rows(pictures.pixels), split_rows(pictures.shapes), strict=True
    )
    return [
        {name: _sent(value) for name, value in _given(sight, *row).items()} if len(row[-1]) else {}
        for row in rows
    ]


def _given(sight: Sight, tokens: Tensor, pixels: Tensor, shapes: Tensor) -> dict[str, Tensor]:
    """What a forward takes, and where the tokens stand.

    SGLang finds pictures of Qwen2.5-VL by the token before them, which a template may leave out;
    positions that come with a request it takes as they are.
    """
    given = forward_inputs(sight, pixels, shapes)
    if sight.turns:
        turned = turned_positions(tokens.numpy(), sight.token, shapes.numpy(), sight.merge)
        given["mrope_positions"] = torch.from_numpy(turned)
        given["mrope_position_delta"] = given["mrope_positions"].max() + 1 - len(tokens)
    return given


def _sent(value: Tensor) -> Sent:
    held = value.contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), data
