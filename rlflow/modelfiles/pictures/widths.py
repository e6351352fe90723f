"""The widths of a vision tower: what a picture costs in it, from config.json alone.

A tower's product has 2 operations a weight and patch, of its projector a weight and token, and its
attention 4 a width and pair of patches, of which none is masked: a picture of n patches has n^2
pairs where it is seen whole, and n times a window's where that is what a layer sees (Chowdhery et
al., "PaLM", 2022, appendix B, for both; Qwen2.5-VL, arXiv:2502.13923, section 2.1.1, for windows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.modelfiles.configs import deep_layers
from rlflow.modelfiles.pictures.sights import CHANNELS, Sight
from rlflow.modelfiles.pictures.towers import Part

# What a layer leaves to its backward of a patch: so many times its width, and so many its inner
# width, as torch's saved tensors were counted of each family; and whether its norms keep float32
# copies of two widths where numbers are narrower.
KEPT: Mapping[str, tuple[int, int, bool]] = {
    "qwen2_5_vl": (11, 3, True),
    "qwen3_vl": (11, 2, False),
    "qwen3_vl_moe": (11, 2, False),
    "gemma3": (8, 2, False),
    "internvl": (10, 2, False),
    "mistral3": (8, 3, True),
}
# Towers with gates, and their activation where a config names none. Of a product of SiLU and a
# gate one factor is computed again; of other activations a layer keeps one inner width more.
GATES: Mapping[str, str] = {"qwen2_5_vl": "silu", "mistral3": "gelu"}
# The same of what is beside layers: of a patch, and of a patch of each projector.
BESIDE, PROJECTED = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWidths:
    """A tower of `layers` as `wide` as that, and `inner` within them, and its `projectors`.

    A patch passes `vision` weights and has so many `pixels`, a token passes `projector` ones and
    is made of so many `patches`. A picture is seen whole by all layers but the `windowed`, which
    see a `window` of patches, or in tiles of so many patches where there is a `tile`. All pictures
    of a pass are `joined` under one mask, or each attends by itself. `kept` and `copied` say what a
    layer leaves to its backward.
    """

    layers: int
    wide: int
    inner: int
    vision: int
    projector: int
    projectors: int
    pixels: int
    patches: float
    windowed: int
    window: int
    tile: int
    joined: bool
    kept: tuple[int, int]
    copied: bool

    def forward(self, tokens: float, squares: float) -> tuple[float, float]:
        """Operations of a forward of pictures of so many tokens: the vision part, the projector.

        `squares` is the sum of the squares of each picture's tokens, or of those of a pass.
        """
        patches = tokens * self.patches
        whole = patches * self.tile if self.tile else squares * self.patches**2
        pairs = (self.layers - self.windowed) * whole + self.windowed * patches * self.window
        return 2 * self.vision * patches + 4 * pairs * self.wide, 2 * self.projector * tokens

    def layer_bytes(self, size: int) -> float:
        """Bytes of a patch that a layer leaves to its backward, in numbers of `size` bytes."""
        wide, inner = self.kept
        copies = 2 * 4 * self.wide if self.copied and size < 4 else 0
        return (wide * self.wide + inner * self.inner) * size + copies

    def mask_bytes(self, tokens: float, size: int) -> float:
        """Bytes of the mask of a pass of so many tokens of pictures."""
        return (tokens * self.patches) ** 2 * size if self.joined else 0.0

    def left(self, tokens: float, size: int, *, vision: bool, projector: bool) -> float:
        """Bytes that a forward of so many tokens leaves to a backward of the trained parts."""
        own = self.layers * self.layer_bytes(size) + (self.pixels + BESIDE * self.wide) * size
        joined = PROJECTED * self.projectors * self.wide * size
        # What comes before a trained part needs no backward, what comes after it does.
        found = tokens * self.patches * (own * vision + joined * (vision or projector))
        return found + self.mask_bytes(tokens, size) * vision


def tower_widths(
    config: Mapping[str, Any], sight: Sight | None, seeing: Mapping[Part, int]
) -> TowerWidths | None:
    """The widths of the tower that a config describes; None for a model without, or another form.

    `seeing` counts the weights of its parts.
    """
    kind, said = str(config.get("model_type")), config.get("vision_config")
    if sight is None or kind not in KEPT or not said or not seeing:
        return None
    side = _one(said["patch_size"])
    layers = int(said["depth"] if "depth" in said else said["num_hidden_layers"])
    tile = 0 if sight.sees in ("grid", "rows") else (sight.side // side) ** 2
    patches = tile / sight.each if tile else sight.merge**2
    if sight.sees == "rows":
        patches = (sight.side // side) ** 2
    full = said.get("fullatt_block_indexes")
    kept_wide, kept_inner, copied = KEPT[kind]
    if kind in GATES and said.get("hidden_act", GATES[kind]) != "silu":
        kept_inner += 1
    frames = int(said.get("temporal_patch_size", 2)) if sight.sees == "grid" else 1
    placed = int(said.get("num_position_embeddings", tile if kind != "mistral3" else 0))
    wide = int(said["hidden_size"])
    return TowerWidths(
        layers=layers,
        wide=wide,
        inner=int(said["intermediate_size"]),
        vision=max(seeing.get("vision", 0) - placed * wide - _pooled(kind, said), 0),
        projector=seeing.get("projector", 0),
        projectors=1 + deep_layers(config),
        pixels=CHANNELS * frames * side * side,
        patches=float(patches),
        windowed=layers - len(full) if full is not None else 0,
        window=(int(said.get("window_size", 0)) // side) ** 2,
        tile=tile,
        joined=kind == "mistral3",
        kept=(kept_wide, kept_inner),
        copied=copied,
    )


def _pooled(kind: str, said: Mapping[str, Any]) -> int:
    """Weights of a head that a tower has beside what the language model sees: of one token."""
    if kind != "gemma3" or not said.get("vision_use_head", True):
        return 0
    wide, inner = int(said["hidden_size"]), int(said["intermediate_size"])
    return 2 * (wide * wide + wide) + 2 * wide * inner + inner + 4 * wide


def _one(size: Any) -> int:
    return int(size[0] if isinstance(size, list) else size)
