"""What a model sees of a picture: how many tokens it takes in a prompt, and of which pixels.

Four ways are known. A `grid` is a picture resized to whole tokens, of merged patches (Qwen2.5-VL,
arXiv:2502.13923; Qwen3-VL); `rows` the same with a token at the end of each row (Pixtral,
arXiv:2410.07073); `soft` tokens are as many whatever the size, and see each other both ways (Gemma
3, arXiv:2503.19786); `tiles` are squares of such (InternVL3, arXiv:2504.10479). Sizes come from
config.json and from the settings of the image processor beside it. This file imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding
from rlflow.modelfiles.configs import text_config
from rlflow.modelfiles.families import SEEN_BY, Sees, family_of

SETTINGS = ("preprocessor_config.json", "processor_config.json")
CHANNELS = 3
# What forwards are given of pictures, beside tokens.
GIVEN = frozenset({"pixel_values", "image_grid_thw", "image_sizes"})
# InternVL's processor cuts pictures up, whatever its settings say but for `max_patches`.
MOST_TILES = 12
# How models see whose pictures an engine in a process of its own is given, by its name, with the
# language models beside that; of all of them alone those whose tower is the `usual` one. Gemma 3's
# are not: SGLang 0.5.23 lets tokens of a picture see each other in its Triton kernels alone.
SEEN_IN_ENGINES: Mapping[str, frozenset[tuple[Sees, str]]] = {
    "sglang": frozenset(
        {
            ("grid", "qwen2_5_vl_text"),
            ("grid", "qwen3_vl_text"),
            ("rows", "mistral"),
            ("tiles", "qwen2"),
            ("tiles", "qwen3"),
        }
    )
}
# SGLang takes pixels of Qwen2.5-VL whose patches have others than these for what its tower made.
PATCH_NUMBERS = 2 * 3 * 14 * 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How a model sees pictures.

    Every token of a picture is made of `numbers` of its pixels, and is `token` in the prompt.
    A token is a square of `side` pixels where pictures are resized to whole tokens, of `merge`
    patches a side; between `least` and `most` pixels, or `most` pixels long. Where sizes are fixed
    a tile of `side` pixels has `each` tokens. A picture is cut into up to `tiles` tiles. With
    `turns` a token has three positions, of time, height and width. A tower is `usual` that computes
    what those of published models do; of others engines compute the same.
    """

    sees: Sees
    token: int
    numbers: int
    side: int
    merge: int = 1
    each: int = 0
    least: int = 0
    most: int = 0
    tiles: int = 1
    turns: bool = False
    usual: bool = True

    def tokens(self, width: int, height: int) -> int:
        """How many tokens a picture of so many pixels takes at the most, marks around it apart."""
        if self.sees == "soft":
            return self.each
        if self.sees == "tiles":
            return self.each * (self.tiles + (self.tiles > 1))
        if self.sees == "rows":
            shrunk = max(width / self.most, height / self.most, 1.0)
            rows, columns = (-(-max(int(n / shrunk), 1) // self.side) for n in (height, width))
            return rows * (columns + 1)
        rows, columns = (round(n / self.side) for n in (height, width))
        pixels = rows * columns * self.side**2
        if pixels > self.most:
            shrunk = math.sqrt(height * width / self.most)
            rows, columns = (max(int(n / shrunk / self.side), 1) for n in (height, width))
        elif pixels < self.least:
            grown = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(n * grown / self.side) for n in (height, width))
        return rows * columns


def sight_of(directory: Path, config: Mapping[str, Any]) -> Sight | None:
    """What the model in a directory sees, None for one that reads text alone.

    Where its image processor has no settings there, by those of the family; see `unset_finding`.
    """
    return sight_in(config, settings_in(directory) or {})


def sight_in(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Sight | None:
    """The same by the settings of the processor; without any, how wide and not how large."""
    sees = family_of(config).sees
    if not sees:
        return None
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    found = {"grid": _grid, "rows": _rows, "soft": _soft, "tiles": _tiles}[sees]
    return found(config, vision, settings)


def seen_in(engine: str, kind: str, sight: Sight) -> bool:
    """Whether an engine in a process of its own, by its name, is given what a model sees."""
    return sight.usual and (sight.sees, kind) in SEEN_IN_ENGINES.get(engine, ())


def image_token(config: Mapping[str, Any]) -> int:
    """The number of the token that stands for a part of a picture."""
    named = config.get("image_token_id")
    return int(config["image_token_index"] if named is None else named)


def picture_finding(path: str, config: Mapping[str, Any]) -> Finding | None:
    """E551 where rlflow knows no way in which a model sees pictures; None where it does."""
    if family_of(config).sees:
        return None
    kind = str(config.get("model_type") or text_config(config).get("model_type"))
    return blind_finding(path, kind)


def blind_finding(path: str, kind: str) -> Finding:
    """E551: a model that sees no pictures, or in a way that is not known."""
    return Finding(
        code="E551",
        what=f"model {path!r} is given pictures, and is not known to see any",
        got=f"model_type {kind}",
        expected=f"one of {', '.join(SEEN_BY)}",
        fix="a source without images=",
    )


def unshared_sight(path: str, layout: str) -> Finding:
    """E554: a layout whose ranks do not bring pictures to a model."""
    return Finding(
        code="E554",
        what=f"model {path!r} is given pictures, and its layout or engine brings none",
        got=layout,
        expected="the engine in the worker, in any layout (fsdp=, ep=, tp=, cp=, pp=); or SGLang, "
        "of Qwen3-VL, Qwen2.5-VL, Mistral 3 and InternVL as they are published",
        fix="rf.on(..., fsdp=...)",
    )


def settings_in(directory: Path) -> Mapping[str, Any] | None:
    """What the image processor beside a model is set to; None where nothing says."""
    for name in SETTINGS:
        file = directory / name
        if file.is_file():
            said = json.loads(file.read_text(encoding="utf-8"))
            return dict(said.get("image_processor", said))
    return None


def unset_finding(directory: Path) -> Finding | None:
    """E553 where a model that sees comes without settings of its image processor."""
    if settings_in(directory) is not None:
        return None
    return Finding(
        code="E553",
        what=f"{str(directory)!r} has no settings of an image processor",
        expected=f"{' or '.join(SETTINGS)} beside config.json",
        fix=f"hf download ... {SETTINGS[0]}",
    )


def _grid(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sight:
    merge = int(settings.get("merge_size") or vision.get("spatial_merge_size") or 2)
    patch = int(settings.get("patch_size") or vision["patch_size"])
    frames = int(settings.get("temporal_patch_size") or vision.get("temporal_patch_size") or 2)
    numbers = CHANNELS * frames * patch**2
    size: Mapping[str, Any] = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return Sight(
        sees="grid",
        token=image_token(config),
        numbers=numbers * merge**2,
        side=patch * merge,
        merge=merge,
        least=int(least),
        most=int(most),
        turns=True,
        usual=config.get("model_type") != "qwen2_5_vl" or numbers == PATCH_NUMBERS,
    )


def _rows(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sight:
    merge = int(config.get("spatial_merge_size") or 2)
    side = int(vision["patch_size"]) * merge
    size: Mapping[str, Any] = settings.get("size") or {}
    return Sight(
        sees="rows",
        token=image_token(config),
        numbers=CHANNELS * side * side,
        side=side,
        merge=merge,
        most=int(size.get("longest_edge") or vision["image_size"]),
        # What transformers takes where nothing is said is not what SGLang has.
        usual=vision.get("hidden_act") == "silu" and _of_last_layer(config),
    )


def _soft(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sight:
    side, each = int(vision["image_size"]), int(config["mm_tokens_per_image"])
    return Sight(
        sees="soft",
        token=image_token(config),
        numbers=_per_token(CHANNELS * side * side, each),
        side=side,
        each=each,
    )


def _tiles(
    config: Mapping[str, Any], vision: Mapping[str, Any], settings: Mapping[str, Any]
) -> Sight:
    size = vision["image_size"]
    side = int(size[0] if isinstance(size, list) else size)
    each, most = int(config["image_seq_length"]), settings.get("max_patches")
    return Sight(
        sees="tiles",
        token=image_token(config),
        numbers=_per_token(CHANNELS * side * side, each),
        side=side,
        each=each,
        tiles=int(most or MOST_TILES),
        usual=bool(vision.get("use_mean_pooling", True)) and _of_last_layer(config),
    )


def _of_last_layer(config: Mapping[str, Any]) -> bool:
    """Whether what the last layer of a tower computes is all that goes on."""
    return bool(config.get("vision_feature_layer", -1) == -1)


def _per_token(pixels: int, tokens: int) -> int:
    """Numbers of a tile that each of its tokens is counted with; they are dealt out evenly."""
    return -(-pixels // tokens)
