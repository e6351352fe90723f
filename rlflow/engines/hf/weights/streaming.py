"""Whether a model's files hold its parameters as they are, so that each goes straight to its place.

A parameter may be all of a tensor of theirs, or of several, such as one of each expert. Else
transformers has to make the module: it unpacks quantised tensors, keeps some parameters wider than
it is told, and takes tied ones apart where the files have both. This file fills nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Head
from rlflow.engines.hf.heads import find_stored_head, model_folder
from rlflow.engines.hf.lora import ADDED_HEAD
from rlflow.engines.hf.weights.filling import places_of
from rlflow.engines.hf.weights.names import names_in_file, stored_buffers, tied_names
from rlflow.engines.hf.weights.parts import StoredPart, parts_in_files
from rlflow.engines.hf.weights.skeletons import skeleton
from rlflow.errors import UsageError
from rlflow.modelfiles.headers import Shape, tensor_dtypes, tensor_shapes

# What safetensors calls dtypes whose numbers are those of the weights.
PLAIN = {"F64", "F32", "F16", "BF16"}


def streamed_skeleton(
    path: str,
    config: ModelConfig,
    head: Head,
    dtype: torch.dtype,
    *,
    drawn: bool = False,
    fresh_head: bool = True,
) -> nn.Module | None:
    """A skeleton that can be filled from the files at `path`, or with what is `drawn`.

    None where transformers has to make the module. Raises UsageError (E524, E525) for a head that
    is missing and may not be fresh, or of a form that is not known.
    """
    stored = None
    if head == "value" and not drawn:
        stored = find_stored_head(path, config, fresh=fresh_head)
    try:
        module = skeleton(path, config, head, dtype, stored)
    except UsageError:
        return None
    return module if drawn or _fits(module, path, dtype) else None


def _fits(module: Any, path: str, dtype: torch.dtype) -> bool:
    """Whether files hold what the module has, under its names and in its shapes."""
    inner = getattr(module, "body", module)
    widened = set(getattr(inner, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        widened |= set(getattr(inner, "_keep_in_fp32_modules", None) or ())
    quantised = getattr(inner.config, "quantization_config", None) is not None
    tied = tied_names(module)
    # Buffers are wide in a skeleton, too.
    widened = {part for part in widened if any(part in name for name in tied)}
    if quantised or (widened and dtype in (torch.float16, torch.bfloat16)):
        return False
    return parts_in_files(inner) is not None and _are_stored(module, path, tied)


def _are_stored(module: Any, path: str, tied: Mapping[str, list[str]]) -> bool:
    """Whether each tensor is one of the files, of its shape and of plain numbers."""
    folder = model_folder(path)
    try:
        shapes, dtypes = tensor_shapes(folder), tensor_dtypes(folder)
    except UsageError:  # whoever makes the module says what is wrong
        return False
    own: dict[str, Shape] = {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters()
        if name.split(".")[0] != ADDED_HEAD
    }
    held = module.state_dict()
    own |= {name: tuple(held[name].shape) for name in stored_buffers(module)}
    inner = getattr(module, "body", module)
    places = places_of(own, module, shapes)
    return all(
        its
        and all(_is_plain(key, own[name], part, shapes, dtypes) for key, part in its.items())
        and (None not in its.values() or _is_once(tied.get(name, [name]), shapes, inner))
        for name, its in places.items()
    )


def _is_plain(
    key: str,
    shape: Shape,
    part: StoredPart | None,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
) -> bool:
    """Whether a tensor is stored, in the shape of a parameter or of its part."""
    wanted = shape if part is None else part.shape
    return key in shapes and shapes[key] == wanted and dtypes[key] in PLAIN


def _is_once(names: list[str], stored: Mapping[str, Shape], inner: Any) -> bool:
    """Whether a tied parameter is in the files under one of its names only."""
    return sum(any(key in stored for key in names_in_file([n], inner)) for n in names) == 1
