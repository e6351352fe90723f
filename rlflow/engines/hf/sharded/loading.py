"""Memory for shards: what a rank holds of a module that was shared out, and what it gathers ahead.

This file knows neither how a model is shared out nor what it is filled with.
"""

from __future__ import annotations

import itertools
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlflow.engines.hf.recompute import decoder_layers, text_layers
from rlflow.engines.hf.sharded.expert_parallel import expert_layers


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate what this rank holds of every parameter; tied ones stay one parameter.

    FSDP gets to know all parts of the module, of which a first pass may go through some alone.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for layer in module.modules():
        own = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own:
            if id(parameter) not in made:
                made[id(parameter)] = (parameter, allocated(parameter, device))
            setattr(layer, name, made[id(parameter)][1])
        for name, buffer in list(layer.named_buffers(recurse=False)):
            setattr(layer, name, buffer.to(device))
    if isinstance(module, FSDPModule):
        module._get_fsdp_state()._lazy_init()


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


def gather_ahead(module: nn.Module, runs: tuple[int, ...] = ()) -> None:
    """Gather each layer before the one before it computes, and the first before the embedding.

    FSDP2 alone gathers it when that one's work is queued: beside it only where the host is ahead of
    the device. In a backward it gathers ahead by itself. Two layers are whole at a time. Of several
    `runs` of so many layers a pass goes through one.
    """
    several = len(runs) > 1
    layers = list((text_layers if several else decoder_layers)(module).values())
    each = [[layers.pop(0) for _ in range(count)] for count in runs] if several else [layers]
    whole = [] if several else [module]
    pairs = (itertools.pairwise([*whole, *run]) for run in each)
    for part, following in itertools.chain.from_iterable(pairs):
        if not isinstance(part, FSDPModule) or not isinstance(following, FSDPModule):
            continue
        ahead = [following, *expert_layers(cast("nn.Module", following))]
        part.set_modules_to_forward_prefetch([e for e in ahead if isinstance(e, FSDPModule)])
