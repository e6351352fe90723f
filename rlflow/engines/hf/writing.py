"""Writing a model as a directory that `load_model`, transformers and TRL read.

A head that came from files is written under its name there. A fresh one is written as
transformers' `AutoModelForTokenClassification` keeps it, whose `score` has a bias, and without a
bias as its `AutoModelForSequenceClassification`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

Tensors = dict[str, Tensor]


def save_model(model: TorchModel, path: str) -> None:
    """Write config.json and safetensors, each tied weight once.

    Adapters are written as part of the weights that they adapt.
    """
    tensors = model.merged_tensors()
    if not isinstance(model.module, ValueModel):
        write(model.module, path, plain_state(model.module, tensors))
        return
    form = valued_form(model.module)
    held = model.module.state_dict()
    state = {name: tensors.get(own, held[own]) for name, own in form.names.items()}
    form.write(path, {name: tensor.detach().clone() for name, tensor in state.items()})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenForm:
    """How a model is written: as `module`, with the model's own name of each tensor of that.

    `architectures` are those that the config goes on to name, None where the module names its own.
    """

    module: Any
    names: Mapping[str, str]
    architectures: Sequence[str] | None

    def write(self, path: str, state: Tensors) -> None:
        """Write the config, and tensors by the names that the form has for them."""
        write(self.module, path, state)
        if self.architectures is None:
            return
        file = Path(path) / "config.json"
        written = {**json.loads(file.read_text()), "architectures": self.architectures}
        file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def valued_form(model: ValueModel) -> WrittenForm:
    """A body with its head, as the class of transformers that has one like it.

    Where no class has, under the names of the files that it came from.
    """
    body: Any = model.body
    tied, stored = repeated_parameters(body), model.stored_head
    inside = [name for name in body.state_dict() if name not in tied and not is_adapter(name)]
    head = {name: f"{ADDED_HEAD}.{name}" for name, _ in model.value_head.named_parameters()}
    wanted = {f"score.{name}" for name in head} if stored is None else set(stored.stored().values())
    for kind in ("SequenceClassification", "TokenClassification"):
        outer = labelled(f"AutoModelFor{kind}", body.config)
        names = [] if outer is None else [n for n in outer.state_dict() if not inner(outer, n)]
        fits = stored is not None and set(names) == wanted
        if outer is not None and (fits or (stored is None and len(names) == len(head))):
            heads = {name: head[name.rpartition(".")[2]] for name in names}
            prefix = f"{outer.base_model_prefix}."
            of_body = {prefix + name: f"body.{name}" for name in inside}
            return WrittenForm(module=outer, names={**of_body, **heads}, architectures=None)
    names_of = {n: f"score.{n}" for n in head} if stored is None else stored.stored()
    own = {name: f"body.{name}" for name in inside}
    own |= {names_of[name]: there for name, there in head.items()}
    return WrittenForm(module=body, names=own, architectures=body.config.architectures)


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
