"""Memory for shards: what a rank holds of a module that was shared out as a skeleton.

This file knows neither how a model is shared out nor what it is filled with.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate what this rank holds of every parameter; tied ones stay one parameter."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for layer in module.modules():
        own = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own:
            if id(parameter) not in made:
                made[id(parameter)] = (parameter, allocated(parameter, device))
            setattr(layer, name, made[id(parameter)][1])
        for name, buffer in list(layer.named_buffers(recurse=False)):
            setattr(layer, name, buffer.to(device))


def allocated(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The same parameter, or shard of one, with memory, full of zeros."""
    if not isinstance(parameter, DTensor):
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        return nn.Parameter(zeros, requires_grad=parameter.requires_grad)
    with torch.no_grad():
        shape = parameter.to_local().shape
    held = DTensor.from_local(
        torch.zeros(shape, dtype=parameter.dtype, device=device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(held, requires_grad=parameter.requires_grad)
