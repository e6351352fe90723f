"""Writing a model as a directory that `load_model`, transformers and TRL read.

A head that came from files is written under its name there. A fresh one is written as
transformers' `AutoModelForTokenClassification` keeps it, whose `score` has a bias, and without a
bias as its `AutoModelForSequenceClassification`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.contract.engines import ModelConfig
from rlflow.engines.hf.loading import quiet_transformers
from rlflow.engines.hf.lora import ADDED_HEAD, is_adapter
from rlflow.engines.hf.models import TorchModel, ValueModel
from rlflow.engines.hf.weights.names import repeated_parameters
from rlflow.engines.hf.weights.skeletons import auto
from rlflow.modelfiles.heads import Head

Tensors = dict[str, Tensor]


def save_model(model: TorchModel, path: str) -> None:
    """Write config.json and safetensors, each tied weight once.

    Adapters are written as part of the weights that they adapt.
    """
    tensors = model.merged_tensors()
    if not isinstance(model.module, ValueModel):
        write(model.module, path, plain_state(model.module, tensors))
        return
    body: Any = model.module.body
    inside = {name.removeprefix("body."): tensor for name, tensor in tensors.items()}
    state = plain_state(body, inside)
    head = {
        name.removeprefix(f"{ADDED_HEAD}."): tensor.detach().clone()
        for name, tensor in tensors.items()
        if name.startswith(f"{ADDED_HEAD}.")
    }
    save_valued(body, state, head, model.module.stored_head, path)


def plain_state(module: nn.Module, tensors: Tensors) -> Tensors:
    """The tensors that a module's files hold, by name; of tied ones the first, and buffers."""
    tied = repeated_parameters(module)
    return {
        name: tensors.get(name, tensor).detach().clone()
        for name, tensor in module.state_dict().items()
        if name not in tied and not is_adapter(name)
    }


def files_of(shapes: Tensors) -> dict[str, list[str]]:
    """How the tensors of those shapes are shared out among files, as transformers does it."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern="model{suffix}.safetensors", max_shard_size="50GB"
    )
    found: dict[str, list[str]] = split.filename_to_tensors
    return found


def write(module: Any, path: str, state: Tensors) -> None:
    """Write a module's config and some tensors, as transformers does."""
    with quiet_transformers():
        module.save_pretrained(path, state_dict=state)


def save_valued(body: Any, state: Tensors, head: Tensors, stored: Head | None, path: str) -> None:
    """Write a body with its head, as the class of transformers that has one like it.

    Where no class has, under the names of the files that it came from.
    """
    wanted = {f"score.{name}" for name in head} if stored is None else set(stored.stored().values())
    for kind in ("SequenceClassification", "TokenClassification"):
        outer = labelled(f"AutoModelFor{kind}", body.config)
        names = [] if outer is None else [n for n in outer.state_dict() if not inner(outer, n)]
        fits = stored is not None and set(names) == wanted
        if outer is not None and (fits or (stored is None and len(names) == len(head))):
            heads = {name: head[name.rpartition(".")[2]] for name in names}
            prefix = f"{outer.base_model_prefix}."
            write(outer, path, {**{prefix + name: t for name, t in state.items()}, **heads})
            return
    names_of = {n: f"score.{n}" for n in head} if stored is None else stored.stored()
    architectures = body.config.architectures
    write(body, path, {**state, **{names_of[name]: tensor for name, tensor in head.items()}})
    file = Path(path) / "config.json"
    written = {**json.loads(file.read_text()), "architectures": architectures}
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def inner(outer: Any, name: str) -> bool:
    """Whether a parameter is the body's."""
    return name.startswith(f"{outer.base_model_prefix}.")


def labelled(maker: str, config: ModelConfig) -> Any:
    """A classifier of one label on the meta device, None where the architecture has none."""
    one = type(config).from_dict({**config.to_dict(), "num_labels": 1})
    try:
        with quiet_transformers(), torch.device("meta"):
            return auto(maker).from_config(one)
    except ValueError:
        return None
