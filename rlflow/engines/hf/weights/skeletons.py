"""Skeletons: a model's module without memory, to be given some and filled.

This file knows neither files of weights nor devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Head
from rlflow.engines.hf.models import ValueModel
from rlflow.engines.hf.weights.corrections import weigh_corrections
from rlflow.errors import Finding, UsageError
from rlflow.modelfiles.heads import Head as StoredHead

WHOLE_NUMBERS = (torch.int32, torch.int64)


def auto(name: str) -> Any:
    """One of transformers' automatic classes, imported when it is first needed."""
    import transformers

    return getattr(transformers, name)


def config_of(path: str, dtype: torch.dtype) -> ModelConfig:
    """The config of a model that is to compute in `dtype`.

    In float64 experts are computed one by one: torch has no grouped product of it.
    """
    how = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    config: ModelConfig = auto("AutoConfig").from_pretrained(path, **how)
    return config


def maker_of(config: ModelConfig, head: Head) -> Any:
    """The automatic class that makes a language model of a config, or its body.

    Of a model that sees it is the one which takes pictures beside a text, or a text alone.
    """
    if head != "lm":
        return auto("AutoModel")
    causal = type(config) in auto("MODEL_FOR_CAUSAL_LM_MAPPING")
    return auto("AutoModelForCausalLM" if causal else "AutoModelForImageTextToText")


def skeleton(
    path: str, config: ModelConfig, head: Head, dtype: torch.dtype, stored: StoredHead | None = None
) -> nn.Module:
    """The module with its parameters on the meta device and its buffers in place, on the CPU.

    A value head has the form of that which is `stored`; biases of routers are parameters.
    Raises UsageError for buffers that the architecture cannot compute again.
    """
    maker = maker_of(config, head)
    with torch.device("meta"):
        module = maker.from_config(config, dtype=dtype, attn_implementation="eager")
        built: nn.Module = module
        if head == "value":
            built = ValueModel(module, config.get_text_config().hidden_size, stored)
            built.value_head.to(dtype)
        weigh_corrections(module)
    wide = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    for layer, maker in _with_makers(module):
        names = [name for name, _ in layer.named_buffers(recurse=False)]
        for name in names:
            buffer = undefined(getattr(layer, name))
            setattr(layer, name, buffer.float() if name in wide else buffer)
        if names:
            maker._init_weights(layer)
        lost = [name for name in names if is_undefined(getattr(layer, name))]
        if lost:
            what = f"model {path!r} has buffers that can be had only by loading it whole"
            got = f"{', '.join(lost)} of {type(layer).__name__}"
            raise UsageError(
                Finding(code="E523", what=what, got=got, fix="rf.on(..., fsdp=1, tp=1)")
            )
    return built


def _with_makers(module: Any, maker: Any = None) -> Iterator[tuple[nn.Module, Any]]:
    """All modules, each with the model of transformers it is a part of, which makes its buffers.

    A model may have others within it, such as a tower.
    """
    maker = module if hasattr(module, "_init_weights") else maker
    yield module, maker
    for part in module.children():
        yield from _with_makers(part, maker)


def undefined(buffer: Tensor) -> Tensor:
    """A buffer on the CPU in the place of one on the meta device, of numbers that none has."""
    dtype, nothing = buffer.dtype, math.nan
    if dtype in WHOLE_NUMBERS:
        nothing = torch.iinfo(dtype).min
    elif not buffer.is_floating_point():
        dtype = torch.get_default_dtype()
    return torch.full(buffer.shape, nothing, dtype=dtype, device="cpu")


def is_undefined(buffer: Tensor) -> bool:
    """Whether some numbers of a buffer are still those that none has."""
    if buffer.dtype in WHOLE_NUMBERS:
        return bool((buffer == torch.iinfo(buffer.dtype).min).any())
    return bool(buffer.isnan().any())
