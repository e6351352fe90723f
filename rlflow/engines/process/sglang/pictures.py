"""Pictures of prompts as SGLang takes what a model's processor has made of them.

Prompts come with a token for each part of a picture, so that nothing is expanded there, and pixels
are those that training sees. This file knows no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import split_rows
from rlflow.contract.pictures import Pictures
from rlflow.engines.hf.pictures.passes import forward_inputs
from rlflow.modelfiles.pictures.sights import Sight

# A tensor: its dtype, its shape, its bytes.
Sent = tuple[str, tuple[int, ...], bytes]


def sent_pictures(sight: Sight, pictures: Pictures) -> list[dict[str, Sent]]:
    """What a forward takes of each prompt's pictures, by name; nothing of a prompt without any."""
    rows = zip(split_rows(pictures.pixels), split_rows(pictures.shapes), strict=True)
    return [
        {name: _sent(value) for name, value in forward_inputs(sight, pixels, shapes).items()}
        if len(shapes)
        else {}
        for pixels, shapes in rows
    ]


def _sent(value: Tensor) -> Sent:
    held = value.contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), data
