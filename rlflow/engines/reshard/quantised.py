"""Weights of linear layers in float8, with a scale for every block of 128 x 128 of them.

This is what checkpoints of DeepSeek-V3 (2024, section 3.3) and of the models after it in the same
form have, and what engines load of such. Embeddings, heads, norms, biases and adapters stay as
they are. This file knows no buckets and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from rlflow.engines.reshard.bucket_layout import scale_name

BLOCK = 128
# The largest number of float8_e4m3fn, and the least scale: of a block of zeros.
LARGEST = 448.0
LEAST = torch.finfo(torch.float32).tiny
# Elements that are quantised at once, which bounds what is made in float32 meanwhile.
AT_ONCE = 1 << 22

LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
# What `config.json` says of such a checkpoint.
QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def has_blocks(name: str, dimensions: int) -> bool:
    """Whether a weight of that name and number of dimensions is quantised."""
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and dimensions == 2 and layer.rpartition(".")[2] in LAYERS


def in_blocks(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights with those of linear layers quantised, each followed by its scales, in their order.

    What is quantised is first rounded to bfloat16, as buckets gather it.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if has_blocks(name, tensor.dim()):
            made[name], made[scale_name(name)] = quantise(tensor.to(torch.bfloat16))
        else:
            made[name] = tensor
    return made


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [rows, columns] as float8_e4m3fn, and the float32 scale of each of its blocks.

    Scales are [ceil(rows / 128), ceil(columns / 128)]; a value times its scale is the weight.
    """
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    shape = [-(-length // BLOCK) for length in weight.shape]
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    quantise_into(weight, values, scales)
    return values, scales


def quantise_into(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """The same into given memory, with float32 copies of 2**22 elements, or 128 rows, at a time.

    The scale is the largest magnitude of a block over 448, so that this becomes 448; values are
    rounded to the nearest, ties to even.
    """
    columns = weight.shape[1]
    step = max(1, AT_ONCE // max(columns * BLOCK, 1))
    for first in range(0, scales.shape[0], step):
        rows = slice(first * BLOCK, (first + step) * BLOCK)
        part = weight[rows].float()
        tall, wide = scales[first : first + step].shape
        beyond = (0, wide * BLOCK - columns, 0, tall * BLOCK - part.shape[0])
        blocks = functional.pad(part, beyond).view(tall, BLOCK, wide, BLOCK)
        scale = (blocks.abs().amax(dim=(1, 3)) / LARGEST).clamp(min=LEAST)
        scaled = (blocks / scale[:, None, :, None]).clamp(-LARGEST, LARGEST)
        flat = scaled.reshape(tall * BLOCK, wide * BLOCK)
        values[rows].copy_(flat[: part.shape[0], :columns])
        scales[first : first + step].copy_(scale)


def dequantised(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Float8 values times the scales of their blocks, in float32 and then rounded to `dtype`."""
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    rows, columns = values.shape
    return (values.float() * wide[:rows, :columns]).to(dtype)
