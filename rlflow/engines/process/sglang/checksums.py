"""Hashes of weights as SGLang makes them on a CPU, of weights under their Hugging Face names.

SGLang keeps projections of one input as one matrix, and all experts of a layer as two tensors; it
cuts weights over the ranks of tensor parallelism and pads a vocabulary; of ranks beyond the
key-value heads several have the same head.
The hash of a weight is the first eight bytes of SHA-256 over its bytes. This file knows no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# What is one tensor of all experts: of each expert the layers, in one of the families' words.
EXPERTS = {
    "w13_weight": (("gate_proj", "up_proj"), ("w1", "w3")),
    "w2_weight": (("down_proj",), ("w2",)),
}
ATTENTION = "self_attn"
# A model that sees has its language model and its tower beside each other; SGLang has the first
# under the names of a model of text.
LANGUAGE, TOWER = "model.language_model.", "visual."
# A weight of every tower of a grid.
FIRST = "patch_embed.proj.weight"
# Those of Mistral 3 and InternVL have what leads from a tower to the language model beside them.
PROJECTED, PROJECTOR = "vision_tower.", "multi_modal_projector.linear_1.weight"
# What begins SGLang's names of such, and words in them, each with the word that files have.
WORDS = {
    "vision_tower.": ((".attention.proj.", ".attention.o_proj."),),
    "vision_model.": (
        ("vision_model.", "vision_tower."),
        ("class_embedding", "cls_token"),
        ("patch_embedding.", "patch_embeddings.projection."),
        ("position_embedding", "position_embeddings"),
        (".encoder.layers.", ".encoder.layer."),
        (".attn.attn.proj.", ".attention.projection_layer."),
        (".attn.attn.", ".attention."),
        (".ls1", ".lambda_1"),
        (".ls2", ".lambda_2"),
        (".norm1.", ".layernorm_before."),
        (".norm2.", ".layernorm_after."),
    ),
    "mlp1.": (
        ("mlp1.0.", "multi_modal_projector.layer_norm."),
        ("mlp1.1.", "multi_modal_projector.linear_1."),
        ("mlp1.3.", "multi_modal_projector.linear_2."),
    ),
    "multi_modal_projector.": (),
    "language_model.": (),
}
# Of the same files of a later kind, which begin all but the head with another word.
LATER = {"model.language_model.model.": LANGUAGE, "model.language_model.lm_head.": "lm_head."}
# Which axis a rotation turns with: it lies among an engine's weights, and no file has it.
TABLE = "rotary_emb.axis_map"
VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_STEP = 64
# What has rows of zeros at its end, the positions of a tower among it.
PADDED = (*VOCABULARY, "pos_embed")
OUTPUTS = frozenset(
    {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj"}
)
INPUTS = frozenset({"o_proj", "down_proj", "w2"})
KEYS = frozenset({"k_proj", "v_proj"})
# Of a tower, by the words at the end: layers that are cut by outputs, by inputs, and that which has
# queries, keys and values one after the other, each of which is cut by outputs.
TOWER_OUTPUTS = (
    *("mlp.0", "linear_fc1", "fc1", "gate_proj", "up_proj"),
    *("attention.q_proj", "attention.k_proj", "attention.v_proj"),
)
TOWER_INPUTS = (
    *("mlp.2", "linear_fc2", "fc2", "down_proj"),
    *("attn.proj", "attention.o_proj", "attention.projection_layer"),
)
TOWER_THIRDS = "attn.qkv"

# A weight, a dimension, and where in it a part of the weight begins and ends.
Piece = tuple[str, int, int, int]
# By an engine's name of a weight: its pieces, rows of zeros behind, and what is added to all.
Layout = dict[str, tuple[list[Piece], int, float]]
# A norm of Gemma keeps what it multiplies with beside its weight, which is that less one.
PLUS_ONE = "gemma_weight"


def weight_layout(
    names: Iterable[str],
    staged: Mapping[str, Tensor],
    rank: int = 0,
    ranks: int = 1,
    kv_heads: int | None = None,
) -> Layout:
    """Of a rank's weights: the pieces that each has, one after the other, and rows of zeros then.

    A weight that is not known has no piece. Of None `kv_heads` ranks are taken to be as many at
    the most.
    """
    found: Layout = {}
    for name in names:
        front, _, kind = name.rpartition(".")
        one = kind == PLUS_ONE
        of = f"{front}.weight" if one else name
        found[name] = (*pieces(of, staged, rank, ranks, kv_heads), 1.0 if one else 0.0)
    return found


def pieces(
    name: str,
    staged: Mapping[str, Tensor],
    rank: int,
    ranks: int,
    kv_heads: int | None = None,
) -> tuple[list[Piece], int]:
    """What a rank's weight is made of, cut as tensor parallelism cuts it, and rows of zeros.

    Attention and feed-forward layers are cut by outputs, and what leads out of them by inputs
    (Shoeybi et al. 2019, section 3), those of a tower too; a vocabulary by rows; the rest is whole.
    """
    found = parts(name, staged)
    if layer_of(name) in PADDED and found:
        return vocabulary(found[0], len(staged[found[0]]), rank, ranks)
    made: list[Piece] = []
    for part in found:
        shape, module = staged[part].shape, layer_of(part)
        inputs = len(shape) - 1
        if ranks > 1 and part.removeprefix("model.").startswith((TOWER, PROJECTED)):
            made += tower_pieces(part, shape, rank, ranks)
        elif ranks > 1 and module in OUTPUTS:
            place = head_of(part, rank, ranks, kv_heads)
            made.append((part, 0, *share(shape[0], *place)))
        elif ranks > 1 and module in INPUTS and inputs:
            made.append((part, inputs, *share(shape[inputs], rank, ranks)))
        else:
            made.append((part, 0, 0, shape[0]))
    return made, 0


def tower_pieces(part: str, shape: Sequence[int], rank: int, ranks: int) -> list[Piece]:
    """What a rank has of a weight of a tower."""
    module, inputs = part.rpartition(".")[0], len(shape) - 1
    if module.endswith(TOWER_THIRDS):
        third = shape[0] // 3
        start, stop = share(third, rank, ranks)
        return [(part, 0, third * number + start, third * number + stop) for number in range(3)]
    if module.endswith(TOWER_OUTPUTS):
        return [(part, 0, *share(shape[0], rank, ranks))]
    if module.endswith(TOWER_INPUTS) and inputs:
        return [(part, inputs, *share(shape[inputs], rank, ranks))]
    return [(part, 0, 0, shape[0])]


def vocabulary(part: str, size: int, rank: int, ranks: int) -> tuple[list[Piece], int]:
    """A rank's rows of a vocabulary, which is filled with zeros until it divides."""
    padded = -(-size // VOCABULARY_STEP) * VOCABULARY_STEP
    if padded % ranks:
        step = VOCABULARY_STEP * ranks
        padded = -(-size // step) * step
    start, stop = (min(end, size) for end in share(padded, rank, ranks))
    return [(part, 0, start, stop)], padded // ranks - (stop - start)


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's part of a side begins and ends."""
    return size * rank // ranks, size * (rank + 1) // ranks


def head_of(part: str, rank: int, ranks: int, kv_heads: int | None) -> tuple[int, int]:
    """Which part of how many of a weight's outputs a rank has.

    Where ranks are more than key-value heads, a head, which as many neighbours have.
    """
    if kv_heads is None or ranks <= kv_heads or layer_of(part) not in KEYS:
        return rank, ranks
    return rank * kv_heads // ranks, kv_heads


def layer_of(name: str) -> str:
    """The last word before a weight's own."""
    return name.rpartition(".")[0].rpartition(".")[2]


def parts(name: str, staged: Mapping[str, Tensor]) -> list[str]:
    """The weights that an engine's weight is made of."""
    if name in staged:
        return [name]
    name = beside_tower(name, staged)
    if name in staged:
        return [name]
    *front, module, kind = ["", *name.split(".")]
    if kind in EXPERTS:
        return parts_of_experts(".".join([*front[1:], module]), EXPERTS[kind], staged)
    if module in VOCABULARY:
        # A head that is tied to the embeddings has no weight of its own.
        return [word for word in staged if word.endswith("embed_tokens.weight")]
    made = [".".join([*front[1:], part, kind]) for part in FUSED.get(module, ())]
    if made and all(part in staged for part in made):
        return made
    # Layers of a hybrid have attention, or something else: some names leave out which.
    inside = ATTENTION in front or not front[1:]
    return [] if inside else parts(".".join([*front[1:], ATTENTION, module, kind]), staged)


def beside_tower(name: str, staged: Mapping[str, Tensor]) -> str:
    """The name of an engine's weight as files of a model that sees begin it; else as it is."""
    if name.startswith(TOWER):
        own = name.replace(".qkv_proj.", ".qkv.")
        return own if f"{TOWER}{FIRST}" in staged else f"model.{own}"
    if PROJECTOR in staged or f"model.{PROJECTOR}" in staged:
        return beside_projector(name, later=PROJECTOR not in staged)
    text = f"{LANGUAGE}norm.weight" in staged and not name.startswith(LANGUAGE)
    return LANGUAGE + name.removeprefix("model.") if text and name.startswith("model.") else name


def beside_projector(name: str, *, later: bool) -> str:
    """The same where a projector is beside the tower; in files of a later kind if so."""
    for engines, files in next((w for front, w in WORDS.items() if name.startswith(front)), ()):
        name = name.replace(engines, files)
    if not later:
        return name
    front = next((front for front in LATER if f"model.{name}".startswith(front)), None)
    return f"model.{name}" if front is None else LATER[front] + f"model.{name}".removeprefix(front)


def parts_of_experts(
    module: str, words: Sequence[Sequence[str]], staged: Mapping[str, Tensor]
) -> list[str]:
    """The weights of all experts of a layer that its engine has as one, expert by expert."""
    for layers in words:
        made: list[str] = []
        each = [f"{module}.0.{layer}.weight" for layer in layers]
        while all(part in staged for part in each):
            made += each
            number = len(made) // len(layers)
            each = [f"{module}.{number}.{layer}.weight" for layer in layers]
        if made:
            return made
    return []


def hashes(
    names: Iterable[str],
    staged: Mapping[str, Tensor],
    rank: int = 0,
    ranks: int = 1,
    kv_heads: int | None = None,
) -> dict[str, str]:
    """The hashes that a rank's weights should have; "" for one that is not known."""
    found = {}
    for name, (made, extra, more) in weight_layout(names, staged, rank, ranks, kv_heads).items():
        tensors = [staged[part].narrow(dim, start, stop - start) for part, dim, start, stop in made]
        tensors = [tensor + more for tensor in tensors] if more else tensors
        if extra:
            tensors.append(tensors[0].new_zeros(extra, *tensors[0].shape[1:]))
        found[name] = hashed(tensors) if tensors else ""
    return found


def hashed(tensors: Sequence[Tensor]) -> str:
    """The hash of tensors on the CPU, one after the other, 16 hexadecimal digits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()[:8].hex()
