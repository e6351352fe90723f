"""The part of a model that sees: which of its weights those are, and how many.

By the names that transformers gives them, and by config.json alone where there are no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlflow.modelfiles.families import family_of

TOWERS = ("visual", "vision_tower", "multi_modal_projector")


def is_tower(name: str) -> bool:
    """Whether a weight belongs to what sees pictures, and not to the language model."""
    return not set(name.split(".")).isdisjoint(TOWERS)


def stored_tower(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers of a tower among tensors by name, with what joins it to the language model."""
    return sum(math.prod(shape) for name, shape in shapes.items() if is_tower(name))


def tower_parameters(config: Mapping[str, Any]) -> int:
    """Numbers of the tower that a config describes; 0 for a model without, or of another form."""
    counts: Mapping[str, Callable[[Mapping[str, Any], int], int]] = {
        "qwen2_5_vl": _qwen2_5,
        "qwen3_vl": _qwen3,
        "gemma3": _siglip,
        "internvl": _internvl,
        "mistral3": _pixtral,
    }
    kind = str(config.get("model_type"))
    if not family_of(config).sees or kind not in counts:
        return 0
    return counts[kind](config, int(config["text_config"]["hidden_size"]))


def _linear(inside: int, outside: int, *, bias: bool = True) -> int:
    return inside * outside + (outside if bias else 0)


def _qwen2_5(config: Mapping[str, Any], hidden: int) -> int:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    merged = wide * int(vision.get("spatial_merge_size", 2)) ** 2
    layer = _linear(wide, 3 * wide) + _linear(wide, wide) + 2 * wide
    layer += 2 * _linear(wide, inner) + _linear(inner, wide)
    out = int(vision.get("out_hidden_size", hidden))
    merger = wide + _linear(merged, merged) + _linear(merged, out)
    return int(vision["depth"]) * layer + merger + _patches(vision, wide)


def _qwen3(config: Mapping[str, Any], hidden: int) -> int:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    merged = wide * int(vision.get("spatial_merge_size", 2)) ** 2
    layer = _linear(wide, 3 * wide) + _linear(wide, wide) + 4 * wide
    layer += _linear(wide, inner) + _linear(inner, wide)
    out = int(vision.get("out_hidden_size", hidden))
    merger = _linear(merged, merged) + _linear(merged, out)
    deep = len(vision.get("deepstack_visual_indexes", ()))
    mergers = merger + 2 * wide + deep * (merger + 2 * merged)
    placed = int(vision["num_position_embeddings"]) * wide
    return int(vision["depth"]) * layer + mergers + placed + _patches(vision, wide) + wide


def _patches(vision: Mapping[str, Any], wide: int) -> int:
    """The embedding of patches of some frames, without a bias."""
    frames, side = int(vision.get("temporal_patch_size", 2)), int(vision["patch_size"])
    return int(vision.get("in_channels", 3)) * frames * side * side * wide


def _siglip(config: Mapping[str, Any], hidden: int) -> int:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    side, size = int(vision["patch_size"]), int(vision["image_size"])
    mlp = _linear(wide, inner) + _linear(inner, wide)
    layer = 4 * _linear(wide, wide) + mlp + 4 * wide
    embedded = _linear(3 * side * side, wide) + (size // side) ** 2 * wide
    head = 0
    if vision.get("vision_use_head", True):
        head = wide + 4 * _linear(wide, wide) + 2 * wide + mlp
    joined = wide * hidden + wide
    return int(vision["num_hidden_layers"]) * layer + embedded + 2 * wide + head + joined


def _internvl(config: Mapping[str, Any], hidden: int) -> int:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    side, size = (_one(vision[name]) for name in ("patch_size", "image_size"))
    biased = bool(vision.get("attention_bias", False))
    layer = 3 * _linear(wide, wide, bias=biased) + _linear(wide, wide) + 2 * wide
    layer += _linear(wide, inner) + _linear(inner, wide)
    normed = 1 if vision.get("norm_type", "layer_norm") == "rms_norm" else 2
    layer += 2 * normed * wide + (2 * wide if vision.get("use_qk_norm") else 0)
    embedded = _linear(3 * side * side, wide) + wide
    if vision.get("use_absolute_position_embeddings", True):
        embedded += ((size // side) ** 2 + 1) * wide
    last = 0 if vision.get("use_mean_pooling", True) else 2 * wide
    shuffled = wide * round(1 / float(config.get("downsample_ratio", 0.5))) ** 2
    joined = 2 * shuffled + _linear(shuffled, hidden) + _linear(hidden, hidden)
    return int(vision["num_hidden_layers"]) * layer + embedded + last + joined


def _pixtral(config: Mapping[str, Any], hidden: int) -> int:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    layer = 4 * wide * wide + 3 * wide * inner + 2 * wide
    embedded = 3 * int(vision["patch_size"]) ** 2 * wide + wide
    merged = wide * int(config.get("spatial_merge_size", 2)) ** 2
    biased = bool(config.get("multimodal_projector_bias", False))
    joined = wide + merged * wide + _linear(wide, hidden, bias=biased)
    joined += _linear(hidden, hidden, bias=biased)
    return int(vision["num_hidden_layers"]) * layer + embedded + joined


def _one(size: Any) -> int:
    return int(size[0] if isinstance(size, list) else size)
