"""A rank's experts: of the tokens that all ranks see alike it computes those that chose them.

Tokens are sorted by expert, so that each expert's are one matrix and all of them one grouped
product (Gale et al., "MegaBlocks", arXiv:2211.15841, section 4). This file knows no router: which
experts a token has chosen, and their weights, are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What torch has a grouped product for.
GROUPED = {torch.float32, torch.bfloat16, torch.float16}


def own_experts(layer: Any, first: int, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What a layer's experts add to tokens `x [tokens, size]` that chose them, of its dtype.

    `chosen` int64 and `weights`, `[tokens, k]`, number the experts of all ranks; the layer has
    those from `first` on, stacked: gate and up `[experts, 2 width, size]`, down
    `[experts, size, width]`. A token that chose none of them has zeros.
    """
    count, k = len(layer.gate_up_proj), chosen.shape[1]
    expert = chosen.flatten() - first
    mine = ((expert >= 0) & (expert < count)).nonzero()[:, 0]
    pairs = mine[torch.sort(expert[mine], stable=True).indices]
    sizes = torch.bincount(expert[pairs], minlength=count)
    tokens = pairs // k
    gate, up = grouped_product(x[tokens], layer.gate_up_proj, sizes).chunk(2, -1)
    made = grouped_product(layer.act_fn(gate) * up, layer.down_proj, sizes)
    added = (made * weights.flatten()[pairs, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens, added)


def grouped_product(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """Runs of `rows [rows, in]`, each by the transpose of its `weight [runs, out, in]`.

    `sizes` int64 `[runs]` are their lengths, which may be 0.
    """
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is None or rows.device.type == "cpu" or rows.dtype not in GROUPED or not len(rows):
        parts = zip(torch.split(rows, sizes.tolist()), weight.unbind(), strict=True)
        return torch.cat([part @ one.T for part, one in parts])
    ends = sizes.cumsum(0).to(torch.int32)
    made: Tensor = grouped(rows, weight.transpose(1, 2), offs=ends)
    return made
