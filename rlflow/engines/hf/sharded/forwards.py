"""Faster forwards for layers whose weights come and go, and may be one rank's part.

The forms are those of `fused`, but weights are looked up at every call, for sharding fetches
them just before and takes them away after, and layers that tensor parallelism has cut are
computed by its `Split`. This file knows neither how weights are fetched nor what is trained.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import Traits, current_state
from rlflow.engines.hf.forward.fused import ATTENTIONS, EXACT, linear_forward, norm_forward
from rlflow.engines.hf.forward.kernels import gated_unit, root_norm, rotate
from rlflow.engines.hf.lora import AdaptedLinear
from rlflow.engines.hf.sharded.tensor_parallel import Split

GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def replace_cut_forwards(module: nn.Module, split: Split | None, dtype: torch.dtype) -> None:
    """Put the faster forwards in place throughout a model that computes in `dtype`."""
    for layer in module.modules():
        forward = _faster_forward(layer, split, dtype)
        if forward is not None:
            layer.forward = forward


def restore_cut_forwards(module: nn.Module, split: Split | None, dtype: torch.dtype) -> None:
    """Take them back; what tensor parallelism has cut keeps the forwards that it needs."""
    for layer in module.modules():
        if _faster_forward(layer, split, dtype) is not None:
            vars(layer).pop("forward", None)
            if split is not None and layer in split.roles:
                layer.forward = split.forward(layer)


def _faster_forward(layer: Any, split: Split | None, dtype: torch.dtype) -> Any:
    """The faster forward of a layer, or None where its form is another."""
    cut = split if split is not None and layer in split.roles else None
    kind = type(layer).__name__
    if kind.endswith("RMSNorm") and hasattr(layer, "variance_epsilon"):
        if dtype not in EXACT:
            return None
        return partial(norm_forward, layer) if cut is None else partial(shared_norm, layer, cut)
    if type(layer) in (nn.Linear, AdaptedLinear):
        return None if cut is not None else partial(linear_forward, layer)
    children = dict(layer.named_children())
    if set(children) == GATED and "silu" in type(children["act_fn"]).__name__.lower():
        parts = [children[name] for name in ("gate_proj", "up_proj", "down_proj")]
        return _same_cut(_cut_feed_forward, layer, parts, split)
    if kind in ATTENTIONS:
        parts = [children[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        return _same_cut(_attention_forward, layer, parts, split)
    return None


def _same_cut(forward: Any, layer: nn.Module, parts: list[nn.Module], split: Split | None) -> Any:
    """A forward of a layer whose parts are all cut, or none; None where only some are."""
    if split is None:
        return partial(forward, layer, None)
    count = sum(part in split.roles for part in parts)
    if count not in (0, len(parts)):
        return None
    return partial(forward, layer, split if count else None)


def shared_norm(layer: Any, split: Split, x: Tensor) -> Tensor:
    """The forward of a root-mean-square norm on this rank's part of the heads."""
    return root_norm(x, split.whole_weight(layer), layer.variance_epsilon)


def project(x: Tensor, layer: Any, split: Split | None) -> Tensor:
    """A linear layer's output; `x` is an `entered` one where the layer is cut by columns."""
    return linear_forward(layer, x) if split is None else split.project(x, layer)


def _cut_feed_forward(layer: Any, split: Split | None, x: Tensor) -> Tensor:
    """The forward of down(silu(gate(x)) * up(x))."""
    x = x if split is None else split.entered(x)
    gate, up = (project(x, part, split) for part in (layer.gate_proj, layer.up_proj))
    return project(gated_unit(gate, up), layer.down_proj, split)


def _attention_forward(
    layer: Any,
    split: Split | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of an attention layer on packed `hidden_states [1, tokens, size]`."""
    x = hidden_states[0] if split is None else split.entered(hidden_states[0])
    q, k, v = (
        project(x, part, split).view(len(x), -1, layer.head_dim)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if hasattr(layer, "q_norm"):
        q, k = layer.q_norm(q), layer.k_norm(k)
    cos, sin = (part[0].unsqueeze(1) for part in position_embeddings)
    window = getattr(layer, "sliding_window", None)
    if type(layer).__name__ == "MistralAttention":
        window = layer.config.sliding_window
    traits = Traits(scaling=layer.scaling, window=window)
    state = current_state()
    output = state.attend(layer.layer_idx, rotate(q, cos, sin), rotate(k, cos, sin), v, traits)
    return project(output.flatten(1), layer.o_proj, split)[None], None
