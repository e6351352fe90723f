"""The biases that routers of experts add before they choose, as weights of the model.

transformers keeps most of them as buffers. As parameters without gradient they are where all other
weights are: in memory that sleeps, in shards, in checkpoints, on the way to rollouts. This file
knows neither passes nor how a bias is corrected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlflow.modelfiles.mixtures.routers import ROUTERS


def correction_names(module: nn.Module) -> list[str]:
    """The names of a module's biases of routers, in the order of its layers."""
    leaf = _leaf(module)
    return [n for n, _ in module.named_parameters() if leaf and n.split(".")[-1] == leaf]


def weigh_corrections(module: nn.Module) -> None:
    """Make parameters, float32 at least, of those biases that are buffers."""
    leaf = _leaf(module)
    for layer in module.modules():
        if leaf and leaf in layer._buffers:
            buffer: Any = layer._buffers.pop(leaf)
            wide = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
            layer.register_parameter(leaf, nn.Parameter(wide, requires_grad=False))


def _leaf(module: nn.Module) -> str:
    """How a family calls such a bias; empty for one without."""
    inner: Any = getattr(module, "body", module)
    known = ROUTERS.get(inner.config.get_text_config().model_type)
    return known.bias if known is not None else ""
