"""A decoder's forward without what packed tokens never need, put in place by its form.

The Llama family's bodies make masks, look for caches and collect what nobody asked for at every
call. Here a body embeds, runs its layers and norms, and a language model predicts at the tokens
that are wanted. Layers are called as modules, so that hooks and recomputation stay what they are.
This file knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import current_state


class ModelOutput(Protocol):
    """What a body gives."""

    last_hidden_state: Tensor


FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
BODIES = {f"{family}Model" for family in FAMILIES}
LANGUAGE_MODELS = {f"{family}ForCausalLM" for family in FAMILIES}
DECODER_LAYERS = {f"{family}DecoderLayer" for family in FAMILIES}


def stack_forward(layer: nn.Module) -> Callable[..., Any] | None:
    """The short forward of a decoder layer, a body or a language model; None for another module."""
    kind = type(layer).__name__
    if kind in DECODER_LAYERS:
        return partial(layer_forward, layer)
    if kind in BODIES:
        return partial(body_forward, layer)
    return partial(language_forward, layer) if kind in LANGUAGE_MODELS else None


def layer_forward(layer: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Attention and feed-forward layer, each on a norm and added to what came in."""
    normed = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(hidden_states=normed, attention_mask=None, **kwargs)
    between = hidden_states + attended
    output: Tensor = between + layer.mlp(layer.post_attention_layernorm(between))
    return output


def body_forward(
    body: Any,
    input_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **_: Any,
) -> ModelOutput:
    """The last hidden states of packed `input_ids [1, tokens]`, `[1, tokens, size]`.

    A model that sees gives `inputs_embeds`, and takes its output as transformers has it. Raises
    RunError where no attention was set, as in a direct call.
    """
    current_state()
    hidden = body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
    angles = body.rotary_emb(hidden, position_ids)
    for layer in body.layers:
        hidden = layer(hidden, position_embeddings=angles)
    if inputs_embeds is None:
        return SimpleNamespace(last_hidden_state=body.norm(hidden))
    from transformers.modeling_outputs import BaseModelOutputWithPast

    output: ModelOutput = BaseModelOutputWithPast(last_hidden_state=body.norm(hidden))
    return output


def language_forward(
    model: Any, logits_to_keep: Tensor | int = 0, **inputs: Tensor | bool
) -> SimpleNamespace:
    """Logits `[1, kept, vocabulary]` at the tokens that int64 `logits_to_keep` names, or at all."""
    hidden = model.model(**inputs).last_hidden_state
    if isinstance(logits_to_keep, Tensor):
        hidden = hidden.index_select(1, logits_to_keep)
    return SimpleNamespace(logits=model.lm_head(hidden))
