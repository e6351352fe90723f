"""Decoder layers compiled by torch, in forwards of packed rows and their backward passes.

Compiled is what the model's authors wrote, not the forwards that are put in its place for a CPU's
sake, and attention stays as it is: it is a kernel, or several that are merged by where rows lie.
Tokens are a dynamic dimension, so that one compilation does for all micro-batches and all layers of
a kind (as torchtitan compiles blocks, Liang et al., arXiv:2410.06511). Decoding is not compiled:
its steps are replayed from graphs. This file knows where a model's layers are, not what they
compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from rlflow.engines.hf.forward.attention import NAME, PackedAttention, current_state
from rlflow.engines.hf.recompute import decoder_layers

Left = TypeVar("Left")

BACKEND = "inductor"
OPAQUE = f"{NAME}_opaque"
# Variants of one layer's code: with and without gradient, of one token, with adapters and without,
# in several dtypes and models of a process; torch gives up at 8.
MOST_VARIANTS = 64


def compile_layers(module: nn.Module) -> None:
    """Compile every decoder layer, each when it is first called on packed rows.

    Results are those of the plain layers to their dtype's rounding, not to the bit. Call it after
    other forwards are put in place, and before layers are recomputed. Raises UsageError for a
    module without such layers.
    """
    from torch._dynamo import config
    from transformers import AttentionInterface

    limits: Any = config
    limits.recompile_limit = max(limits.recompile_limit, MOST_VARIANTS)
    opaque: Any = torch.compiler.disable(AttentionInterface()[NAME])  # type: ignore[no-untyped-call]
    AttentionInterface.register(OPAQUE, opaque)
    for layer in decoder_layers(module).values():
        twin = _as_written(layer, {})
        compiled = torch.compile(twin.forward, backend=BACKEND, dynamic=True)
        layer.forward = partial(chosen, layer.forward, compiled)


def chosen(
    plain: Callable[..., Left], compiled: Callable[..., Left], *args: Any, **kwargs: Any
) -> Left:
    """The compiled forward where whole rows are packed and nothing keeps keys and values.

    Nor is there anything that routers follow, which is in the forwards that are not compiled.
    """
    state = current_state()
    packed = isinstance(state, PackedAttention) and state.cache is None and state.routing is None
    return compiled(*args, **kwargs) if packed else plain(*args, **kwargs)


def _as_written(module: nn.Module, configs: dict[int, Any]) -> nn.Module:
    """The same module with the forwards of its classes, on the same parameters and buffers.

    Those are looked up where the module has them, so that sharding may exchange them. Its attention
    is one that is not compiled; `configs` are what its parts have been given for that.
    """
    twin: nn.Module = object.__new__(type(module))  # A class of FSDP makes no copies.
    own = vars(twin)
    own.update(vars(module))
    if "carries_state" in own:
        own["forward"] = torch.compiler.disable(own["forward"])  # type: ignore[no-untyped-call]
    else:
        own.pop("forward", None)
    own["_modules"] = {
        name: part if part is None else _as_written(part, configs)
        for name, part in module._modules.items()
    }
    config = own.get("config")
    if config is not None:
        if id(config) not in configs:
            configs[id(config)] = copy.copy(config)
            configs[id(config)]._attn_implementation = OPAQUE
        own["config"] = configs[id(config)]
    return twin
