"""Making a `ShardedModel`: cut by tensor parallelism, shared out by FSDP2, filled, checked.

Layers are cut first (`tensor_parallel`), then every decoder layer's parameters, and the rest,
are shared out along `fsdp` and repeated along `replicate` by torch's `fully_shard` (Zhao et
al., "PyTorch FSDP", arXiv:2304.11277; hybrid sharding is its section 3.2.2). Gradients are sums
over the ranks that see different rows. This file knows neither training nor sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Head
from rlflow.engines.hf.checking import (
    check_outputs,
    check_rows,
    checked_head,
    forward_differences,
    packed_outputs,
    plain_outputs,
)
from rlflow.engines.hf.context.attention import ContextRanks
from rlflow.engines.hf.forward import attention
from rlflow.engines.hf.forward.attention import AttentionState
from rlflow.engines.hf.forward.fused import EXACT
from rlflow.engines.hf.forward.head import Predictor, take_head_apart
from rlflow.engines.hf.forward.packed import TREE_WIDTH
from rlflow.engines.hf.heads import find_stored_head
from rlflow.engines.hf.loading import (
    Init,
    build,
    check_layers,
    check_path,
    quiet_transformers,
    read,
    trained_in_part,
    treat_layers,
    use_packed_attention,
)
from rlflow.engines.hf.lora import Adapters, AdapterSpec
from rlflow.engines.hf.models import TorchModel, ValueModel
from rlflow.engines.hf.recompute import decoder_layers
from rlflow.engines.hf.sharded.expert_parallel import ExpertParallel, expert_layers
from rlflow.engines.hf.sharded.forwards import replace_cut_forwards, restore_cut_forwards
from rlflow.engines.hf.sharded.loading import gather_ahead, materialize
from rlflow.engines.hf.sharded.mesh import Axis, MeshRanks
from rlflow.engines.hf.sharded.model import ShardedModel
from rlflow.engines.hf.sharded.sequence import share_sequence
from rlflow.engines.hf.sharded.tensor_parallel import Cut, Split, parallelize
from rlflow.engines.hf.stages.stage import LayerStage, cut_stage, stage_of, stages_each
from rlflow.engines.hf.weights.filling import fill_all
from rlflow.engines.hf.weights.skeletons import config_of, skeleton
from rlflow.errors import Finding, UsageError
from rlflow.graph.placement import ContextBy, Recompute
from rlflow.modelfiles.configs import HEADS, text_config, text_value
from rlflow.modelfiles.families import (
    cutting_finding,
    dispatch_finding,
    experts_in,
    family_of,
    sequence_finding,
    sharding_finding,
)
from rlflow.modelfiles.heads import Head as StoredHead
from rlflow.modelfiles.layouts.contexts import context_finding, windowed
from rlflow.modelfiles.layouts.stages import staging_finding
from rlflow.modelfiles.widths import carrying_in

__all__ = ["ShardedModel", "load_sharded"]


def load_sharded(
    path: str,
    *,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    context: DeviceMesh | None = None,
    dtype: torch.dtype,
    device: str | torch.device,
    head: Head = "lm",
    seed: int = 0,
    init: Init = "weights",
    trained: bool,
    recompute: Recompute = False,
    hosts_activations: bool = False,
    compiled: bool = False,
    kept_whole: bool = False,
    sequence: bool = False,
    cp_by: ContextBy = "ulysses",
    stages: tuple[int, ...] | int = 1,
    name: str = "",
    lora: AdapterSpec | None = None,
    freeze: Sequence[str] = (),
    fresh_head: bool = True,
) -> ShardedModel:
    """Load this rank's shards of a causal language model, or of its body with a value head.

    Options are those of `load_model`. Raises UsageError also where ranks cannot share a model.
    """
    check_path(path, init)
    ranks = MeshRanks(mesh, torch.device(device), experts, context)
    with quiet_transformers():
        attention.register_attention()
        config = read(path, lambda: config_of(path, dtype))
        check_layers(path, config)
        check_family(path, config, ranks.sizes, ranks.ep, cp_by, sequence=sequence, stages=stages)
        stage = stage_of(ranks, config, stages)
        stored = stored_head(path, config, head, init, fresh_head)
        module = read(path, lambda: skeleton(path, config, head, dtype, stored))
    how = trained_in_part(module, lora, freeze, path, seed)
    if not trained:
        module.requires_grad_(False)
    split, apart, cuts = cut_up(module, config, ranks, path, stage, how["adapters"], dtype)
    share_out(module, ranks, dtype, trained, kept_whole=kept_whole, stage=stage)
    materialize(module, ranks.device)
    model = ShardedModel(
        module.eval(), config, head=head, name=name or path, ranks=ranks, dtype=dtype, cuts=cuts,
        kept_whole=kept_whole, apart=apart, shared=sharing_rows(ranks, cp_by), stage=stage, **how,
    )  # fmt: skip
    make = partial(build, path, config, head, dtype, seed, init, fresh_head)
    drawn = make if init == "random" else None
    with quiet_transformers():
        read(path, lambda: fill_all(model.shards(), model, path, seed=seed, make=drawn))
    plain = plain_outputs(HiddenStates(module), config, head)
    model.settle()
    with quiet_transformers():
        use_packed_attention(module, path)
    share_sequence(model, split if sequence else None)
    _check(model, plain, split)
    treat_layers(model, ranks.device, compiled, recompute, hosts_activations)
    return model


def sharing_rows(ranks: MeshRanks, by: ContextBy) -> ContextRanks | None:
    """The ranks that have parts of the same rows; None where each has whole ones."""
    return ContextRanks(ranks.groups["cp"], by) if ranks.sizes["cp"] > 1 else None


def stored_head(
    path: str, config: ModelConfig, head: Head, init: Init, fresh: bool
) -> StoredHead | None:
    """The value head that files have, where one is read."""
    valued = head == "value" and init == "weights"
    return find_stored_head(path, config, fresh=fresh) if valued else None


def check_family(
    path: str,
    config: ModelConfig,
    sizes: Mapping[Axis, int],
    ep: int = 1,
    cp_by: ContextBy = "ulysses",
    *,
    sequence: bool = False,
    stages: tuple[int, ...] | int = 1,
) -> None:
    """Refuse a family of models that ranks of so many along each axis cannot hold."""
    text = config.get_text_config()
    said = config.to_dict()
    family, experts = family_of(said), experts_in(text_config(said))
    found = sharding_finding(path, family, experts, sizes["fsdp"], sizes["tp"])
    if sizes["tp"] > 1:
        found = cutting_finding(path, family, text.model_type) or found
        found = found or (sequence_finding(path, family) if sequence else None)
    found = found or dispatch_finding(path, family, experts, ep, sizes["fsdp"], sizes["tp"])
    heads = (text_value(said, *HEADS), sizes["cp"], sizes["tp"], cp_by, carrying_in(said))
    found = found or context_finding(path, family, *heads, windows=windowed(said))
    each = (text.num_hidden_layers, sizes["pp"], stages_each(stages, sizes["pp"]))
    found = found or staging_finding(path, family, *each)
    if found is not None:
        raise UsageError(found)


def cut_up(
    module: nn.Module,
    config: ModelConfig,
    ranks: MeshRanks,
    path: str,
    stage: LayerStage | None,
    adapters: Adapters | None,
    dtype: torch.dtype,
) -> tuple[Split | None, ExpertParallel | None, dict[str, Cut]]:
    """Cut layers along `tp`, leave a `stage` of them, and cut its experts along `ep`.

    None where there is one rank along an axis. And which parameters are parts of larger ones.
    """
    split = None
    if ranks.sizes["tp"] > 1:
        split = parallelize(module, config, ranks.mesh["tp"], path)
    if stage is not None:
        cut_stage(module, stage, dtype)
        if split is not None:
            there = set(module.modules()) - stage.unread
            split.roles = {each: role for each, role in split.roles.items() if each in there}
        if adapters is not None:
            adapters.keep(module)
    apart = ExpertParallel(module, ranks, split) if ranks.ep > 1 else None
    known = ({} if split is None else split.cuts) | ({} if apart is None else apart.cuts)
    cuts = {name: known[id(p)] for name, p in module.named_parameters() if id(p) in known}
    return split, apart, cuts


def share_out(
    module: nn.Module,
    ranks: MeshRanks,
    dtype: torch.dtype,
    trained: bool,
    *,
    kept_whole: bool = False,
    stage: LayerStage | None = None,
) -> None:
    """Shard the parameters of a module on the meta device along `fsdp`, layer by layer.

    Experts that are apart along `ep` are shared out among the ranks that hold the same ones.
    Layers are gathered again for a backward, or `kept_whole` from its forward, as the rest is.

    Replicas of a frozen model need nothing of each other, nor does one rank in float32.
    """
    low = trained and dtype not in EXACT
    alone = ranks.sizes["fsdp"] == 1 and (not trained or ranks.sizes["replicate"] == 1)
    if alone and not low:
        return
    if low:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if low else None, reduce_dtype=torch.float32 if low else None
    )
    again = False if kept_whole else None
    apart = [] if ranks.experts is None else expert_layers(module)
    whole = [*decoder_layers(module).values(), module]
    for part in apart:
        assert ranks.experts is not None
        mesh = over_replicas(ranks, ranks.experts, "shard")
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    for part in whole:
        mesh = over_replicas(ranks, ranks.mesh, "fsdp")
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    for part in (*apart, *whole):
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    module.forward = opaque(module.forward)
    if ranks.device.type != "cpu":
        gather_ahead(module, () if stage is None else tuple(map(len, stage.layers)))


def over_replicas(ranks: MeshRanks, mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """The ranks that share parameters along an axis, and their replicas where there are any."""
    return mesh["replicate", axis] if ranks.sizes["replicate"] > 1 else mesh[axis]


def opaque(forward: Any) -> Any:
    """A root's forward whose output FSDP does not look into.

    It would hook on to the logits to fetch the root's parameters before the backward pass, for
    which it has kept them; and warn where they are a view of another tensor.
    """

    def call(*args: Any, **kwargs: Any) -> Logits:
        return Logits(forward(*args, **kwargs).logits)

    return call


class Logits:
    """The output of a model."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class HiddenStates(nn.Module):
    """A module, or one with a value head as if it had none, called through its root."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, logits_to_keep: Tensor | int = 0, **inputs: Any) -> Any:
        """The module's output; in the place of values a value model's hidden states."""
        with headless(self.inner):
            return self.inner(logits_to_keep=logits_to_keep, **inputs)


@contextmanager
def headless(module: nn.Module) -> Iterator[None]:
    """A value model's head lets hidden states through within the block."""
    if not isinstance(module, ValueModel):
        yield
        return
    head: Any = module.value_head
    before = vars(head).pop("forward", None)
    head.forward = lambda hidden: hidden
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


class Checked:
    """A sharded model as the check of a loaded model sees one."""

    def __init__(self, model: ShardedModel) -> None:
        self.module = HiddenStates(model.module)
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def logits(
        self, tokens: Tensor, positions: Tensor, state: AttentionState, keep: Tensor | None
    ) -> Tensor:
        """See `HiddenStates`."""
        with headless(self.model.module):
            return self.model.logits(tokens, positions, state, keep)


def _head_of_all(model: ShardedModel, plain: Tensor, split: Split | None) -> Predictor | None:
    """The head, where it computes the plain outputs on every rank that has one."""
    if model.head != "lm":
        return None
    has = model.stage is None or model.stage.has_last
    predictor = cut_head(model.module, model.config, split) if has else None
    if not model.ranks.most(predictor is not None):
        return None
    seen = cast("TorchModel", model)
    differs = has and checked_head(seen, plain, predictor) is None
    if not has and model.device.type != "cpu":
        packed_outputs(seen, *check_rows(model.config.get_text_config().vocab_size), TREE_WIDTH)
    return predictor if not model.ranks.most(differs) else None


def cut_head(module: nn.Module, config: ModelConfig, split: Split | None) -> Predictor | None:
    """The head, of which this rank may have a part."""
    layer: Any = getattr(module, "get_output_embeddings", lambda: None)()
    cut = None if split is None else split.weights.get(layer)
    if split is None or cut is None:
        return take_head_apart(module, config)
    return take_head_apart(module, config, start=cut.start, group=split.group, size=cut.size)


def _check(model: ShardedModel, plain: Tensor, split: Split | None) -> None:
    """Put faster forwards in place, and take them back if a rank finds that they differ.

    Raises UsageError on all ranks where outputs differ from the plain ones on any. A head that
    can be taken apart, on every rank, is the model's predictor.
    """
    seen = cast("TorchModel", Checked(model))
    replace_cut_forwards(model.module, split, model.dtype)
    if not model.ranks.most(len(forward_differences(seen, plain))):
        model.predictor = _head_of_all(model, plain, split)
        return
    restore_cut_forwards(model.module, split, model.dtype)
    if model.ranks.most(len(forward_differences(seen, plain))):
        check_outputs(seen, plain)
        what = f"model {model.name!r} computes something else when its rows are packed"
        raise UsageError(Finding(code="E504", what=what, got="a difference on another rank"))
    model.predictor = _head_of_all(model, plain, split)
