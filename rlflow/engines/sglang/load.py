"""Making an `EngineModel` and its rollout of a directory or hub name.

The engine reads a directory made for it: the same config and weights, without the tokens that end
a response, since those come with every request. This file knows no requests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlflow.engines.loading import Init, auto, build, check_path, quiet, read
from rlflow.engines.nodes import Nodes
from rlflow.engines.sglang.arguments import arguments, environment, free_port, interpreter
from rlflow.engines.sglang.memory import SharedWeights
from rlflow.engines.sglang.model import EngineModel
from rlflow.engines.sglang.parts import helps, node_arguments, node_variables
from rlflow.engines.sglang.process import Command
from rlflow.engines.sglang.replica import Launch
from rlflow.engines.sglang.rollout import SGLangRollout
from rlflow.engines.sglang.updates import Broadcast, Disk, Memory, Way
from rlflow.graph.engines import SGLang

if TYPE_CHECKING:
    from rlflow.graph.engine_options import EngineOptions

PATIENCE = 120.0
APART = Path(__file__).parents[1] / "apart"
LEFT_OUT = {"config.json", "generation_config.json"}
LOOPBACK = "127.0.0.1"


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
    model = start_engine(path, KIND, options=options, **how)
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
    nodes: Nodes | None = None,
) -> EngineModel:
    """Start an engine with the weights of `path`, or random ones that are a function of `seed`.

    `devices` are the numbers of the devices (of the cores on a CPU) of its tensor-parallel
    ranks, by default the one of `device`. Nothing of the engine may stand still for longer than
    `patience` seconds while it is asked something. Of an engine on several `nodes` this is the
    part of one host; only the first answers and has a staging. Raises UsageError for a path that
    cannot be read or an interpreter without the engine, RunError where it does not start.
    """
    check_path(path, init)
    place = torch.device(device)
    ranks = tuple(devices) or (place.index or 0,)
    with quiet():
        config = read(path, lambda: auto("AutoConfig").from_pretrained(path))
        module = read(path, lambda: build(path, config, "lm", dtype, seed, init))
    weights = {key: value.detach() for key, value in module.named_parameters()}
    staging = SharedWeights({} if helps(nodes) else weights, pinned=place.type == "cuda")
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = getattr(options, "context_length", None) or limit
    count = len(ranks) * (nodes.count if nodes is not None else 1)
    way = chosen_way(options, staging, count, nodes)
    directory = tempfile.mkdtemp(prefix="rlflow-model-")
    readable(Path(directory), path, module if init == "random" else None)
    del module, weights
    python = interpreter(options)
    variables = kind.environment(python, device=place, devices=ranks, threads=threads)
    variables["RLFLOW_MODEL_DIRECTORY"] = directory
    told: dict[str, Any] = {"path": directory, "dtype": dtype, "device": place, "ranks": count}
    told |= {"seed": seed, "context": context, "config": config}
    given = kind.arguments(options, **told) | node_arguments(nodes)
    launch = Launch(
        name=name,
        command=Command(
            python=python,
            script=kind.script,
            environment=variables | node_variables(nodes, place, ranks),
            descriptors=(staging.descriptor,),
        ),
        message=partial(starting, kind.fresh, given, staging, count),
        directory=directory,
        cuda=place.type == "cuda",
        options=options,
        patience=patience,
        replaced=nodes is None,
    )
    return EngineModel(launch, staging, config, context=context, dtype=dtype, way=way)


def chosen_way(
    options: EngineOptions, staging: SharedWeights, ranks: int, nodes: Nodes | None
) -> Way:
    """How weights reach an engine of so many ranks, as its options say."""
    if not isinstance(options, SGLang):
        return Memory()
    said = options.way(1 if nodes is None else nodes.count)
    if said == "disk":
        return Disk(staging, options.updates_dir)
    if said == "group":
        address = LOOPBACK if nodes is None else nodes.address
        return Broadcast(staging, ranks=ranks, address=address)
    return Memory()


def starting(
    fresh: Callable[[], dict[str, Any]],
    given: Mapping[str, Any],
    staging: SharedWeights,
    ranks: int,
    first: bool,
) -> dict[str, Any]:
    """What an engine is told at its start; a replacement has to be given weights first."""
    return {
        "arguments": {**fresh(), **given},
        "held": {"table": staging.table, "memory": staging.descriptor, "bytes": staging.size},
        "ranks": ranks,
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
        with quiet():
            whole.save_pretrained(directory)
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
