"""Low-rank adapters on linear layers: y = W x + (alpha / rank) B A x.

Hu et al., "LoRA: low-rank adaptation of large language models" (arXiv:2106.09685), section
4.1. An adapted layer keeps its place, its name and `weight`, and gains `lora_A [rank, in]` and
`lora_B [out, rank]`; everything else is frozen. This file knows no optimizer and no sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlflow.engines.hf.generate.rng import uniforms
from rlflow.errors import Finding, UsageError, known_names, near_names
from rlflow.modelfiles.pictures.towers import is_tower

DOWN, UP = ".lora_A", ".lora_B"
# What a model gains beyond its pretrained layers is trained in whole.
ADDED_HEAD = "value_head"


class AdapterSpec(Protocol):
    """What adapters are made from."""

    @property
    def rank(self) -> int:
        """How many dimensions the change of a weight has."""

    @property
    def alpha(self) -> float:
        """The change is multiplied by alpha / rank."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Last parts of the names of the layers that get adapters."""


class Adapters:
    """The adapters of one model: their layers by name, their scale, and whether they are on.

    `names` are the parameters that training changes.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.active = True
        self.layers: dict[str, AdaptedLinear] = {}
        self.names: frozenset[str] = frozenset()

    def keep(self, module: nn.Module) -> None:
        """Know those alone that are still in a module of which parts were taken out."""
        there, known = set(module.modules()), {name for name, _ in module.named_parameters()}
        self.layers = {name: layer for name, layer in self.layers.items() if layer in there}
        self.names &= known

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compute the base model within the block, in every thread."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The plain model's tensors by its own names, of all tensors of the adapted one.

        Adapted weights are new tensors W + scale B A, added in float32 at least.
        """
        found = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
        for name in self.layers:
            weight = found[f"{name}.weight"]
            wide = torch.promote_types(weight.dtype, torch.float32)
            down, up = (tensors[name + part].to(weight.device, wide) for part in (DOWN, UP))
            found[f"{name}.weight"] = (weight.to(wide) + self.scale * (up @ down)).to(weight.dtype)
        return found


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter; made of a plain one in place, by `adapt`."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    adapters: Adapters

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for `x [..., in]`."""
        output = super().forward(x)
        if not self.adapters.active:
            return output
        inner = nn.functional.linear(x, self.lora_A)
        return output + self.adapters.scale * nn.functional.linear(inner, self.lora_B)


def adapt(module: nn.Module, spec: AdapterSpec, seed: int) -> Adapters:
    """Give the layers that `spec` names adapters, and freeze everything else.

    B is zero, so that nothing changes at first; A is `initial_down`. A value head stays
    trained. Works on modules on the meta device. Raises UsageError for a target that no linear
    layer matches, or whose weight is the embedding.
    """
    adapters = Adapters(spec.alpha / spec.rank)
    layers = chosen_layers(module, spec.targets)
    module.requires_grad_(False)
    for name, plain in layers.items():
        plain.__class__ = AdaptedLinear
        layer = cast("AdaptedLinear", plain)
        layer.adapters = adapters
        weight = layer.weight
        down = initial_down(seed, name + DOWN, spec.rank, layer.in_features)
        layer.lora_A = nn.Parameter(down.to(weight.device, weight.dtype))
        layer.lora_B = nn.Parameter(weight.new_zeros(layer.out_features, spec.rank))
        adapters.layers[name] = layer
    for name, parameter in module.named_parameters():
        if name.split(".")[0] == ADDED_HEAD:
            parameter.requires_grad_(True)
    adapters.names = frozenset(name for name, p in module.named_parameters() if p.requires_grad)
    return adapters


def is_adapter(name: str) -> bool:
    """Whether a parameter is one half of an adapter, by its name."""
    return name.endswith((DOWN, UP))


def initial_down(seed: int, name: str, rank: int, size: int) -> Tensor:
    """A of a layer, float64 `[rank, size]`: uniform in +-1 / sqrt(size).

    That is the Kaiming-uniform distribution (He et al. 2015) with the gain 1 / sqrt(3) that
    linear layers have in torch. A function of seed and parameter name alone.
    """
    drawn = uniforms(seed, 0, name, np.arange(rank, dtype=np.int64), size)
    return torch.from_numpy((2 * drawn - 1) * size**-0.5)


def chosen_layers(module: nn.Module, targets: tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear layers whose names end in one of `targets`, whole parts of a name only.

    Those of the language model alone: a tower of pictures stays as it is.
    """
    linears = {
        name: layer
        for name, layer in module.named_modules()
        if type(layer) is nn.Linear and name != ADDED_HEAD and not is_tower(name)
    }
    matches = {target: [n for n in linears if f".{n}".endswith(f".{target}")] for target in targets}
    missing = [unmatched(target, linears) for target, found in matches.items() if not found]
    shared = shared_parameters(module)
    tied = [
        tied_layer(name)
        for found in matches.values()
        for name in found
        if id(linears[name].weight) in shared
    ]
    if missing or tied:
        raise UsageError(*missing, *tied)
    wanted = {name for found in matches.values() for name in found}
    return {name: layer for name, layer in linears.items() if name in wanted}


def shared_parameters(module: nn.Module) -> set[int]:
    """Identities of the parameters that the module has under several names."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def unmatched(target: str, linears: Mapping[str, Any]) -> Finding:
    """What is wrong with a target that names no layer."""
    known = sorted({name.rpartition(".")[2] for name in linears})
    return Finding(
        code="E516",
        what=f"rf.LoRA has a target {target!r}, and the model has no linear layer of that name",
        got=known_names(known) if known else "a model without linear layers",
        expected="the last part of a linear layer's name, outside of what sees pictures",
        near=near_names(target, known),
        fix=f"targets=({', '.join(map(repr, known[:2]))})" if len(known) > 1 else "",
    )


def tied_layer(name: str) -> Finding:
    """What is wrong with a target whose weight is also something else."""
    return Finding(
        code="E516",
        what=f"layer {name!r} shares its weight with the embeddings, so it cannot be adapted",
        expected="a layer with a weight of its own",
        fix=f"leave {name.rpartition('.')[2]!r} out of targets=",
    )
