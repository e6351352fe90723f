"""A device whose tensors hold no data: torch's `meta`, with what it lacks to take a worker's code.

Autograd asks a CUDA device for its context as soon as a tensor requires a gradient, also where the
tensor is fake; without a GPU torch for CPUs then ends the process, and torch 2.11 for CUDA refuses
the backward pass. Tensors on `meta` have shapes, strides and storages of a size, and go through
autograd, FSDP and optimizers. What is read off such a tensor is zero, unless its values follow
from those of the host alone, and what ranks send each other is what they have themselves. This file
knows no plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from rlflow.contract.engines import ModelConfig
from rlflow.engines import pinned
from rlflow.engines.hf import loading
from rlflow.engines.hf.flat import in_storage
from rlflow.engines.hf.forward import spans
from rlflow.engines.hf.forward.sequences import (
    Visible,
    attention_asked,
    kernel_options,
    kernel_parameters,
)
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.optim.adamw import AdamWState
from rlflow.engines.hf.routing import experts
from rlflow.engines.hf.sharded import build
from rlflow.engines.hf.sharded import model as sharded
from rlflow.engines.hf.sharded.mesh import MeshRanks
from rlflow.engines.hf.sharded.optim import ShardedAdamW
from rlflow.engines.hf.weights.skeletons import skeleton
from rlflow.modelfiles.kernels.attention import AttentionBy, attention_choice
from rlflow.runtime.rehearse.attending import attended_by_kernels
from rlflow.runtime.rehearse.known import SIZED_BY_VALUES, KnownValues, is_small, leaves
from rlflow.runtime.rehearse.live import ELSEWHERE, KindOf, LiveStorages
from rlflow.scheduler.models.mixtures import FULLEST_RANK

DEVICE = "meta"
# What collectives of FSDP leave in their first argument, which is flat.
SENT = {"_allgather_base_": "gathered weights", "_reduce_scatter_base_": "gradients"}
# Operators by which a copy on the host begins.
LIKE = {"empty_like", "zeros_like"}
# Operators that tell the host what is on the device.
READS = {"_local_scalar_dense", "equal"}
# Operators whose indices may lie on the CPU beside a device's tensor.
INDEXED = {"index", "index_put", "index_put_", "index_select"}


class NoData(LiveStorages):  # type: ignore[no-untyped-call]
    """Operators on tensors without data, and a count of the storages that they take."""

    def __init__(self, kind_of: KindOf | None = None) -> None:
        super().__init__(DEVICE, kind_of)
        self.known = KnownValues(DEVICE)

    def computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator makes; zeros where it reads data of the device that is not known."""
        name = func.overloadpacket.__name__
        if name in SENT and without_values(args[0]) and args[0].ndim == 1:
            self.relabel(args[0], SENT[name])
        if name == "split_with_sizes_copy":
            for whole in kwargs.get("out", ()):
                self.relabel(whole, SENT["_allgather_base_"])
        if name == "copy_" and is_one_number(args[0]):
            return args[0]
        if self.known.knows(func, args, kwargs):
            return self._known_too(func, args, kwargs)
        if (read := read_off(name, args, kwargs)) is not None:
            return read
        if name in INDEXED and any(without_values(arg) for arg in (args, kwargs)):
            if name == "index":
                args = (args[0], self.known.places(args[1]))
            args, kwargs = tree_map_only(Tensor, indexed, (args, kwargs))
        return func(*args, **kwargs)

    def _known_too(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator makes of known values on the device; the values where it reads some."""
        name, known = func.overloadpacket.__name__, self.known
        reads = name in READS or (args and leaves_device(args[0], kwargs))
        if reads or (name == "copy_" and args[0].device.type == "cpu"):
            return known.repeated(func, args, kwargs)
        if name in SIZED_BY_VALUES:
            return known.on_device(known.repeated(func, args, kwargs))
        made = func(*args, **kwargs)
        if all(map(is_small, leaves(made))):
            known.take(made, known.repeated(func, args, kwargs))
        return made


def read_off(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator reads off the device without data, zeros; None where it reads nothing."""
    if name == "_local_scalar_dense" and args[0].device.type == DEVICE:
        return 0.0 if args[0].is_floating_point() else 0
    if name == "_to_copy" and leaves_device(args[0], kwargs):
        more = {key: kwargs[key] for key in ("dtype",) if kwargs.get(key) is not None}
        return torch.zeros(args[0].shape, **{"dtype": args[0].dtype, **more})
    if name == "copy_" and args[0].device.type == "cpu" and args[1].device.type == DEVICE:
        return args[0].zero_()
    if name in LIKE and leaves_device(args[0], kwargs):
        return one_zero(args[0].shape, kwargs.get("dtype") or args[0].dtype)
    return None


def without_values(value: object) -> bool:
    """Whether a tensor, or one among values, is on the device without data."""
    if isinstance(value, Tensor):
        return value.device.type == DEVICE
    if isinstance(value, dict):
        return any(map(without_values, value.values()))
    return isinstance(value, list | tuple) and any(map(without_values, value))


def leaves_device(tensor: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a copy is made on the CPU of a tensor without data."""
    to = kwargs.get("device")
    if not isinstance(tensor, Tensor):
        return False
    return tensor.device.type == DEVICE and to is not None and torch.device(to).type == "cpu"


def one_zero(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What goes to the host and comes back, which nobody reads: zero in the place of all of it."""
    return torch.zeros((), dtype=dtype).expand(shape)


def is_one_number(tensor: Tensor) -> bool:
    """Whether a tensor has one number in the place of all."""
    return not any(tensor.stride()) and tensor.numel() > 1


def indexed(tensor: Tensor) -> Tensor:
    """The tensor on the device, as an index of one that is there."""
    return tensor if tensor.device.type == DEVICE else tensor.to(DEVICE)


@contextmanager
def without_data(live: LiveStorages, ranks: int, rank: int = 0) -> Iterator[None]:
    """Let models, meshes and FSDP lie on the device without data, as a `rank` of so many.

    Of the worker's code this replaces what needs numbers: how a model is filled, and the checks of
    a loaded one; of torch, FSDP's refusal of tensors without data, and which kernel attends.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param_group, _fully_shard

    handle = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    handle.current_device = lambda: 0
    place = torch.device(DEVICE)
    with ExitStack() as stack:

        def replace(target: Any, name: str, value: object) -> None:
            stack.enter_context(patch.object(target, name, value, create=name == DEVICE))

        replace(torch, DEVICE, handle)
        replace(torch, "tensor", by_way_of_host(torch.tensor))
        replace(_fully_shard, "_get_device_from_mesh", lambda _: place)
        replace(_fsdp_init, "_move_states_to_device", lambda *_: None)
        group = _fsdp_param_group.FSDPParamGroup
        replace(group, "_validate_no_meta_params", lambda _: None)
        replace(loading, "skeleton_for", empty_module)
        replace(pinned, "host_zeros", lambda count, dtype, _: one_zero((count,), dtype))
        attend = nn.functional.scaled_dot_product_attention
        replace(nn.functional, "scaled_dot_product_attention", attended_by_kernels(attend))
        replace(spans, "attends_by", attends_on_cuda)
        replace(spans, "attend_flex", attended_by_flex)
        replace(sharded, "in_storage", in_no_storage)
        replace(experts, "pairs_here", mean_pairs)
        replace(experts, "rows_of_ranks", mean_rows_of_ranks)
        for owner, name, kind in (
            (loading, "skeleton_for", ELSEWHERE),
            (build, "skeleton", ELSEWHERE),
            (build, "trained_in_part", ELSEWHERE),
            (build, "parallelize", ELSEWHERE),
            (build, "share_out", ELSEWHERE),
            (build, "materialize", "weights"),
            (TorchModel, "__init__", "weights"),
            (AdamWState, "__init__", "optimizer"),
            (ShardedAdamW, "__init__", "optimizer"),
            (AdamWState, "zero_grad", "gradients"),
        ):
            replace(owner, name, counted_as(live, getattr(owner, name), kind))
        replace(loading, "compile_layers", lambda _: None)
        for module in (loading, build):
            replace(module, "fill_all", lambda *_, **__: None)
            replace(module, "plain_outputs", no_outputs)
            replace(module, "forward_differences", lambda *_: {})
            replace(module, "checked_head", lambda _, __, predictor, **___: predictor)
        replace(MeshRanks, "most", lambda _, value, *__: value)
        replace(MeshRanks, "gather", lambda _, value, *__: [value])
        if ranks > 1:
            stack.enter_context(fake_ranks(ranks, rank))
        yield


def by_way_of_host(plain: Any) -> Any:
    """`torch.tensor` of which the device gets the values: of data for it torch makes none there."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        found: Tensor = plain(data, **kwargs)
        return found if device is None else found.to(device)

    return made


def mean_pairs(layer: Any, chosen: Tensor, _: Tensor) -> int:
    """How many pairs are of a layer's experts where every expert gets as many."""
    return chosen.numel() * len(layer.gate_up_proj) // int(layer.num_experts)


def mean_rows_of_ranks(
    layer: Any, chosen: Tensor, going: Tensor, _: Tensor
) -> tuple[list[int], list[int], int]:
    """The tokens of these of each of several ranks; to this one come as many as plans count with.

    And their pairs.
    """
    (tokens, k), experts = chosen.shape, int(layer.num_experts)
    others = experts - len(layer.gate_up_proj)
    mean = round(tokens * (1 - math.comb(others, k) / math.comb(experts, k)))
    pairs = math.ceil(FULLEST_RANK * mean_pairs(layer, chosen, going))
    return [mean] * len(going), [math.ceil(FULLEST_RANK * mean)] * len(going), pairs * len(going)


def in_no_storage(storage: Tensor, like: Tensor) -> Tensor:
    """What lies in the copy of a storage as `like` does, where one number stands for that copy."""
    return one_zero(like.shape, like.dtype) if is_one_number(storage) else in_storage(storage, like)


def empty_module(
    path: str, config: ModelConfig, head: Any, dtype: torch.dtype, *_: Any
) -> nn.Module:
    """A module of which no parameter has data."""
    return skeleton(path, config, head, dtype)


def counted_as(live: LiveStorages, method: Any, kind: str) -> Any:
    """A method of which all that it makes is of a kind."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with live.labelled(kind):
            return method(*args, **kwargs)

    return call


def attends_on_cuda(q: Tensor, v: Tensor, seen: Visible) -> AttentionBy:
    """What would compute attention of such queries and values on a CUDA device."""
    asked = attention_asked(q, v, seen)
    return attention_choice(dataclasses.replace(asked, device="cuda", compiles=True)).by


def attended_by_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """In the place of FlexAttention, which knows no such device: an operator that keeps the same.

    Both keep queries, keys, values, output and log-sums, and make gradients of the first three.
    """
    from torch.nn.attention.varlen import varlen_attn

    tokens, runs = len(q), torch.empty(2, dtype=torch.int32, device=DEVICE)
    seen = Visible(scale=scale, causal=True)
    output, sums = varlen_attn(
        q, k, v, runs, runs, tokens, tokens,
        **kernel_options(seen, kernel_parameters(), grouped=q.shape[1] != k.shape[1]),
    )  # fmt: skip
    return output[..., : v.shape[-1]], sums


def no_outputs(module: Any, *_: Any) -> Tensor:
    """In the place of the outputs of a module that has just been made; FSDP gets ready for one."""
    root = getattr(module, "inner", module)
    if isinstance(root, FSDPModule):
        root._get_fsdp_state()._lazy_init()
    return torch.zeros(1, 1)


@contextmanager
def fake_ranks(count: int, rank: int) -> Iterator[None]:
    """A world of ranks of which this process is one and the others are not there."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        # Tensors are remembered with meshes of groups that are gone, which another rank's equal.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
