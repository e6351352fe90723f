"""Gradient checkpointing: a layer keeps its inputs and computes the rest again in backward.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174), section 4, by
`torch.utils.checkpoint`. This file knows where a model's layers are, not what they compute,
nor how they are sharded or trained.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlflow.engines.hf.forward.attention import attending, current_state
from rlflow.errors import Finding, UsageError

Left = TypeVar("Left")


def decoder_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model by name, first to last.

    Raises UsageError for a model that has none which transformers marks as such.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: dict[str, nn.Module] = {}
    for name, layer in module.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(layer, GradientCheckpointingLayer) and not within:
            found[name] = layer
    if not found:
        raise UsageError(
            Finding(
                code="E515",
                what=f"{type(module).__name__} has no layers that can be treated one by one",
                expected="a model of transformers whose layers are GradientCheckpointingLayers",
                fix="hold it whole: fsdp=1, without recompute= and offload=",
            )
        )
    return found


def recompute_layers(module: nn.Module) -> None:
    """Make every decoder layer keep only its inputs for the backward pass.

    Gradients are those of the plain layers bit for bit; without gradient nothing changes. Hooks
    of a layer stay outside, so that sharding which fetches weights before backward fetches them
    before this computes again. Call it after everything else that replaces forwards.
    """
    for layer in decoder_layers(module).values():
        layer.forward = partial(recomputed, layer.forward)


def recomputed(plain: Callable[..., Left], *args: Any, **kwargs: Any) -> Left:
    """Call a layer's own forward; the backward pass calls it again, to the same attention.

    Backward may run in another thread, where no attention state is set.
    """
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    state = current_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), attending(state)

    left: Left = checkpoint(
        plain,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=False,
        **kwargs,
    )
    return left
