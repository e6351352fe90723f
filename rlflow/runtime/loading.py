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
    tokenizer = load_tokenizer(path)
    if instance.options is not None:
        how: dict[str, Any] = {"seed": seed, "device": device, "devices": ranks}
        more = {"draft": draft, "nodes": nodes, "lora": spec.lora}
        given = {name: value for name, value in more.items() if value is not None}
        model, train, rollout = _engine(instance, spec, path, how | given)
    else:
        common: dict[str, Any] = {
            "dtype": getattr(torch, spec.dtype),
            "device": device,
            "head": spec.head,
            "seed": seed,
            "init": _init(spec),
            "lora": spec.lora,
            "recompute": instance.recompute,
        }
        chosen = spec.optimizer if isinstance(spec.optimizer, AdamW) else None
        optimizer = chosen if instance.trained else None
        if mesh is None:
            model, train, rollout = _whole(instance, optimizer, path, common)
        else:
            model, train, rollout = _sharded(instance, optimizer, path, mesh, common)
    return Loaded(
        instance=instance,
        model=model,
        train=train,
        rollout=rollout,
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(model, tokenizer),
    )


def _whole(
    instance: Instance, optimizer: Any, path: str, common: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Model, training and rollout of an instance that lies in one process."""
    model = load_model(path, **common, offload=instance.offload)
    model.name = instance.name
    train = TrainEngine(model, optimizer, micro_tokens=instance.micro_tokens)
    return model, train, TorchRollout(model)


def _sharded(
    instance: Instance, optimizer: Any, path: str, mesh: DeviceMesh, common: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Model, training and rollout of this process's shards of an instance."""
    from rlflow.engines.sharded.build import load_sharded
    from rlflow.engines.sharded.rollout import ShardedRollout
    from rlflow.engines.sharded.train import ShardedTrainEngine

    model = load_sharded(path, mesh=mesh, trained=instance.trained, name=instance.name, **common)
    train = ShardedTrainEngine(model, optimizer, micro_tokens=instance.micro_tokens)
    return model, train, ShardedRollout(model)


def _engine(
    instance: Instance, spec: Model, path: str, how: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Start an engine for the replica that this process owns, or its part on this host."""
    assert instance.options is not None
    model, rollout = instance.options.load(
        path,
        name=instance.name,
        dtype=getattr(torch, spec.dtype),
        init=_init(spec),
        threads=torch.get_num_threads(),
        **how,
    )
    return model, NoTraining(), rollout


def _init(spec: Model) -> str:
    """Where the first weights of a model come from, as those who load them call it."""
    return "random" if spec.init == "random" else "weights"


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
