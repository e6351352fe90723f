"""How a model of transformers puts what its tower made of pictures in the place of their tokens.

It looks for tokens of a certain number; here the pass says which they are, for a model may draw
such a number, and a row may have none while a blank picture passes the tower with it. This file
knows neither rows nor losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import PackedAttention, current_state
from rlflow.modelfiles.pictures.towers import is_tower

# Attention within towers is transformers' own: whole pictures, without a cache.
TOWER_ATTENTION = "sdpa"


def let_see(module: nn.Module) -> None:
    """Have a model take the places of pictures from the pass in progress."""
    for part in module.modules():
        body: Any = part
        if hasattr(body, "get_placeholder_mask"):
            body.get_image_features = partial(_features_of_own, body.get_image_features)
            several = "video_features" in body.get_placeholder_mask.__code__.co_varnames
            body.get_placeholder_mask = partial(_placeholders, several)
        if hasattr(body, "_deepstack_process"):
            body._deepstack_process = _added


def tower_modules(module: nn.Module) -> list[nn.Module]:
    """All modules within towers."""
    return [part for name, part in module.named_modules() if is_tower(name)]


def picture_places() -> Tensor:
    """The flat tokens that stand for pictures in the pass in progress."""
    state = current_state()
    assert isinstance(state, PackedAttention)
    found: Tensor = state.pictures.places
    return found


def _features_of_own(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a tower makes of pictures, of which a rank may have the tokens of some alone."""
    found, state = plain(*args, **kwargs), current_state()
    assert isinstance(state, PackedAttention)
    chosen = state.pictures.features
    if chosen is None:
        return found
    found.pooler_output = _chosen(found.pooler_output, chosen)
    if getattr(found, "deepstack_features", None) is not None:
        found.deepstack_features = [_chosen(each, chosen) for each in found.deepstack_features]
    return found


def _chosen(made: Tensor | Sequence[Tensor], chosen: Tensor) -> Tensor | tuple[Tensor]:
    """Of tokens `[pictures, tokens, size]`, or `[tokens, size]` of each picture, those chosen."""
    if isinstance(made, Tensor):
        return made.flatten(0, 1)[chosen]
    return (torch.cat(list(made))[chosen],)


def _placeholders(several: bool, input_ids: Tensor, inputs_embeds: Tensor, **features: Any) -> Any:
    """Which tokens pictures take the place of, bool `[1, tokens, 1]`; and of videos where asked."""
    mask = torch.zeros(inputs_embeds.shape[1], dtype=torch.bool, device=inputs_embeds.device)
    mask[picture_places()] = True
    return (mask[None, :, None], None) if several else mask[None, :, None]


def _added(hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Hidden states `[1, tokens, size]` with what a layer of the tower adds to a picture's."""
    return added_at(hidden_states, picture_places(), visual_embeds)


def added_at(hidden: Tensor, places: Tensor, made: Tensor) -> Tensor:
    """Hidden states `[1, tokens, size]` with `made [places, size]` added at some places.

    Without any, what was made of a blank picture has gradients of zero.
    """
    made = made.to(hidden.device, hidden.dtype)
    if not len(places):
        return hidden + made.sum() * 0
    return hidden.index_add(1, places, made[None])
