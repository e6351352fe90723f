"""What weights are called: by a module, several times where they are tied, and in its files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# What GPT-NeoX's files call the head over the vocabulary.
VOCABULARY = {"lm_head.weight": "embed_out.weight"}


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return found


def repeated_parameters(module: nn.Module) -> set[str]:
    """The names of parameters that are another one's: all but the first of each."""
    kept = dict(module.named_parameters())
    return {name for name, _ in module.named_parameters(remove_duplicate=False)} - kept.keys()


def names_in_file(names: list[str], inner: Any) -> list[str]:
    """What a parameter may be called in a file: with or without the prefix of a model's body."""
    prefix = f"{inner.base_model_prefix}."
    plain = [name.removeprefix("body.") for name in names]
    plain += [VOCABULARY[name] for name in plain if name in VOCABULARY]
    return [
        *plain,
        *(name.removeprefix(prefix) for name in plain),
        *(prefix + name for name in plain),
    ]


def names_in_files(module: Any) -> dict[str, str] | None:
    """The module's own name of every tensor of its files; None where files have other tensors.

    For some architectures transformers joins tensors of the files, and takes them apart again.
    """
    from transformers.core_model_loading import revert_weight_conversion

    left_out = set(module._keys_to_ignore_on_save or ()) | repeated_parameters(module)
    held = {n: t for n, t in module.state_dict().items() if n not in left_out}
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in held.items()}
    own = {id(tensor): name for name, tensor in empty.items()}
    try:
        stored = revert_weight_conversion(module, dict(empty))
    except RuntimeError:  # taking tensors apart asks for numbers, which these have not
        return None
    if {id(tensor) for tensor in stored.values()} != own.keys():
        return None
    return {name: own[id(tensor)] for name, tensor in stored.items()}
