"""Gradient checkpointing: a layer keeps its inputs and computes the rest again in backward.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174), section 4, by
`torch.utils.checkpoint`. A layer may keep what its attention made as well, which is dear to compute
for long rows and small to keep (Korthikanti et al., "Reducing activation recomputation in large
transformer models", arXiv:2205.05198, section 5, keep what is not attention: of a kernel that
never holds the scores the rest is what is large). This file knows where a model's layers are, not
what they compute, nor how they are sharded or trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlflow.engines.hf.forward.attention import AttentionState, attending, current_state
from rlflow.engines.hf.forward.spans import AttentionMemory
from rlflow.errors import Finding, UsageError
from rlflow.graph.placement import Recompute
from rlflow.modelfiles.pictures.towers import is_tower

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


def text_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a language model, without those of a tower beside it."""
    return {name: layer for name, layer in decoder_layers(module).items() if not is_tower(name)}


def body_name(module: nn.Module) -> str:
    """The name of what embeds tokens, has the decoder layers and norms, beside a tower if any."""
    inner: Any = getattr(module, "body", module)
    body = getattr(inner.base_model, "language_model", inner.base_model)
    name: str = next(known for known, part in module.named_modules() if part is body)
    return name


def recompute_layers(module: nn.Module, recompute: Recompute = True) -> None:
    """Make decoder layers keep only their inputs for the backward pass: all, or the first so many.

    With "selective" all of them keep what their attention makes beside. The first are the cheapest
    to take: when a backward computes them again, what the others kept is gone. Gradients are those
    of the plain layers bit for bit; without gradient nothing changes. Hooks of a layer stay
    outside, so that sharding which fetches weights before backward fetches them before this
    computes again. Call it after everything else that replaces forwards.
    """
    layers = list(decoder_layers(module).values())
    count = len(layers) if isinstance(recompute, bool | str) else recompute
    for layer in layers[:count] if recompute else []:
        layer.forward = partial(recomputed, layer.forward, selective=recompute == "selective")


def recomputed(plain: Callable[..., Left], *args: Any, selective: bool, **kwargs: Any) -> Left:
    """Call a layer's own forward; the backward pass calls it again, to the same attention.

    Backward may run in another thread, where no attention state is set. Where it is `selective`
    attention computes once.
    """
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    state = current_state()
    memory = AttentionMemory() if selective else None

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first = nullcontext() if memory is None else memory.filling()
        return first, recalling(state, memory)

    left: Left = checkpoint(
        plain,
        *args,
        use_reentrant=False,
        context_fn=contexts,
        preserve_rng_state=False,
        **kwargs,
    )
    return left


@contextmanager
def recalling(state: AttentionState, memory: AttentionMemory | None) -> Iterator[None]:
    """Send attention to `state` within the block; what it made is taken from a `memory`."""
    with attending(state), nullcontext() if memory is None else memory.telling():
        yield
