"""FlexAttention over packed tokens: one kernel for soft caps, windows, float32, and prompts.

Torch compiles a kernel of its own for what is done to scores (Dong et al., "Flex Attention",
arXiv:2412.05496), forward and backward, with a gradient of the log-sums. It is compiled with sizes
that may change, once for all numbers of tokens: what differs between layouts, windows and caps
are numbers in tensors, never constants of the kernel. On a CPU torch multiplies whole squares,
which only tests do. This file knows no layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# What lowers the traced function: inductor makes the kernel of an accelerator.
BACKEND = "inductor"
# One kernel for few and many queries: that for few has no place for each query's own keys.
_OPTIONS: Any = {"FORCE_USE_FLEX_ATTENTION": True}
# With and without gradient, in several dtypes, numbers of heads and models; torch gives up at 8.
MOST_VARIANTS = 64

Attend = Callable[[Tensor, Tensor, Tensor, Any, Tensor], tuple[Tensor, Any]]


def scaled_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, form: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scores `form[0] * q k`; `q [1, heads, tokens, size]`, `k`, `v` with as many heads or fewer.

    Returns the output like `q`, and log-sums `[1, heads, tokens]`.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def scaled(score: Tensor, *place: Tensor) -> Tensor:
        return score * form[0]

    output, more = flex_attention(
        q, k, v, score_mod=scaled, block_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True), kernel_options=_OPTIONS,
    )  # fmt: skip
    return output, more.lse


def capped_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, form: Tensor
) -> tuple[Tensor, Tensor | None]:
    """As `scaled_scores`, with scores `form[1] * tanh(form[0] * q k)`."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def bounded(score: Tensor, *place: Tensor) -> Tensor:
        return torch.tanh(score * form[0]) * form[1]

    output, more = flex_attention(
        q, k, v, score_mod=bounded, block_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True), kernel_options=_OPTIONS,
    )  # fmt: skip
    return output, more.lse


@cache
def compiled(attend: Attend, backend: str) -> Attend:
    """The function, traced once for sizes that change."""
    from torch._dynamo import config

    limits: Any = config
    limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
    made: Attend = torch.compile(attend, backend=backend, dynamic=True, fullgraph=True)
    return made


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output `[tokens, heads, value size]` and log-sums `[heads, tokens]`, both with gradients.

    `q [tokens, heads, size]`, `k` and `v` `[tokens, kv_heads, size]`; the log-sums are float32, or
    wider where `q` is.
    """
    numbers = (scale, 1.0) if softcap is None else (scale / softcap, softcap)
    form = constants(numbers, torch.promote_types(q.dtype, torch.float32), q.device)
    attend = compiled(scaled_scores if softcap is None else capped_scores, BACKEND)
    output, sums = attend(heads_first(q), heads_first(k), heads_first(v), mask, form)
    return output[0].transpose(0, 1), sums[0]


def heads_first(x: Tensor) -> Tensor:
    """Of `[tokens, heads, size]`, `[1, heads, tokens, size]` in which tokens alone may change.

    Torch takes sizes that are equal once for one, as of heads and of blocks of a mask.
    """
    found = x.transpose(0, 1)[None]
    sizes: Any = torch._dynamo
    sizes.mark_static(found, (1, 3))
    return found


@cache
def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The numbers on a device, made once by its own kernels; how many is no size that changes."""
    with torch.inference_mode(False):
        found = torch.stack([torch.full((), x, dtype=dtype, device=device) for x in numbers])
    sizes: Any = torch._dynamo
    sizes.mark_static(found)
    return found
