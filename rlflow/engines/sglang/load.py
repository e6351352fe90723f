"""Making an `EngineModel` and its rollout of a directory or hub name.

The engine reads a directory made for it: the same config and weights, without the tokens that end
a response, since those come with every request. This file knows no requests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlflow.engines.loading import Init, auto, build, check_path, quiet, read
from rlflow.engines.lora import adapt, is_adapter
from rlflow.engines.sglang.arguments import (
    arguments,
    environment,
    free_port,
    interpreter,
    layer_names,
)
from rlflow.engines.sglang.memory import SharedWeights
from rlflow.engines.sglang.model import EngineModel
from rlflow.engines.sglang.process import Command
from rlflow.engines.sglang.replica import Launch
from rlflow.engines.sglang.rollout import SGLangRollout

if TYPE_CHECKING:
    from rlflow.graph.engine_options import EngineOptions
    from rlflow.graph.engines import SGLang
    from rlflow.graph.model import LoRA

PATIENCE = 120.0
APART = Path(__file__).parents[1] / "apart"
LEFT_OUT = {"config.json", "generation_config.json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What one kind of engine is started with.

    `script` runs in the engine's interpreter. `arguments` has those of the engine, for options,
    the directory that it reads, dtype, device, the number of its ranks, seed, context and the
    model's config; `fresh` has those that every start has anew. `environment` is for an
    interpreter, device, the ranks' devices and a number of threads.
    """

    script: Path
    arguments: Callable[..., dict[str, Any]]
    environment: Callable[..., dict[str, str]]
    fresh: Callable[[], dict[str, Any]] = dict


def load_engine(path: str, *, options: SGLang, **how: Any) -> tuple[EngineModel, SGLangRollout]:
    """Start SGLang with the weights of `path`; see `start_engine`."""
    kind = replace(KIND, arguments=partial(arguments, lora=how.get("lora")))
    model = start_engine(path, kind, options=options, **how)
    return model, SGLangRollout(model, seeded=options.deterministic)


def start_engine(
    path: str,
    kind: Kind,
    *,
    name: str,
    options: EngineOptions,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    init: Init = "weights",
    threads: int = 1,
    devices: Sequence[int] = (),
    patience: float = PATIENCE,
    lora: LoRA | None = None,
) -> EngineModel:
    """Start an engine with the weights of `path`, or random ones that are a function of `seed`.

    With `lora` it has adapters beside them, and updates bring only these.
    `devices` are the numbers of the devices (of the cores on a CPU) of its tensor-parallel
    ranks, by default the one of `device`. Nothing of the engine may stand still for longer than
    `patience` seconds while it is asked something. Raises UsageError for a path that cannot be
    read or an interpreter without the engine, RunError where the engine does not start.
    """
    check_path(path, init)
    place, python = torch.device(device), interpreter(options)
    ranks = tuple(devices) or (place.index or 0,)
    with quiet():
        config = read(path, lambda: auto("AutoConfig").from_pretrained(path))
        module = read(path, lambda: build(path, config, "lm", dtype, seed, init))
    context = getattr(options, "context_length", None) or longest(config)
    adapters = None if lora is None else adapt(module, lora, seed).names
    staging = SharedWeights(parameters(module), pinned=place.type == "cuda")
    directory = tempfile.mkdtemp(prefix="rlflow-model-")
    readable(Path(directory), path, module if init == "random" else None)
    del module
    given = kind.arguments(
        options,
        path=directory,
        dtype=dtype,
        device=place,
        ranks=len(ranks),
        seed=seed,
        context=context,
        config=config,
    )
    launch = Launch(
        name=name,
        command=Command(
            python=python,
            script=kind.script,
            environment=kind.environment(python, device=place, devices=ranks, threads=threads),
            descriptors=(staging.descriptor,),
        ),
        message=partial(starting, kind.fresh, given, staging, len(ranks), told(lora)),
        directory=directory,
        cuda=place.type == "cuda",
        options=options,
        patience=patience,
    )
    return EngineModel(launch, staging, config, context=context, dtype=dtype, trained=adapters)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a module by name."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def longest(config: Any) -> int | None:
    """How many tokens a row may have, None where the model sets no limit."""
    found: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found


def told(lora: LoRA | None) -> dict[str, Any] | None:
    """What an engine's process is told of adapters, None of a model without."""
    if lora is None:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": layer_names(lora)}


def starting(
    fresh: Callable[[], dict[str, Any]],
    given: Mapping[str, Any],
    staging: SharedWeights,
    ranks: int,
    adapters: Mapping[str, Any] | None,
    first: bool,
) -> dict[str, Any]:
    """What an engine is told at its start; a replacement has to be given weights first."""
    return {
        "arguments": {**fresh(), **given},
        "held": {"table": staging.table, "memory": staging.descriptor, "bytes": staging.size},
        "ranks": ranks,
        "adapters": adapters,
        "version": 0 if first else None,
    }


def readable(directory: Path, path: str, module: nn.Module | None) -> None:
    """Fill a directory that an engine loads: a config without ends, and weights.

    The weights are those of `path`, or of `module` if one is given.
    """
    source = located(path)
    if module is None:
        for file in source.iterdir():
            if file.name not in LEFT_OUT and file.is_file():
                (directory / file.name).symlink_to(file.resolve())
    else:
        whole: Any = module
        state = {name: t for name, t in module.state_dict().items() if not is_adapter(name)}
        with quiet():
            whole.save_pretrained(directory, state_dict=state)
        (directory / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((source / "config.json").read_text())
    for part in (config, config.get("text_config") or {}):
        part["eos_token_id"] = None
    (directory / "config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def located(path: str) -> Path:
    """The directory of a model: itself, or where a hub's files lie."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import cached_file

    return Path(str(cached_file(path, "config.json"))).parent


KIND = Kind(
    script=APART / "serve_sglang.py",
    arguments=arguments,
    environment=environment,
    fresh=lambda: {"nccl_port": free_port()},
)
