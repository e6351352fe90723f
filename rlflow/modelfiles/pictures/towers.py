"""The parts of a model that see: which of its weights those are, and how many.

By the names that transformers gives them, and by config.json alone where there are no files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from rlflow.errors import Finding, known_names, near_names
from rlflow.modelfiles.configs import deep_layers
from rlflow.modelfiles.families import family_of

TOWERS = ("visual", "vision_tower", "multi_modal_projector")
PROJECTORS = ("merger", "deepstack_merger_list", "multi_modal_projector")
"""What makes a tower's outputs as wide as the language model; within Qwen's towers."""
Part = Literal["language", "vision", "projector"]
# Parts that training may leave as they are.
FREEZABLE: tuple[Part, ...] = ("vision", "projector")
PARTS: tuple[Part, ...] = ("language", *FREEZABLE)


def is_tower(name: str) -> bool:
    """Whether a weight belongs to what sees pictures, and not to the language model."""
    return not set(name.split(".")).isdisjoint(TOWERS)


def model_part(name: str) -> Part:
    """The part of a model that a weight belongs to."""
    if not is_tower(name):
        return "language"
    return "vision" if set(name.split(".")).isdisjoint(PROJECTORS) else "projector"


def parts_that_see(shapes: Mapping[str, tuple[int, ...]]) -> dict[Part, int]:
    """Numbers of each part that sees, among tensors by name; without those that are not there."""
    found: Counter[Part] = Counter()
    for name, shape in shapes.items():
        found[model_part(name)] += math.prod(shape)
    return {part: found[part] for part in FREEZABLE if found[part]}


def frozen_findings(path: str, wanted: Iterable[str], has: Collection[str]) -> list[Finding]:
    """E555 for each part that is to be frozen and that a model has not."""
    return [
        Finding(
            code="E555",
            what=f"model {path!r} is to leave its part {part!r} as it is, and has none",
            got=f"a model with {known_names(sorted(has)) if has else 'a part for text alone'}",
            expected=f"parts of a model that sees: {' and '.join(FREEZABLE)}",
            near=near_names(part, has),
            fix=f'freeze="{max(has)}"' if has else "leave out freeze=",
        )
        for part in wanted
        if part not in has
    ]


def parts_described(config: Mapping[str, Any]) -> dict[Part, int]:
    """Numbers of each part that sees, of what a config describes; none of another form."""
    counts: Mapping[str, Callable[[Mapping[str, Any], int], tuple[int, int]]] = {
        "qwen2_5_vl": _qwen2_5,
        "qwen3_vl": _qwen3,
        "qwen3_vl_moe": _qwen3,
        "gemma3": _siglip,
        "internvl": _internvl,
        "mistral3": _pixtral,
    }
    kind = str(config.get("model_type"))
    if not family_of(config).sees or kind not in counts:
        return {}
    vision, projector = counts[kind](config, int(config["text_config"]["hidden_size"]))
    return {"vision": vision, "projector": projector}


def _linear(inside: int, outside: int, *, bias: bool = True) -> int:
    return inside * outside + (outside if bias else 0)


def _qwen2_5(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    merged = wide * int(vision.get("spatial_merge_size", 2)) ** 2
    layer = _linear(wide, 3 * wide) + _linear(wide, wide) + 2 * wide
    layer += 2 * _linear(wide, inner) + _linear(inner, wide)
    out = int(vision.get("out_hidden_size", hidden))
    merger = wide + _linear(merged, merged) + _linear(merged, out)
    return int(vision["depth"]) * layer + _patches(vision, wide), merger


def _qwen3(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    merged = wide * int(vision.get("spatial_merge_size", 2)) ** 2
    layer = _linear(wide, 3 * wide) + _linear(wide, wide) + 4 * wide
    layer += _linear(wide, inner) + _linear(inner, wide)
    out = int(vision.get("out_hidden_size", hidden))
    merger = _linear(merged, merged) + _linear(merged, out)
    deep = deep_layers(config)
    mergers = merger + 2 * wide + deep * (merger + 2 * merged)
    placed = int(vision["num_position_embeddings"]) * wide
    return int(vision["depth"]) * layer + placed + _patches(vision, wide) + wide, mergers


def _patches(vision: Mapping[str, Any], wide: int) -> int:
    """The embedding of patches of some frames, without a bias."""
    frames, side = int(vision.get("temporal_patch_size", 2)), int(vision["patch_size"])
    return int(vision.get("in_channels", 3)) * frames * side * side * wide


def _siglip(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
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
    return int(vision["num_hidden_layers"]) * layer + embedded + 2 * wide + head, joined


def _internvl(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
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
    return int(vision["num_hidden_layers"]) * layer + embedded + last, joined


def _pixtral(config: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    vision = config["vision_config"]
    wide, inner = int(vision["hidden_size"]), int(vision["intermediate_size"])
    layer = 4 * wide * wide + 3 * wide * inner + 2 * wide
    embedded = 3 * int(vision["patch_size"]) ** 2 * wide + wide
    merged = wide * int(config.get("spatial_merge_size", 2)) ** 2
    biased = bool(config.get("multimodal_projector_bias", False))
    joined = wide + merged * wide + _linear(wide, hidden, bias=biased)
    joined += _linear(hidden, hidden, bias=biased)
    return int(vision["num_hidden_layers"]) * layer + embedded, joined


def _one(size: Any) -> int:
    return int(size[0] if isinstance(size, list) else size)
