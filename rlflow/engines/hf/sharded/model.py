"""A model of which this process holds shards: along `fsdp` of parameters, along `tp` of layers.

The module is one that `sharded` made; its parameters lie in this process as the pieces that
`shards()` names. This file knows neither how it is filled nor optimizers nor sampling.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Head, Shard, SleepMode
from rlflow.engines.hf.flat import free, in_storage, storage_of, to_host
from rlflow.engines.hf.forward.ahead import SharedRows
from rlflow.engines.hf.forward.attention import AttentionState
from rlflow.engines.hf.lora import DOWN, UP, Adapters, is_adapter
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.sharded.expert_parallel import ExpertParallel
from rlflow.engines.hf.sharded.mesh import MeshRanks, chunk
from rlflow.engines.hf.sharded.tensor_parallel import Cut
from rlflow.engines.hf.stages.stage import LayerStage


class ShardedModel(TorchModel):
    """A module over the ranks of a mesh; `version` counts the updates its weights have seen.

    Every rank of the mesh calls `logits` equally often, those of one row part with the same
    tokens. Weights computed with in `dtype` may be kept in float32. `cuts` says which part of
    a parameter, by name, this rank's layers have. Layers are `kept_whole` from a forward to its
    backward, or gathered again. Weights `seen_in_part` are held by all ranks along `tp` and have
    gradients of a rank's own tokens. Experts may be `apart`, so that tokens go to them; tokens of
    `shared` rows lie apart. Layers may be those of a `stage` alone, which makes hidden states
    unless it is the last.
    """

    seen_in_part: frozenset[str] = frozenset()

    def __init__(
        self,
        module: nn.Module,
        config: ModelConfig,
        *,
        head: Head,
        name: str,
        ranks: MeshRanks,
        dtype: torch.dtype,
        cuts: Mapping[str, Cut],
        adapters: Adapters | None = None,
        fixed: frozenset[str] = frozenset(),
        kept_whole: bool = False,
        apart: ExpertParallel | None = None,
        shared: SharedRows | None = None,
        stage: LayerStage | None = None,
    ) -> None:
        self.module = module
        self.shared_rows = shared
        self.apart = apart
        self.stage = stage
        self.kept_whole = kept_whole
        self.config = config
        self.head = head
        self.name = name
        self.version = 0
        self.adapters = adapters
        self.fixed = fixed
        self.layers = None
        self.state = "ready"
        self.ranks = ranks
        self.cuts = cuts
        self.parameters = dict(module.named_parameters())
        self._dtype = dtype
        self._host: list[Tensor] = []
        self._gathered = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        return self._dtype

    @property
    def router_places(self) -> Sequence[int]:
        """See `TorchModel.router_places`."""
        return super().router_places if self.stage is None else self.stage.router_places

    @property
    def routers_now(self) -> Sequence[nn.Module]:
        """See `TorchModel.routers_now`."""
        return self.routers if self.stage is None else self.routers[self.stage.routers_now]

    @property
    def routers_in_all(self) -> int:
        """See `TorchModel.routers_in_all`."""
        return super().routers_in_all if self.stage is None else sum(self.stage.routers)

    def logits(
        self, tokens: Tensor, positions: Tensor, attention: AttentionState, keep: Tensor | None
    ) -> Tensor:
        """See `TorchModel.logits`; all ranks of the mesh take part, each with its own rows."""
        if torch.is_grad_enabled():
            return super().logits(tokens, positions, attention, keep)
        with self._keeping_none():
            logits = super().logits(tokens, positions, attention, keep)
        self.settle()
        return logits

    @contextmanager
    def _keeping_none(self) -> Iterator[None]:
        """Free every layer as it is done, where layers stay whole for a backward.

        No pass comes back to them: kept, they would only take memory until the last is done.
        """
        parts = self._parts()[1:] if self.kept_whole and not self._gathered else []
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(False, recurse=False)

    def settle(self) -> None:
        """Free the whole parameters that a forward without backward leaves behind."""
        if not isinstance(self.module, FSDPModule) or self._gathered:
            return
        if hasattr(self.module, "reset_iter_state"):
            self.module.reset_iter_state()
            return
        for part in self._parts():  # torch 2.11, where each part is asked by itself
            part.reshard()

    def _parts(self) -> list[FSDPModule]:
        """The modules that gather their parameters by themselves, the whole one first."""
        return [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep all parameters of this rank's layers whole within the block.

        Takes the memory of the whole model, divided along `tp` only, and of experts that are apart
        along `ep` once more this rank's. All ranks along `fsdp` take part at the start; within,
        they need not keep step.
        """
        parts = self._parts()
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        self._gathered = True
        try:
            with nullcontext() if self.apart is None else self.apart.gathered():
                yield
        finally:
            for place, part in enumerate(parts):
                part.set_reshard_after_forward(place > 0 and not self.kept_whole, recurse=False)
            self._gathered = False
            self.settle()

    def reduce_gradients(self, last: bool, *, once: bool) -> None:
        """Whether the next backward pass adds up gradients, which the `last` of a step does.

        Those before it leave sums over replicas to it, and over `fsdp` too where that is done
        `once`: gradients are whole on each rank until then, as they are summed.
        """
        if not isinstance(self.module, FSDPModule):
            return
        if once:
            self.module.set_requires_gradient_sync(last)
        else:
            self.module.set_requires_all_reduce(last)

    def shards(self) -> dict[str, Shard]:
        """The pieces of the weights that this rank has, by name; views of the live storage.

        Tied weights appear once. Usable to fill an empty model; RunError while asleep.
        """
        self.require_awake()
        return self.pieces({name: local(p) for name, p in self.parameters.items()})

    def pieces(self, tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
        """Tensors laid out like this rank's pieces of the weights of the same names."""
        return {name: self.piece(name, tensor) for name, tensor in tensors.items()}

    def piece(self, name: str, tensor: Tensor) -> Shard:
        """One of them."""
        return _local_piece(self.parameters[name], tensor, self.cuts.get(name))

    def laid_out(self, tensors: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Shard]:
        """See `TorchModel.laid_out`."""
        return self.pieces({name: tensor for name, tensor in tensors.items() if name in names})

    def asleep_tensors(self) -> dict[str, Tensor]:
        """See `TorchModel.asleep_tensors`."""
        copies = dict(zip(map(id, self.buffers()), self._host, strict=True))
        return {
            name: in_storage(copies[id(self._storages[name])], tensor)
            for name, tensor in self.all_tensors().items()
        }

    def all_tensors(self) -> dict[str, Tensor]:
        """The pieces that this rank has by name, whatever the state."""
        return {name: local(parameter) for name, parameter in self.parameters.items()}

    def trained_names(self) -> frozenset[str]:
        """The names of the weights that training changes."""
        if self.adapters is not None:
            return self.adapters.names
        return frozenset(self.parameters) - self.fixed

    def merged_tensors(self) -> dict[str, Tensor]:
        """The pieces of the plain model's weights, by its names; all ranks take part.

        Views of the live storage but for adapted weights, which are new tensors.
        """
        self.require_ready()
        tensors = {name: t for name, t in self.all_tensors().items() if not is_adapter(name)}
        for layer in () if self.adapters is None else self.adapters.layers:
            name = f"{layer}.weight"
            tensors[name] = self.merged(tensors[name], name, layer)
        return tensors

    def merged(self, weight: Tensor, name: str, layer: str) -> Tensor:
        """The piece of one adapted weight, W + scale B A, added in float32 at least."""
        assert self.adapters is not None
        wide = torch.promote_types(weight.dtype, torch.float32)
        down, up = (_gathered(self.parameters[layer + part]).to(wide) for part in (DOWN, UP))
        rows = slice(0, len(weight))
        if isinstance(self.parameters[name], DTensor):
            size = len(self.parameters[name])
            rows = slice(*chunk(size, self.ranks.sizes["fsdp"], self.ranks.place("fsdp")))
        return (weight.to(wide) + self.adapters.scale * (up[rows] @ down)).to(weight.dtype)

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory, as `TorchModel.sleep` does."""
        self.require_ready()
        self.settle()
        self._host = to_host(self.buffers() if mode == "offload" else self.frozen_buffers())
        self.state = "offloaded" if mode == "offload" else "discarded"
        free(self.buffers())

    def buffers(self) -> list[Tensor]:
        """The storage of this rank's pieces as bytes, those of frozen weights first."""
        return [*self.frozen_buffers(), *self.storages(self.trained_names())]

    def computed_with(self) -> list[Tensor]:
        """What a forward reads: whole parameters where they are gathered, and else the pieces."""
        return [local(parameter) for parameter in self.module.parameters()]

    def frozen_buffers(self) -> list[Tensor]:
        """The storage of what training does not change."""
        return self.storages(self.parameters.keys() - self.trained_names())

    def storages(self, names: Collection[str]) -> list[Tensor]:
        """The storage of some weights, in the model's order, each as one tensor of bytes."""
        return [storage for name, storage in self._storages.items() if name in names]

    @cached_property
    def _storages(self) -> dict[str, Tensor]:
        return {name: storage_of(tensor) for name, tensor in self.all_tensors().items()}

    def num_bytes(self) -> int:
        """Bytes of this rank's pieces when awake."""
        tensors = self.all_tensors().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def local(parameter: Tensor) -> Tensor:
    """What this process holds of a parameter, or of its gradient."""
    with torch.no_grad():
        held = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
    found: Tensor = held
    return found


def _gathered(parameter: Tensor) -> Tensor:
    """A parameter of this rank's layers whole; all ranks along `fsdp` take part."""
    with torch.no_grad():
        held = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    found: Tensor = held
    return found


def _local_piece(parameter: Tensor, tensor: Tensor, cut: Cut | None) -> Shard:
    """Which piece of the whole parameter a tensor is that lies like `parameter` on this rank."""
    shape = list(parameter.shape)
    box = [(0, size) for size in shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axis = mesh.ndim - 1  # ranks that share it; replicas come before
        box[0] = chunk(shape[0], mesh.size(axis), mesh.get_local_rank(axis))
    if cut is not None:
        start, stop = box[cut.dim]
        box[cut.dim] = (cut.start + start, cut.start + stop)
        shape[cut.dim] = cut.size
    return Shard(shape=tuple(shape), box=tuple(box), tensor=tensor)
