"""Filling shards: a model's skeleton without memory, and each rank's slices of its weights.

A skeleton lies on the meta device; what a rank holds of it is allocated after it was shared
out, and filled from safetensors, of which only the slices are read, or from random weights one
parameter at a time. This file knows neither how a model is shared out nor what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlflow.contract.engines import ModelConfig
from rlflow.contract.progress import advance
from rlflow.contract.values import Head, Shard
from rlflow.engines.hf.heads import stored_names
from rlflow.engines.hf.loading import Init, auto, build
from rlflow.engines.hf.lora import ADDED_HEAD, DOWN, initial_down, is_adapter
from rlflow.engines.hf.models import ValueModel
from rlflow.engines.hf.sharded.model import ShardedModel
from rlflow.engines.hf.sharded.random_weights import drawn_parameters
from rlflow.errors import Finding, UsageError, known_names
from rlflow.modelfiles.heads import Head as StoredHead

# What GPT-NeoX's files call the head over the vocabulary.
VOCABULARY = {"lm_head.weight": "embed_out.weight"}


def skeleton(
    path: str, config: ModelConfig, head: Head, dtype: torch.dtype, stored: StoredHead | None = None
) -> nn.Module:
    """The module with its parameters on the meta device and its buffers in place, on the CPU.

    A value head has the form of that which is `stored`.
    Raises UsageError for buffers that the architecture cannot compute again.
    """
    maker = auto("AutoModelForCausalLM" if head == "lm" else "AutoModel")
    with torch.device("meta"):
        module = maker.from_config(config, dtype=dtype, attn_implementation="eager")
        built: nn.Module = module
        if head == "value":
            built = ValueModel(module, config.get_text_config().hidden_size, stored)
            built.value_head.to(dtype)
    for layer in module.modules():
        names = [name for name, _ in layer.named_buffers(recurse=False)]
        for name in names:
            setattr(layer, name, undefined(getattr(layer, name)))
        if names:
            module._init_weights(layer)
        lost = [name for name in names if getattr(layer, name).isnan().any()]
        if lost:
            what = f"model {path!r} has buffers that can be had only by loading it whole"
            got = f"{', '.join(lost)} of {type(layer).__name__}"
            raise UsageError(
                Finding(code="E523", what=what, got=got, fix="rf.on(..., fsdp=1, tp=1)")
            )
    return built


def undefined(buffer: Tensor) -> Tensor:
    """A buffer on the CPU in the place of one on the meta device, full of NaN."""
    dtype = buffer.dtype if buffer.is_floating_point() else torch.get_default_dtype()
    return torch.full(buffer.shape, float("nan"), dtype=dtype, device="cpu")


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate what this rank holds of every parameter; tied ones stay one parameter."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for layer in module.modules():
        own = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in own:
            if id(parameter) not in made:
                made[id(parameter)] = (parameter, allocated(parameter, device))
            setattr(layer, name, made[id(parameter)][1])
        for name, buffer in list(layer.named_buffers(recurse=False)):
            setattr(layer, name, buffer.to(device))


def allocated(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The same parameter, or shard of one, with memory, full of zeros."""
    if not isinstance(parameter, DTensor):
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        return nn.Parameter(zeros, requires_grad=parameter.requires_grad)
    with torch.no_grad():
        shape = parameter.to_local().shape
    held = DTensor.from_local(
        torch.zeros(shape, dtype=parameter.dtype, device=device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(held, requires_grad=parameter.requires_grad)


def fill_pretrained(
    shards: Mapping[str, Shard], module: Any, path: str, dtype: torch.dtype
) -> None:
    """Fill shards from the weights at `path`, a directory or hub name, rounded to `dtype`.

    Raises UsageError where weights are missing or of another shape.
    """
    stored = stored_names(path)
    tied = tied_names(module)
    inner: Any = getattr(module, "body", module)
    places = {
        name: next((key for key in names_in_file(tied[name], inner) if key in stored), None)
        for name in shards
    }
    lost = sorted(name for name, key in places.items() if key is None)
    if lost:
        raise UsageError(
            Finding(
                code="E507",
                what=f"the weights of {path!r} do not fill the model of its config.json",
                got=f"{len(lost)} missing: {known_names(lost)}",
            )
        )
    names = {name: key for name, key in places.items() if key is not None}
    fill_named(shards, names, path, dtype)


def fill_named(
    shards: Mapping[str, Shard], names: Mapping[str, str], path: str, dtype: torch.dtype
) -> None:
    """Fill shards from the tensors at `path` that `names` gives for them."""
    stored = stored_names(path)
    files = {name: stored[key] for name, key in names.items()}
    fill_from_safetensors(shards, files, names, dtype)


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by its first."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return found


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


@torch.no_grad()
def fill_from_safetensors(
    shards: Mapping[str, Shard],
    files: Mapping[str, Path],
    names: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill shards from safetensors files, reading each one's box and nothing else.

    `files` says by a shard's name which file it is in, `names` what it is called there, where
    that is another name; with `dtype` values are rounded to it first. Raises UsageError for a
    tensor of another shape.
    """
    from safetensors import safe_open

    by_file: dict[Path, list[str]] = {}
    for name in shards:
        by_file.setdefault(files[name], []).append(name)
    for file, inside in by_file.items():
        with safe_open(file, framework="pt") as tensors:
            for name in inside:
                key = name if names is None else names[name]
                fill(shards[name], tensors.get_slice(key), f"{key!r} in {file}", dtype)
                advance(shards[name].tensor.nbytes, "bytes read")


def fill(shard: Shard, stored: Any, place: str, dtype: torch.dtype | None) -> None:
    """Copy one shard's box out of a tensor on disk."""
    shape = tuple(stored.get_shape())
    if shape != shard.shape:
        raise UsageError(
            Finding(
                code="E507",
                what=f"the weight {place} has another shape than the model's",
                got=str(shape),
                expected=str(shard.shape),
            )
        )
    if not shard.tensor.numel():
        return
    piece = stored[tuple(slice(*bounds) for bounds in shard.box)] if shape else stored[...]
    shard.tensor.copy_(piece if dtype is None else piece.to(dtype))


@torch.no_grad()
def fill_random(shards: Mapping[str, Shard], make: Callable[[], nn.Module]) -> None:
    """Fill shards with the weights that `make` draws, as one process that makes it would."""
    for name, tensor in drawn_parameters(make):
        if name in shards:
            shard = shards[name]
            shard.tensor.copy_(tensor[tuple(slice(*bounds) for bounds in shard.box)])


@torch.no_grad()
def fill_adapters(shards: Mapping[str, Shard], seed: int, dtype: torch.dtype) -> None:
    """Fill the shards of adapters with what they start from, rounded to `dtype`."""
    for name, shard in shards.items():
        if name.endswith(DOWN):
            down = initial_down(seed, name, *shard.shape).to(dtype)
            shard.tensor.copy_(down[tuple(slice(*bounds) for bounds in shard.box)])


def fill_all(
    shards: Mapping[str, Shard],
    model: ShardedModel,
    path: str,
    *,
    seed: int,
    init: Init,
    fresh_head: bool = True,
) -> None:
    """Fill all shards of a model; a fresh head and the outer half of adapters stay zero."""
    fill_adapters(shards, seed, model.dtype)
    plain = {name: shard for name, shard in shards.items() if not is_adapter(name)}
    heads = {name for name in plain if name.startswith(f"{ADDED_HEAD}.")}
    if init == "random":
        make = partial(
            build, path, model.config, model.head, model.dtype, seed, "random", fresh_head
        )
        fill_random(plain, make)
        return
    body = {name: shard for name, shard in plain.items() if name not in heads}
    fill_pretrained(body, model.module, path, model.dtype)
    stored = getattr(model.module, "stored_head", None)
    if stored is not None:
        names = {f"{ADDED_HEAD}.{inside}": key for inside, key in stored.stored().items()}
        fill_named({name: plain[name] for name in heads}, names, path, model.dtype)
