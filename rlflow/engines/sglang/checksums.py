"""Hashes of weights as SGLang makes them on a CPU, of weights under their Hugging Face names.

SGLang keeps projections of one input as one matrix and pads a vocabulary; the hash of a weight is
the first eight bytes of SHA-256 over its bytes. This file knows no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = ("embed_tokens", "lm_head")
VOCABULARY_STEP = 64


def layout(names: Iterable[str], staged: Mapping[str, Tensor]) -> dict[str, tuple[list[str], int]]:
    """Of an engine's weights: whose bytes each has, one after the other, and rows of zeros then.

    A weight that is not known has nobody's.
    """
    return {name: (parts(name, staged), padding(name, staged)) for name in names}


def parts(name: str, staged: Mapping[str, Tensor]) -> list[str]:
    """The weights that an engine's weight is made of."""
    if name in staged:
        return [name]
    *front, module, kind = ["", *name.split(".")]
    if module in VOCABULARY:
        # A head that is tied to the embeddings has no weight of its own.
        return [word for word in staged if word.endswith("embed_tokens.weight")]
    made = [".".join([*front[1:], part, kind]) for part in FUSED.get(module, ())]
    return made if all(part in staged for part in made) else []


def padding(name: str, staged: Mapping[str, Tensor]) -> int:
    """Rows that an engine adds, so that the vocabulary divides."""
    of = parts(name, staged)
    words = len(of) == 1 and name.split(".")[-2:-1] in [[word] for word in VOCABULARY]
    return -len(staged[of[0]]) % VOCABULARY_STEP if words else 0


def hashes(names: Iterable[str], staged: Mapping[str, Tensor]) -> dict[str, str]:
    """The hashes that an engine's weights should have; "" for one that is not known."""
    found = {}
    for name, (of, extra) in layout(names, staged).items():
        tensors = [staged[part] for part in of]
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
