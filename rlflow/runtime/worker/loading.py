"""Loading a model instance: whole in this process, sharded over a mesh, or an engine beside it.

Knows engines and one instance; neither the plan's order nor other instances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

import torch

from rlflow.contract.tokenizers import Tokenizer
from rlflow.contract.values import Drafting, Head
from rlflow.engines.hf.loading import Init, load_model, load_tokenizer
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.errors import Finding, UsageError
from rlflow.graph.model import AdamW, LoRA, Model, Muon
from rlflow.graph.placement import Recompute
from rlflow.graph.user.routers import Router
from rlflow.runtime.worker.loaded import Loaded
from rlflow.scheduler.plan.instance import engines_of
from rlflow.scheduler.plan.plan import Instance

if TYPE_CHECKING:
    from rlflow.contract import engines as contract
    from rlflow.engines.process.nodes import Nodes
    from rlflow.runtime.worker.world import Meshes

    Parts = tuple[contract.LoadedModel, contract.Trainer | None, contract.RolloutEngine]


class Common(TypedDict):
    """What a model that lies in workers is loaded with, whole or sharded."""

    dtype: torch.dtype
    device: str
    head: Head
    seed: int
    init: Init
    lora: LoRA | None
    freeze: tuple[str, ...]
    recompute: Recompute
    hosts_activations: bool
    compiled: bool
    fresh_head: bool


def loading(*instances: Instance) -> str:
    """What is done where instances are loaded, in words for those who wait."""
    own = [i.name for i in instances if not i.engine_plan.in_process]
    done = [f"loading weights of {', '.join(own)}"] if own else []
    engines: dict[str, list[str]] = {}
    for instance in engines_of(instances):
        engines.setdefault(instance.engine_plan.title, []).append(instance.name)
    done += [f"starting {title} for {', '.join(names)}" for title, names in engines.items()]
    return ", ".join(done)


def load_instance(
    instance: Instance,
    spec: Model,
    path: str,
    *,
    seed: int,
    device: str = "cpu",
    meshes: Meshes | None = None,
    ranks: Sequence[int] = (),
    nodes: Nodes | None = None,
    draft: Drafting | None = None,
) -> Loaded:
    """Load an instance: whole in this process, or this process's shards of it over a mesh.

    An engine of its own is started in a process beside this one, on the devices of its `ranks`,
    with a `draft` if there is one; of one that lies on several `nodes`, this host's part.
    """
    tokenizer = load_tokenizer(path)
    if instance.engine_plan.own_process:
        how = {"seed": seed, "device": device, "devices": ranks}
        more = {"draft": draft, "nodes": nodes, "lora": spec.lora}
        given = {name: value for name, value in more.items() if value is not None}
        parts = _engine(instance, spec, path, how | given)
    else:
        common: Common = {
            "dtype": getattr(torch, spec.dtype),
            "device": device,
            "head": spec.head,
            "seed": seed,
            "init": _init(spec),
            "lora": spec.lora,
            "freeze": spec.freeze,
            "recompute": instance.recomputes,
            "hosts_activations": instance.hosts_activations,
            "compiled": instance.compiled,
            "fresh_head": spec.optimizer is not None,
        }
        chosen = spec.optimizer if isinstance(spec.optimizer, AdamW | Muon) else None
        optimizer = chosen if instance.trained else None
        router = spec.router if instance.trained else None
        if meshes is None:
            parts = _whole(instance, optimizer, router, path, common)
        else:
            parts = _sharded(instance, optimizer, router, path, meshes, common)
    model, train, rollout = parts
    return Loaded(
        instance=instance,
        model=model,
        train=train,
        rollout=rollout,
        tokenizer=tokenizer,
        stop_tokens=_stop_tokens(model, tokenizer),
        path=path,
    )


def _whole(
    instance: Instance,
    optimizer: AdamW | Muon | None,
    router: Router | None,
    path: str,
    common: Common,
) -> Parts:
    """Model, training and rollout of an instance that lies in one process."""
    layers: Literal["layers"] | None = "layers" if instance.offload == "layers" else None
    model = load_model(path, **common, offload=layers)
    model.name = instance.name
    micro, visiting = instance.micro_tokens, instance.offload == "optimizer"
    train = TrainEngine(model, optimizer, micro_tokens=micro, visiting=visiting, router=router)
    return model, train, TorchRollout(model, rows_at_once=instance.rows_at_once)


def _sharded(
    instance: Instance,
    optimizer: AdamW | Muon | None,
    router: Router | None,
    path: str,
    meshes: Meshes,
    common: Common,
) -> Parts:
    """Model, training and rollout of this process's shards of an instance."""
    from rlflow.engines.hf.sharded.build import load_sharded
    from rlflow.engines.hf.sharded.rollout import ShardedRollout
    from rlflow.engines.hf.sharded.train import ShardedTrainEngine
    from rlflow.engines.hf.stages.train import StagedTrainEngine

    model = load_sharded(
        path,
        trained=instance.trained,
        name=instance.name,
        kept_whole=instance.kept_whole,
        sequence=instance.sequence,
        cp_by=instance.cp_by or "ulysses",
        stages=instance.stages or instance.virtual,
        **meshes._asdict(),
        **common,
    )
    micro, visiting = instance.micro_tokens * instance.cp, instance.offload == "optimizer"
    engine = ShardedTrainEngine if instance.pp == 1 else StagedTrainEngine
    train = engine(model, optimizer, micro_tokens=micro, visiting=visiting, router=router)
    if isinstance(train, StagedTrainEngine):
        train.follow(instance.schedule)
    train.reduces_last = instance.reduces_last
    return model, train, ShardedRollout(model, rows_at_once=instance.rows_at_once)


def _engine(instance: Instance, spec: Model, path: str, how: Mapping[str, object]) -> Parts:
    """Start an engine for the replica that this process owns, or its part on this host."""
    model, rollout = instance.engine_plan.settings.load(
        path,
        name=instance.name,
        dtype=getattr(torch, spec.dtype),
        init=_init(spec),
        threads=torch.get_num_threads(),
        **how,
    )
    return model, None, rollout


def _init(spec: Model) -> Init:
    """Where the first weights of a model come from, as those who load them call it."""
    return "random" if spec.init == "random" else "weights"


def _stop_tokens(model: contract.LoadedModel, tokenizer: Tokenizer) -> tuple[int, ...]:
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
