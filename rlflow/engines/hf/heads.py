"""The head of a value model: found in the files of a model, read, or fresh.

Which forms there are is in `rlflow.modelfiles.heads`; a body is read elsewhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from rlflow.contract.engines import ModelConfig
from rlflow.engines.hf.models import ValueModel
from rlflow.errors import UsageError
from rlflow.modelfiles.headers import INDEX, SINGLE, indexed_names, tensor_shapes, weight_files
from rlflow.modelfiles.heads import Head, find_head


def find_stored_head(path: str, config: ModelConfig, *, fresh: bool) -> Head | None:
    """The head in the files of a directory or hub model, None for one that may start fresh.

    Raises UsageError (E524, E525) where it is missing and may not be `fresh`, or of a form
    that is not known.
    """
    head, findings = find_head(
        tensor_shapes(model_folder(path)), config.to_dict(), path, fresh=fresh
    )
    if findings:
        raise UsageError(*findings)
    return head


def model_folder(path: str) -> Path:
    """The directory of a model, in the cache for one of the hub, with all its weights there."""
    if Path(path).is_dir():
        return Path(path)
    index = stored_file(path, INDEX)
    if index is not None:
        for name in indexed_names(index.parent):
            stored_file(path, name)
        return index.parent
    single = stored_file(path, SINGLE)
    return single.parent if single is not None else Path(path)


def stored_file(path: str, name: str) -> Path | None:
    """A file of a model in a directory or on the hub; None where there is no such file."""
    from transformers.utils import cached_file

    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def stored_names(path: str) -> dict[str, Path]:
    """The file of every tensor at `path`, by the tensor's name."""
    from safetensors import safe_open

    found = {}
    for file in weight_files(model_folder(path)):
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    return found


@torch.no_grad()
def read_head(module: ValueModel, head: Head, path: str) -> None:
    """Fill a value model's head from the files at `path`, rounded to its dtype."""
    from safetensors import safe_open

    files, parameters = stored_names(path), dict(module.value_head.named_parameters())
    for name, key in head.stored().items():
        with safe_open(files[key], framework="pt") as tensors:
            parameters[name].copy_(tensors.get_tensor(key))


def draw_head(module: ValueModel, config: ModelConfig) -> None:
    """Random weights for a head that nothing trains, as wide as the body's."""
    spread = float(getattr(config.get_text_config(), "initializer_range", 0.02))
    for layer in module.value_head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=spread)
