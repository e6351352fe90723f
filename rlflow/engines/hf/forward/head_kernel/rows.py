"""Where Triton's kernels stand in for the passes of `chunks.py` over a chunk's logits, and how.

Operators of torch read and write each logit some 110 bytes in an update: to float32, by the scale
and the temperature, its power, its log-prob and gradient. The kernels read it once in a forward,
and read and write it once in a backward, in the model's dtype. What they are for, and the rule by
which plans price them, is in `rlflow.modelfiles.kernels.head`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.engines.hf.forward.sequences import compiles_kernels
from rlflow.engines.hf.forward.shares import ChunkNumbers, Projection, WantedNumbers
from rlflow.modelfiles.kernels.head import HeadAsked, head_by_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPulls:
    """What a backward has of each token, float32 `[tokens]`; None where no gradient comes.

    `level` is the log of the sum of all exponentials, `entropy` that of the distribution.
    """

    level: Tensor
    entropy: Tensor | None
    on_log_prob: Tensor | None
    on_entropy: Tensor | None


def kernels_fit(hidden: Tensor, asked: WantedNumbers, *, chosen: bool, biased: bool) -> bool:
    """Whether the kernels compute what is asked of `hidden`'s distributions.

    They have nothing for `chosen` ids, and a head that is `biased` has a gradient in float32.
    """
    more = asked.squared or asked.rest or asked.top_k or len(asked.temperatures) > 1
    return head_by_rows(
        HeadAsked(
            device=hidden.device.type,
            dtype=str(hidden.dtype).removeprefix("torch."),
            more=bool(more or chosen),
            biased=biased,
            compiles=compiles_kernels(),
        )
    )


def numbers_by_row(
    raw: Tensor, tokens: Tensor, asked: WantedNumbers, form: Projection
) -> ChunkNumbers:
    """What `chunk_numbers` finds of a product `raw [tokens, part]`, which stays as it is."""
    from rlflow.engines.hf.forward.head_kernel.kernels import BLOCK, WARPS, distribution

    raw, count = raw.contiguous(), len(raw)
    found = raw.new_empty(4, count, dtype=torch.float32)
    if count:
        distribution[(count,)](
            raw, tokens.contiguous(), found, count, form.start, form.scale, form.cap or 1.0,
            1 / asked.temperatures[0], SIZE=raw.shape[1], CAPPED=form.cap is not None,
            ENTROPY=asked.entropy, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    greatest, total, own, surprise = found.unbind()
    return ChunkNumbers(
        greatest, total, own, surprise if asked.entropy else None, None, None, None, None
    )


def pull_rows(
    raw: Tensor, tokens: Tensor, pulls: RowPulls, asked: WantedNumbers, form: Projection
) -> Tensor:
    """The gradient of a product `raw [tokens, part]` in its dtype, in its place."""
    from rlflow.engines.hf.forward.head_kernel.kernels import BLOCK, WARPS, pulled

    raw, count, none = raw.contiguous(), len(raw), torch.zeros_like(pulls.level)
    by_entropy = pulls.on_entropy is not None and pulls.entropy is not None
    parts = (pulls.level, pulls.entropy, pulls.on_log_prob, pulls.on_entropy)
    given = torch.stack([none if each is None else each for each in parts])
    if count:
        pulled[(count, -(-raw.shape[1] // BLOCK))](
            raw, tokens.contiguous(), given, count, form.start, form.scale, form.cap or 1.0,
            1 / asked.temperatures[0], SIZE=raw.shape[1], CAPPED=form.cap is not None,
            ENTROPY=by_entropy, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return raw
