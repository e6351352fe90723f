"""Making an `EngineModel` and its rollout of a directory or hub name.

The engine reads a directory made for it: the same config and weights, without the tokens that end
a response, since those come with every request. This file knows no requests.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Drafting
from rlflow.engines.hf.flat import whole_shards
from rlflow.engines.hf.loading import Init, build, check_path, quiet_transformers, read
from rlflow.engines.hf.lora import adapt, is_adapter
from rlflow.engines.hf.weights.filling import fill_all
from rlflow.engines.hf.weights.in_files import FileNames
from rlflow.engines.hf.weights.skeletons import auto
from rlflow.engines.hf.weights.streaming import streamed_skeleton
from rlflow.engines.process.client.draft import EngineDraft, context_of
from rlflow.engines.process.client.model import EngineModel
from rlflow.engines.process.client.process import Command
from rlflow.engines.process.client.replica import Launch
from rlflow.engines.process.client.rollout import SGLangRollout
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.client.updates import Broadcast, Disk, InMemory, Way
from rlflow.engines.process.nodes import Nodes, free_port
from rlflow.engines.process.sglang.arguments import (
    interpreter,
    layer_names,
    seeing_variables,
    sglang_arguments,
    sglang_environment,
    with_drafter,
)
from rlflow.engines.process.sglang.hosts import helps, node_arguments, node_variables
from rlflow.engines.reshard.quantised import QUANTIZATION_CONFIG, in_blocks
from rlflow.graph.user.engines import SGLang

if TYPE_CHECKING:
    from rlflow.graph.model import LoRA
    from rlflow.graph.user.engine_options import EngineOptions

PATIENCE = 120.0
# Bytes of weights a second that an engine loads at the least, while it says nothing.
SLOWEST_LOAD = 200e6
SERVER = Path(__file__).parents[1] / "server"
LEFT_OUT = {"config.json", "generation_config.json"}
# Files of weights; others beside them, such as settings of a processor, an engine reads too.
STORED, INDEX = {".safetensors", ".bin", ".pt", ".pth"}, ".index.json"
LOOPBACK = "127.0.0.1"


def no_drafter(given: Mapping[str, Any], path: str, tokens: int) -> dict[str, Any]:
    """For engines in which no drafter lies."""
    raise AssertionError(f"{path} is to draft {tokens} tokens in an engine without drafters")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What one kind of engine is started with.

    `script` runs in the engine's interpreter. `arguments` has those of the engine, for options,
    the directory that it reads, dtype, device, the number of its ranks, seed, context and the
    model's config; `fresh` has those that every start has anew. `environment` is for an
    interpreter, device, the ranks' devices, a number of threads and a dtype. `drafting` adds a
    drafter to arguments, by its directory and the number of its tokens.
    """

    script: Path
    arguments: Callable[..., dict[str, Any]]
    environment: Callable[..., dict[str, str]]
    fresh: Callable[[], dict[str, Any]] = dict
    drafting: Callable[[Mapping[str, Any], str, int], dict[str, Any]] = no_drafter


def load_sglang(path: str, *, options: SGLang, **how: Any) -> tuple[EngineModel, SGLangRollout]:
    """Start SGLang with the weights of `path`; see `start_engine`."""
    kind = replace(KIND, arguments=partial(sglang_arguments, lora=how.get("lora")))
    model = start_engine(path, kind, options=options, **how)
    return model, SGLangRollout(model, seeded=options.deterministic)


def start_engine(
    path: str,
    kind: EngineKind,
    *,
    name: str,
    options: EngineOptions,
    dtype: torch.dtype,
    device: str | torch.device,
    seed: int = 0,
    init: Init = "weights",
    threads: int = 1,
    devices: Sequence[int] = (),
    draft: Drafting | None = None,
    patience: float = PATIENCE,
    lora: LoRA | None = None,
    nodes: Nodes | None = None,
) -> EngineModel:
    """Start an engine with the weights of `path`, or random ones that are a function of `seed`.

    With `lora` it has adapters beside them, and updates bring only these.
    `devices` are the numbers of the devices (of the cores on a CPU) of its tensor-parallel
    ranks, by default the one of `device`. A `draft` lies in the engine beside its model. Nothing
    of the engine may stand still for longer than `patience` seconds, and the time that its weights
    take at a slow rate, while it is asked something.
    Of an engine on several `nodes` this is the part of one host; only the first answers and has a
    staging. Raises UsageError for a path that cannot be read or an interpreter without the
    engine, RunError where the engine does not start.
    """
    place, blocks = torch.device(device), in_float8(options)
    ranks = tuple(devices) or (place.index or 0,)
    count = len(ranks) * (nodes.count if nodes is not None else 1)
    beside = {} if draft is None else {"draft": (draft.path, draft.init)}
    wanted = {"model": (path, init), **beside}
    how: dict[str, Any] = {"seed": seed, "device": place, "lora": lora, "held": not helps(nodes)}
    with kept_if_started() as directory:
        configs, stagings, adapters = staged(wanted, directory, dtype, blocks=blocks, **how)
        config, python = configs[0], interpreter(options)
        context = getattr(options, "context_length", None) or context_of(config)
        about = {"dtype": dtype, "device": place, "seed": seed, "context": context, "ranks": count}
        given = given_to(kind, options, directory, draft, nodes, config=config, **about)
        more: dict[str, Any] = {"context": context, "dtype": dtype, "trained": adapters}
        if draft is not None:
            more["draft"] = EngineDraft(draft, stagings[1], configs[1])
        where: dict[str, Any] = {"device": place, "devices": ranks, "threads": threads}
        variables = seeing_variables(config) | kind.environment(python, dtype=dtype, **where)
        variables |= {"RLFLOW_MODEL_DIRECTORY": directory, **node_variables(nodes, place, ranks)}
        how = {"environment": variables, "descriptors": tuple(s.descriptor for s in stagings)}
        launch = Launch(
            name=name,
            command=Command(python=python, script=kind.script, **how),
            message=partial(starting, kind.fresh, given, stagings, count, told(lora)),
            directory=directory,
            cuda=place.type == "cuda",
            options=options,
            patience=patience + sum(each.size for each in stagings) / SLOWEST_LOAD,
            ranks=len(ranks),
            replaced=nodes is None,
        )
        way = chosen_way(options, stagings[0], count, nodes)
        return EngineModel(launch, stagings[0], config, way=way, blocks=blocks, **more)


def given_to(
    kind: EngineKind,
    options: EngineOptions,
    directory: str,
    draft: Drafting | None,
    nodes: Nodes | None,
    **known: Any,
) -> dict[str, Any]:
    """The arguments of an engine that reads a directory, with its drafter and its other hosts."""
    given = kind.arguments(options, path=f"{directory}/model", **known) | node_arguments(nodes)
    return given if draft is None else kind.drafting(given, f"{directory}/draft", draft.tokens)


@contextmanager
def kept_if_started() -> Iterator[str]:
    """A temporary directory, which is removed where what uses it first fails."""
    directory = tempfile.mkdtemp(prefix="rlflow-model-")
    try:
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def staged(
    wanted: Mapping[str, tuple[str, Init]],
    directory: str,
    dtype: torch.dtype,
    *,
    seed: int,
    device: torch.device,
    lora: LoRA | None,
    held: bool,
    blocks: bool = False,
) -> tuple[list[ModelConfig], list[SharedWeights], frozenset[str] | None]:
    """Models written to a directory as an engine reads them: their configs, and their weights.

    `wanted` are their paths by their names in the directory, and which weights they have. With
    `lora` the first one has adapters, which are named last. Weights that are not `held` here
    are of another host's part. With `blocks` linear layers are quantised.
    """
    found = [
        StagedModel.of(path, init, dtype, seed, whole=blocks) for path, init in wanted.values()
    ]
    adapters = None if lora is None else adapt(found[0].module, lora, seed).names
    pinned = device.type == "cuda"
    weights = [_parameters(made.module) for made in found]
    weights = [in_blocks(each) for each in weights] if blocks else weights
    stagings = [
        SharedWeights(each if held else {}, names=made.names, pinned=pinned)
        for made, each in zip(found, weights, strict=True)
    ]
    for name, made, own, staging in zip(wanted, found, weights, stagings, strict=True):
        if held and made.empty:
            made.fill(staging, seed)
        Path(directory, name).mkdir()
        written = None
        if blocks or made.init == "random":
            alone = _parameters(made.make()) if made.empty and not held else own
            written = staging.stored if held else made.names.views(alone)
        readable(Path(directory, name), made.path, written, blocks=blocks)
    return [made.config for made in found], stagings, adapters


def in_float8(options: EngineOptions) -> bool:
    """Whether an engine holds linear layers in float8, with a scale for each block."""
    return isinstance(options, SGLang) and options.quantization == "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedModel:
    """A model of a path: its config, its module, and what makes one with all weights.

    An `empty` module has no memory: its weights are read, or drawn, into the place they are for.
    Files have them under their `names`.
    """

    path: str
    config: ModelConfig
    module: nn.Module
    dtype: torch.dtype
    empty: bool
    make: Callable[[], nn.Module]
    init: Init
    names: FileNames

    @classmethod
    def of(
        cls, path: str, init: Init, dtype: torch.dtype, seed: int, *, whole: bool = False
    ) -> StagedModel:
        """The model of a path, with the weights of its files or random ones; maybe made `whole`."""
        check_path(path, init)
        with quiet_transformers():
            config = read(path, lambda: auto("AutoConfig").from_pretrained(path))
            make = partial(build, path, config, "lm", dtype, seed, init)
            how: dict[str, Any] = {"drawn": init == "random"}
            found = None
            if not whole:
                found = read(path, lambda: streamed_skeleton(path, config, "lm", dtype, **how))
            module = read(path, make) if found is None else found
            return cls(
                path=path, config=config, module=module, dtype=dtype,
                empty=found is not None, make=make, init=init, names=FileNames.of(module, path),
            )  # fmt: skip

    def fill(self, staging: SharedWeights, seed: int) -> None:
        """Have all weights where they are staged."""
        drawing = self.make if self.init == "random" else None
        shards = whole_shards(staging.tensors)
        with quiet_transformers():
            read(self.path, lambda: fill_all(shards, self, self.path, seed=seed, make=drawing))


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model by name, without their gradients."""
    return {key: value.detach() for key, value in module.named_parameters()}


def told(lora: LoRA | None) -> dict[str, Any] | None:
    """What an engine's process is told of adapters, None of a model without."""
    if lora is None:
        return None
    return {"rank": lora.rank, "alpha": lora.alpha, "targets": layer_names(lora)}


def chosen_way(
    options: EngineOptions, staging: SharedWeights, ranks: int, nodes: Nodes | None
) -> Way:
    """How weights reach an engine of so many ranks, as its options say."""
    if not isinstance(options, SGLang):
        return InMemory()
    said = options.way(1 if nodes is None else nodes.count)
    if said == "disk":
        return Disk(staging, options.updates_dir, ranks=ranks)
    if said == "group":
        address = LOOPBACK if nodes is None else nodes.address
        return Broadcast(staging, ranks=ranks, address=address)
    return InMemory()


def starting(
    fresh: Callable[[], dict[str, Any]],
    given: Mapping[str, Any],
    stagings: Sequence[SharedWeights],
    ranks: int,
    adapters: Mapping[str, Any] | None,
    first: bool,
) -> dict[str, Any]:
    """What an engine is told at its start; a replacement has to be given weights first.

    `stagings` are that of its model, and of a drafter if there is one.
    """
    held = [{"table": s.table, "memory": s.descriptor, "bytes": s.size} for s in stagings]
    return {
        "arguments": {**fresh(), **given},
        **dict(zip(("held", "draft"), held, strict=False)),
        "ranks": ranks,
        "adapters": adapters,
        "version": 0 if first else None,
    }


def readable(
    directory: Path, path: str, weights: Mapping[str, Tensor] | None, *, blocks: bool = False
) -> None:
    """Fill a directory that an engine loads: a config without ends, and weights.

    The weights are those of `path`, or the given ones, which may be quantised in `blocks`.
    """
    source = _located(path)
    for file in source.iterdir():
        stored = file.suffix in STORED or file.name.endswith(INDEX)
        if file.name in LEFT_OUT or (stored and weights is not None) or not file.is_file():
            continue
        (directory / file.name).symlink_to(file.resolve())
    if weights is not None:
        # Any rank writes its engine's; transformers would only have the first one save.
        whole = {n: t.contiguous() for n, t in weights.items() if not is_adapter(n)}
        save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if blocks:
        config["quantization_config"] = QUANTIZATION_CONFIG
    for part in (config, config.get("text_config") or {}):
        part["eos_token_id"] = None
    (directory / "config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _located(path: str) -> Path:
    """The directory of a model: itself, or where a hub's files lie."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import cached_file

    return Path(str(cached_file(path, "config.json"))).parent


KIND = EngineKind(
    script=SERVER / "serve_sglang.py",
    arguments=sglang_arguments,
    environment=sglang_environment,
    fresh=lambda: {"nccl_port": free_port(LOOPBACK)},
    drafting=with_drafter,
)
