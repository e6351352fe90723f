"""Making a `TorchModel` of a directory or hub name, and refusing what would be computed wrongly.

A model is loaded from config.json and safetensors, never by code that comes with it: each tensor
goes from its file to where it lies, a piece at a time. The model is then compared on a few tokens
with its own unmodified forward: packed, in long rows, and decoded on a cache. This file knows
neither training nor sampling.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import nn

from rlflow.contract.engines import ModelConfig
from rlflow.contract.tokenizers import Tokenizer
from rlflow.contract.values import Head
from rlflow.engines.hf.checking import (
    check_outputs,
    checked_head,
    forward_differences,
    plain_outputs,
)
from rlflow.engines.hf.forward import attention
from rlflow.engines.hf.forward.fused import replace_forwards, restore_forwards
from rlflow.engines.hf.forward.head import take_head_apart
from rlflow.engines.hf.heads import draw_head, find_stored_head, read_head
from rlflow.engines.hf.layers import HostLayers
from rlflow.engines.hf.layerwise.activations import offload_activations
from rlflow.engines.hf.layerwise.compiled import compile_layers
from rlflow.engines.hf.lora import Adapters, AdapterSpec, adapt
from rlflow.engines.hf.mixers.latent import use_latents
from rlflow.engines.hf.mixers.states import use_states
from rlflow.engines.hf.models import TorchModel, ValueModel
from rlflow.engines.hf.pictures.freezing import freeze as frozen
from rlflow.engines.hf.pictures.towers import TOWER_ATTENTION, let_see
from rlflow.engines.hf.recompute import recompute_layers
from rlflow.engines.hf.routing.routers import find_routers, lead_routers
from rlflow.engines.hf.weights.corrections import weigh_corrections
from rlflow.engines.hf.weights.filling import fill_all
from rlflow.engines.hf.weights.skeletons import auto, config_of, maker_of
from rlflow.engines.hf.weights.streaming import streamed_skeleton
from rlflow.errors import Finding, UsageError, near_names
from rlflow.graph.placement import Recompute
from rlflow.modelfiles.families import cannot_be_packed, family_of, packing_finding

Read = TypeVar("Read")

Init = Literal["weights", "random"]
Offload = Literal["layers"]

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")

# transformers fills random weights from the process-wide generator, logs to one logger, and while
# it reads a model ties no weights anywhere in the process.
_loading = threading.Lock()


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    head: Head = "lm",
    seed: int = 0,
    init: Init = "weights",
    lora: AdapterSpec | None = None,
    freeze: Sequence[str] = (),
    recompute: Recompute = False,
    offload: Offload | None = None,
    hosts_activations: bool = False,
    compiled: bool = False,
    fresh_head: bool = True,
) -> TorchModel:
    """Load a causal language model, or its body with a value head, and check it.

    `path` is a directory in Hugging Face format or a hub name. With `init="random"` only
    config.json is read and the weights are a pure function of `seed`. `lora` freezes them and
    adds adapters, drawn from `seed` too; `freeze` names parts that training leaves as they are;
    `recompute` keeps only the inputs of decoder layers
    for the backward pass, as a placement says it; `offload="layers"` keeps the decoder layers
    of a frozen model on the host, `hosts_activations` what decoder layers save for the backward
    pass; `compiled` layers are compiled by torch where rows are packed. A value head is read from
    the files; one that no file holds is zero with `fresh_head`, as for a model that is trained, and
    refused without. Raises UsageError for a path that cannot be read, an architecture that packing
    would compute wrongly, missing weights, packed logits that differ from the model's own, or an
    option that does not fit the model.
    """
    check_path(path, init)
    place = torch.device(device)
    with quiet_transformers():
        attention.register_attention()
        config = read(path, lambda: config_of(path, dtype))
        check_layers(path, config)
        make = partial(build, path, config, head, dtype, seed, init, fresh_head)
        empty = read(path, lambda: skeleton_for(path, config, head, dtype, init, fresh_head, place))
        module = read(path, make) if empty is None else empty
    layers = None if offload is None else HostLayers(module, place)
    how = trained_in_part(module, lora, freeze, path, seed)
    model = TorchModel(module, config, head=head, name=path, layers=layers, device=place, **how)
    if empty is not None:
        drawing = make if init == "random" else None
        with quiet_transformers():
            read(path, lambda: fill_all(model.shards(), model, path, seed=seed, make=drawing))
    # Parameters are there; of what else a module has, only small buffers are left.
    module.eval().to(place)
    plain = plain_outputs(module, config, head)
    with quiet_transformers():
        use_packed_attention(module, path)
    replace_forwards(module)
    if forward_differences(model, plain):
        restore_forwards(module)
        check_outputs(model, plain)
    if head == "lm":
        model.predictor = checked_head(model, plain, take_head_apart(module, config))
    treat_layers(model, place, compiled, recompute, hosts_activations)
    return model


class TrainedInPart(TypedDict):
    """What a model is told of what training changes of it."""

    adapters: Adapters | None
    fixed: frozenset[str]


def trained_in_part(
    module: nn.Module, lora: AdapterSpec | None, freeze: Sequence[str], path: str, seed: int
) -> TrainedInPart:
    """Give a module adapters, or have parts of it need no gradient."""
    adapters = None if lora is None else adapt(module, lora, seed)
    return {"adapters": adapters, "fixed": frozen(module, freeze, path)}


def treat_layers(
    model: TorchModel,
    device: torch.device,
    compiled: bool,
    recompute: Recompute,
    hosts_activations: bool,
) -> None:
    """Do to the decoder layers of a model what its placement asks for, from the inside out.

    Routers of experts follow passes from then on.
    """
    model.routers = find_routers(model.module)
    lead_routers(model.module, model.routers, model.router_places)
    if compiled:
        compile_layers(model.module)
    if recompute:
        recompute_layers(model.module, recompute)
    if hosts_activations:
        model.activations = offload_activations(model.module, device)


def skeleton_for(
    path: str,
    config: ModelConfig,
    head: Head,
    dtype: torch.dtype,
    init: Init,
    fresh_head: bool,
    place: torch.device,
) -> nn.Module | None:
    """A module without memory, to be filled where it lies; None for one that is made whole.

    Random weights are drawn one at a time beside an accelerator, most of them twice; a CPU draws
    them once, where they stay.
    """
    drawn = init == "random"
    if drawn and place.type == "cpu":
        return None
    return streamed_skeleton(path, config, head, dtype, drawn=drawn, fresh_head=fresh_head)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep other threads from transformers meanwhile, and it from drawing bars and reports.

    Errors still come through.
    """
    from transformers.utils import logging

    with _loading:
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


def read(path: str, action: Callable[[], Read]) -> Read:
    """Run what reads the model's files, and name the path where that fails."""
    from safetensors import SafetensorError

    try:
        return action()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        finding = Finding(
            code="E501",
            what=f"model {path!r} cannot be loaded",
            got=f"{type(error).__name__}: {error}"[:600],
            expected="a causal language model that transformers knows, with safetensors weights",
        )
        raise UsageError(finding) from error


def check_path(path: str, init: Init) -> None:
    """Refuse a directory that is not there, has no config, or has no weights."""
    where = Path(path)
    looks_local = where.is_absolute() or path.startswith(".") or path.count("/") > 1
    if not where.is_dir() and (looks_local or (where.parent.is_dir() and str(where.parent) != ".")):
        beside = [str(entry) for entry in where.parent.glob("*")] if where.parent.is_dir() else []
        raise UsageError(
            Finding(
                code="E501",
                what=f"there is no model at {path!r}",
                expected="a directory with config.json and safetensors weights, or a hub name",
                near=near_names(path, beside),
            )
        )
    if not where.is_dir():
        return
    if not (where / "config.json").is_file():
        what = f"{path!r} has no config.json, so it is not a model in Hugging Face format"
        raise UsageError(Finding(code="E501", what=what))
    if init == "weights" and not any(any(where.glob(pattern)) for pattern in WEIGHT_FILES):
        raise UsageError(
            Finding(
                code="E507",
                what=f"{path!r} has a config.json but no weights",
                expected="model.safetensors beside it",
                fix='init="random"   to start from random weights',
            )
        )


def check_layers(path: str, config: ModelConfig) -> None:
    """Refuse layers through which packed rows would see each other, and others not computed."""
    finding = packing_finding(path, family_of(config.to_dict()))
    if finding is not None:
        raise UsageError(finding)


def build(
    path: str,
    config: ModelConfig,
    head: Head,
    dtype: torch.dtype,
    seed: int,
    init: Init,
    fresh_head: bool = True,
) -> nn.Module:
    """The module with its weights, still with transformers' own attention."""
    if init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _drawn(config, head, dtype, fresh_head)
    module = pretrained(path, config, head, dtype)
    weigh_corrections(module)
    if head == "value":
        stored = find_stored_head(path, config, fresh=fresh_head)
        module = ValueModel(module, config.get_text_config().hidden_size, stored)
        module.value_head.to(dtype)
        if stored is not None:
            read_head(module, stored, path)
    return module


def _drawn(config: ModelConfig, head: Head, dtype: torch.dtype, fresh_head: bool) -> nn.Module:
    """The module with random weights; a head is zero where it is to be trained."""
    maker = maker_of(config, head)
    module: nn.Module = maker.from_config(config, dtype=dtype, attn_implementation="eager")
    weigh_corrections(module)
    if head == "lm":
        return module
    valued = ValueModel(module, config.get_text_config().hidden_size)
    if not fresh_head:
        draw_head(valued, config)
    valued.value_head.to(dtype)
    return valued


def pretrained(path: str, config: ModelConfig, head: Head, dtype: torch.dtype) -> nn.Module:
    """A language model, or a body, with the weights of its files."""
    maker = maker_of(config, head)
    module, info = maker.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        output_loading_info=True,
    )
    lost = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if lost:
        what = f"the weights of {path!r} do not fill the model that its config.json describes"
        got = f"{len(lost)} missing or of another shape: {', '.join(lost[:5])}"
        raise UsageError(Finding(code="E507", what=what, got=got))
    built: nn.Module = module
    return built


def use_packed_attention(module: nn.Module, path: str) -> None:
    """Switch a module to this engine's attention, or say that it cannot be."""
    body: Any = module.body if isinstance(module, ValueModel) else module
    sees = bool(family_of(body.config.to_dict()).sees)
    by = {"": attention.NAME, "text_config": attention.NAME, "vision_config": TOWER_ATTENTION}
    read(path, lambda: body.set_attn_implementation(by if sees else attention.NAME))
    if sees:
        let_see(module)
    if body.config._attn_implementation != attention.NAME:
        what = "computes attention in code of its own, which cannot be packed"
        raise UsageError(cannot_be_packed(path, what, type(body).__name__))
    use_latents(module)
    use_states(module)


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer beside a model; UsageError where it is missing or has no EOS token."""
    check_path(path, "random")
    with quiet_transformers():
        found = read(path, lambda: auto("AutoTokenizer").from_pretrained(path))
    if found.eos_token_id is None:
        raise UsageError(
            Finding(
                code="E502",
                what=f"the tokenizer of {path!r} has no EOS token, so no response can end",
                expected=f'"eos_token" in {Path(path) / "tokenizer_config.json"}',
                fix='"eos_token": "<eos>"',
            )
        )
    tokenizer: Tokenizer = found
    return tokenizer
