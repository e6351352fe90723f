"""Faster forwards put in place of those that models share, found by their form.

Linear layers, root-mean-square norms, gated feed-forward layers, and the attention of the
Llama family. Whatever is replaced, the loaded model is compared with its own unmodified
forward, and `restore_forwards` takes everything back if they differ. This file knows the form
of layers, not how a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import Traits, current_state
from rlflow.engines.hf.forward.kernels import (
    gated_halves,
    linear,
    low_rank,
    products,
    root_norm,
    rotate,
)
from rlflow.engines.hf.forward.stack import stack_forward
from rlflow.engines.hf.lora import AdaptedLinear

# Attention modules that are: project, (norm,) rotate, attend, project.
ATTENTIONS = {"LlamaAttention", "Qwen2Attention", "Qwen3Attention", "MistralAttention"}
EXACT = {torch.float32, torch.float64}


class Joined:
    """Linear layers whose weights lie one after the other, seen as one."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        self.biases = [layer.bias for layer in layers if layer.bias is not None]
        self.adapted = any(isinstance(layer, AdaptedLinear) for layer in layers)

    @property
    def whole(self) -> bool:
        """Whether weights, and biases if there are any, really lie that way."""
        if self.biases and (len(self.biases) < len(self.layers) or not adjacent(self.biases)):
            return False
        return adjacent([layer.weight for layer in self.layers])

    @cached_property
    def weight(self) -> Tensor:
        """The weights as one, `[out, in]`; first asked for while they have memory."""
        return span([layer.weight for layer in self.layers])

    @cached_property
    def bias(self) -> Tensor | None:
        """The biases as one."""
        return span(self.biases) if self.biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs side by side for `x [rows, in]`."""
        output = products(x, self.weight, self.bias, self.layers)
        if not self.adapted:
            return output
        changes = [change(layer, x) for layer in self.layers]
        if all(part is None for part in changes):
            return output
        sized = zip(changes, self.sizes, strict=True)
        return output + torch.cat(
            [x.new_zeros(len(x), size) if part is None else part for part, size in sized], -1
        )


def adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether tensors follow each other in one storage, be it allocated or not."""
    first = parts[0]
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        if not same or part.storage_offset() != end or part.shape[1:] != first.shape[1:]:
            return False
        end += part.numel()
    return True


def span(parts: Sequence[Tensor]) -> Tensor:
    """One view over adjacent tensors."""
    first = parts[0].detach()
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def replace_forwards(module: nn.Module) -> None:
    """Put the faster forwards in place throughout a model."""
    for layer in module.modules():
        forward = _faster_forward(layer)
        if forward is not None:
            layer.forward = forward


def restore_forwards(module: nn.Module) -> None:
    """Give every layer its own forward back; one that carries states stays called row by row."""
    for layer in module.modules():
        if not hasattr(layer, "carries_state"):
            vars(layer).pop("forward", None)


def _faster_forward(layer: nn.Module) -> Any:
    """The faster forward of a layer, or None where its form is another."""
    kind = type(layer).__name__
    if type(layer) is nn.Linear or isinstance(layer, AdaptedLinear):
        return partial(linear_forward, layer)
    if kind.endswith("RMSNorm") and hasattr(layer, "variance_epsilon"):
        weight: Any = layer.weight
        return partial(norm_forward, layer) if weight.dtype in EXACT else None
    children: dict[str, Any] = dict(layer.named_children())
    if set(children) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        joined = Joined((children["gate_proj"], children["up_proj"]))
        silu = "silu" in type(children["act_fn"]).__name__.lower()
        return partial(_feed_forward, layer, joined) if silu and joined.whole else None
    if kind in ATTENTIONS:
        joined = Joined((children["q_proj"], children["k_proj"], children["v_proj"]))
        return partial(_attention_forward, layer, joined) if joined.whole else None
    return stack_forward(layer)


def linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    """The forward of `nn.Linear`, with the layer's adapter if it has one."""
    output = linear(x, layer)
    added = change(layer, x)
    return output if added is None else output + added


def change(layer: nn.Linear, x: Tensor) -> Tensor | None:
    """What a layer's adapter adds to its output for `x [..., in]`, None where nothing does."""
    if not isinstance(layer, AdaptedLinear) or not layer.adapters.active:
        return None
    rows = x.reshape(-1, x.shape[-1])
    output = low_rank(rows, layer.lora_A, layer.lora_B, layer.adapters.scale)
    return output.view(*x.shape[:-1], layer.out_features)


def norm_forward(layer: Any, x: Tensor) -> Tensor:
    """The forward of a root-mean-square norm with a plain weight."""
    return root_norm(x, layer.weight, layer.variance_epsilon)


def _feed_forward(layer: Any, joined: Joined, x: Tensor) -> Tensor:
    """The forward of down(silu(gate(x)) * up(x))."""
    hidden = gated_halves(joined(x.view(-1, x.shape[-1])))
    return linear_forward(layer.down_proj, hidden).view(x.shape)


def _attention_forward(
    layer: Any,
    joined: Joined,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The forward of an attention layer on packed `hidden_states [1, tokens, size]`."""
    size = layer.head_dim
    both = joined(hidden_states[0])
    heads, kv_heads = joined.sizes[0] // size, joined.sizes[1] // size
    parts = both.view(len(both), -1, size)
    cos, sin = (part[0].unsqueeze(1) for part in position_embeddings)
    if hasattr(layer, "q_norm"):
        q = rotate(layer.q_norm(parts[:, :heads]), cos, sin)
        k = rotate(layer.k_norm(parts[:, heads : heads + kv_heads]), cos, sin)
    else:
        both = rotate(parts[:, : heads + kv_heads], cos, sin)
        q, k = both[:, :heads], both[:, heads:]
    window = getattr(layer, "sliding_window", None)
    if type(layer).__name__ == "MistralAttention":
        window = layer.config.sliding_window
    traits = Traits(scaling=layer.scaling, window=window)
    v = parts[:, heads + kv_heads :]
    output = current_state().attend(layer.layer_idx, q, k, v, traits)
    return linear_forward(layer.o_proj, output.flatten(1))[None], None
