"""Loading a model instance: whole in this process, sharded over a mesh, or an engine beside it.

Knows engines and one instance; neither the plan's order nor other instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rlflow.engines.loading import load_model, load_tokenizer
from rlflow.engines.protocol import Drafting
from rlflow.engines.rollout import TorchRollout
from rlflow.engines.train import TrainEngine
from rlflow.errors import Finding, UsageError
from rlflow.graph.model import AdamW, Model
from rlflow.runtime.loaded import Loaded, NoTraining
from rlflow.scheduler.plan import Instance

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rlflow.engines.nodes import Nodes


def load_instance(
    instance: Instance,
    spec: Model,
    path: str,
    *,
    seed: int,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
    ranks: Sequence[int] = (),
    nodes: Nodes | None = None,
    draft: Drafting | None = None,
) -> Loaded:
    """Load an instance: whole in this process, or this process's shards of it over a mesh.

    An engine of its own is started in a process beside this one, on the devices of its `ranks`,
    with a `draft` if there is one; of one that lies on several `nodes`, this host's part.
    """
    if instance.options is not None:
        how: dict[str, Any] = {"seed": seed, "device": device, "devices": ranks}
        more = {"draft": draft, "nodes": nodes, "lora": spec.lora}
        given = {name: value for name, value in more.items() if value is not None}
        return _load_engine(instance, spec, path, how | given)
    optimizer = spec.optimizer if isinstance(spec.optimizer, AdamW) and instance.trained else None
    common: dict[str, Any] = {
        "dtype": getattr(torch, spec.dtype),
        "device": device,
        "head": spec.head,
        "seed": seed,
        "init": "random" if spec.init == "random" else "weights",
        "lora": spec.lora,
        "recompute": instance.recompute,
    }
    tokenizer = load_tokenizer(path)
    if mesh is not None:
        return _load_sharded(instance, optimizer, path, tokenizer, mesh, common)
    model = load_model(path, **common, offload=instance.offload)
    model.name = instance.name
    return Loaded(
        instance=instance,
        model=model,
        train=TrainEngine(model, optimizer, micro_tokens=instance.micro_tokens),
        rollout=TorchRollout(model),
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(model, tokenizer),
    )


def _load_sharded(
    instance: Instance,
    optimizer: Any,
    path: str,
    tokenizer: Any,
    mesh: DeviceMesh,
    common: Mapping[str, Any],
) -> Loaded:
    from rlflow.engines.sharded.build import load_sharded
    from rlflow.engines.sharded.rollout import ShardedRollout
    from rlflow.engines.sharded.train import ShardedTrainEngine

    model = load_sharded(path, mesh=mesh, trained=instance.trained, name=instance.name, **common)
    return Loaded(
        instance=instance,
        model=model,
        train=ShardedTrainEngine(model, optimizer, micro_tokens=instance.micro_tokens),
        rollout=ShardedRollout(model),
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(model, tokenizer),
    )


def _load_engine(instance: Instance, spec: Model, path: str, how: Mapping[str, Any]) -> Loaded:
    """Start an engine for the replica that this process owns, or its part on this host."""
    assert instance.options is not None
    tokenizer = load_tokenizer(path)
    model, rollout = instance.options.load(
        path,
        name=instance.name,
        dtype=getattr(torch, spec.dtype),
        init="random" if spec.init == "random" else "weights",
        threads=torch.get_num_threads(),
        **how,
    )
    return Loaded(
        instance=instance,
        model=model,
        train=NoTraining(),
        rollout=rollout,
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(model, tokenizer),
    )


def _stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's EOS and those of the model's config.

    Raises UsageError where the model cannot make the tokenizer's EOS.
    """
    named = model.config.get_text_config().eos_token_id
    listed = named if isinstance(named, list) else [] if named is None else [named]
    known = model.config.get_text_config().vocab_size
    if tokenizer.eos_token_id >= known:
        raise UsageError(
            Finding(
                code="E502",
                what=f"the EOS token of {model.name}'s tokenizer, {tokenizer.eos_token!r}, is "
                "unknown to the model, so no response can end",
                got=f"token {tokenizer.eos_token_id}",
                expected=f"a token below {known}, the size of the model's vocabulary",
                fix='"eos_token" in tokenizer_config.json',
            )
        )
    return tuple(sorted({tokenizer.eos_token_id, *listed}))
