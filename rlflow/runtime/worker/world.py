"""One rank among the processes of a plan: its device mesh per instance, peers and reshards.

Every rank makes the same groups in the same order, as `torch.distributed` wants it. A rank
is a device of the plan; this file knows neither Ray nor what the ranks compute.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlflow.contract.values import Named
from rlflow.engines.hf.sharded.mesh import PAIRS
from rlflow.engines.process.nodes import Nodes, free_port
from rlflow.runtime.worker.hosts import Site, replica_hosts
from rlflow.scheduler.plan.plan import LENT, UPDATE_BUCKET, Action, Instance, Plan

if TYPE_CHECKING:
    from rlflow.engines.reshard.resharder import Resharder
    from rlflow.engines.reshard.streaming import BucketStream
    from rlflow.runtime.worker.loaded import Loaded

T = TypeVar("T")

_HOST = torch.device("cpu")
MESH = ("replicate", "pp", "fsdp", "tp")
EXPERTS = ("replicate", "pp", "shard", "ep", "tp")
CONTEXT = ("replicate", "pp", "rows", "cp", "tp")


class Meshes(NamedTuple):
    """The mesh of an instance, and the same ranks where experts, or tokens of a row, lie apart."""

    mesh: DeviceMesh
    experts: DeviceMesh | None
    context: DeviceMesh | None


class Where(TypedDict):
    """Where a rank loads an instance."""

    device: str
    meshes: Meshes | None
    ranks: tuple[int, ...]
    nodes: Nodes | None


def where_loaded(world: World | None, instance: Instance, device: str) -> Where:
    """Where a process loads an instance: everything on `device` where there are no ranks."""
    if world is None:
        return Where(device=device, meshes=None, ranks=(), nodes=None)
    return world.where(instance)


class World:
    """The groups of one rank; `devices` are the plan's devices in the order of their ranks.

    The default process group has to be there, of `len(devices)` ranks, unless there is one.
    """

    def __init__(
        self,
        plan: Plan,
        own: int,
        devices: Sequence[int],
        *,
        device: str,
        timeout: float,
        address: str = "127.0.0.1",
    ) -> None:
        self.plan = plan
        self.own = own
        self.device = device
        self._ranks = {number: rank for rank, number in enumerate(devices)}
        self._wait = timedelta(seconds=timeout)
        cut = [engine for engine in plan.engines if engine.tp > 1]
        self._parts: dict[str, tuple[int, ...]] = {}
        self._nodes: dict[str, Nodes] = {}
        if cut:
            self._find(cut, address)
        shared = [i for i in plan.instances if i.sharded]
        kind = self.device.partition(":")[0]
        self._meshes = {i.name: meshes_of(i, self._ranks, kind) for i in shared}
        self._groups = {i.name: self._group(i.devices, i.name) for i in shared}
        self._peers = {i.name: self._part_group(i) for i in plan.instances if i.row_parts > 1}
        self._reshards = {
            a.id: self._group(a.devices, f"{PAIRS}{a.id}")
            for a in plan.actions
            if a.kind == "reshard" and len(a.devices) > 1
        }

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The instances that this rank holds."""
        return tuple(i for i in self.plan.instances if self.own in i.owners)

    @property
    def helped(self) -> tuple[Instance, ...]:
        """The engines of which this rank starts the part on its host, for an owner on another."""
        return tuple(
            i for i in self.plan.instances if i.name in self._nodes and self.own not in i.owners
        )

    def where(self, instance: Instance) -> Where:
        """Where this rank loads an instance: device, mesh, and an engine's ranks and hosts."""
        return {
            "device": self.device,
            "meshes": self._meshes.get(instance.name),
            "ranks": self.places(instance),
            "nodes": self.nodes(instance),
        }

    def places(self, instance: Instance) -> tuple[int, ...]:
        """The devices of an engine's ranks that this one starts, by their numbers on its host.

        Of CPUs the cores. Empty for what is not cut over ranks.
        """
        group = self._parts.get(instance.name, ())
        if self.device == "cpu":
            cores = os.cpu_count() or 1
            return tuple(device % cores for device in group)
        return tuple(self._sites[device].number for device in group)

    def nodes(self, instance: Instance) -> Nodes | None:
        """The place of this host among those of a replica; None where it is on one host."""
        return self._nodes.get(instance.name)

    def _find(self, engines: Sequence[Instance], address: str) -> None:
        """Which engines' replicas, and which of their devices, this rank starts; collective.

        The first device of a host's part of a replica does. Raises PlanError where an engine
        cannot lie as its devices do.
        """
        own = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        here = Site(address=address, number=0 if self.device == "cpu" else int(own))
        sites = self._told(here)
        self._sites = {device: sites[rank] for device, rank in self._ranks.items()}
        model_of = self.plan.graph.model
        parts = {i.name: replica_hosts(i, model_of(i.model), self._sites) for i in engines}
        apart = [name for name, found in parts.items() for part in found if len(part) > 1]
        ports = self._told({name: free_port(address) for name in apart}) if apart else []
        for name, found in parts.items():
            for replica in found:
                first = replica[0][0]
                for rank, part in enumerate(replica):
                    if part[0] != self.own:
                        continue
                    self._parts[name] = part
                    if len(replica) > 1:
                        self._nodes[name] = Nodes(
                            address=self._sites[first].address,
                            port=ports[self._ranks[first]][name],
                            rank=rank,
                            count=len(replica),
                        )

    def _told(self, mine: T) -> list[T]:
        """What every rank says, in their order; collective."""
        found = [mine] * len(self._ranks)
        if len(found) > 1:
            dist.all_gather_object(found, mine)
        return found

    def group(self, instance: Instance) -> dist.ProcessGroup | None:
        """All ranks of an instance that they share; None where each holds all of it."""
        return self._groups.get(instance.name)

    def peers(self, action: Action) -> GroupPeers | None:
        """The ranks that run an action on the other parts of its rows; None without others."""
        return self._peers.get(action.instance or "")

    def reshard_group(self, action: Action) -> dist.ProcessGroup | None:
        """The ranks that take part in a reshard; None where it is this one alone."""
        return self._reshards.get(action.id)

    def replicas(self, action: Action, name: str) -> list[tuple[tuple[int, ...], bool]]:
        """Of each replica of a reshard's target its ranks in the group, and whether it is here."""
        places = sorted(self._ranks[device] for device in action.devices)
        return [
            (tuple(places.index(self._ranks[d]) for d in devices), devices[0] == self.own)
            for devices in self.plan.instance(name).row_groups
        ]

    def _part_group(self, instance: Instance) -> GroupPeers | None:
        """One group for each place within a row part; this rank's, if it has one."""
        found = None
        for members in zip(*instance.row_groups, strict=True):
            group = self._group(members, f"parts of {instance.name}")
            if self.own in members:
                found = GroupPeers(group, members.index(self.own), len(members))
        return found

    def _group(self, devices: Sequence[int], what: str) -> dist.ProcessGroup:
        ranks = sorted(self._ranks[device] for device in devices)
        group: dist.ProcessGroup = dist.new_group(ranks, timeout=self._wait, group_desc=what)
        return group


def meshes_of(instance: Instance, ranks: Mapping[int, int], device: str) -> Meshes:
    """The meshes of an instance that its ranks share; `ranks` says the rank of a plan's device."""
    found = torch.tensor([ranks[each] for each in instance.devices])
    stages, shards, tp = (instance.replicas, instance.pp), instance.shards, instance.tp
    ep, cp = instance.ep, instance.cp

    def cut(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return DeviceMesh(device, found.view(shape), mesh_dim_names=names)

    return Meshes(
        mesh=cut((*stages, shards, tp), MESH),
        experts=cut((*stages, shards // ep, ep, tp), EXPERTS) if ep > 1 else None,
        context=cut((*stages, shards // cp, cp, tp), CONTEXT) if cp > 1 else None,
    )


class GroupPeers:
    """Those who hold the other parts of a batch, reached through a group; part by rank order."""

    def __init__(self, group: dist.ProcessGroup, part: int, parts: int) -> None:
        self._group = group
        self._part = part
        self._parts = parts

    def sum(self, values: Sequence[float]) -> list[float]:
        """Add up number by number; every part adds in the same order, exactly rounded."""
        mine = torch.tensor([float(value) for value in values], dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self._parts)]
        dist.all_gather(everyone, mine, group=self._group)
        return [math.fsum(column) for column in torch.stack(everyone, 1).tolist()]

    def union(self, ids: Tensor) -> Tensor:
        """The distinct values of all parts, sorted."""
        found: Tensor = torch.unique(self.gather(ids))
        return found

    def gather(self, values: Tensor) -> Tensor:
        """The values of all parts, one after the other; all of one dtype and number of columns."""
        count = torch.tensor([len(values)])
        counts = [torch.empty_like(count) for _ in range(self._parts)]
        dist.all_gather(counts, count, group=self._group)
        widest = max(int(size) for size in counts)
        if not widest:
            return values
        mine = values.new_zeros((widest, *values.shape[1:]))
        mine[: len(values)] = values
        everyone = [torch.empty_like(mine) for _ in range(self._parts)]
        dist.all_gather(everyone, mine, group=self._group)
        return torch.cat([part[: int(size)] for part, size in zip(everyone, counts, strict=True)])

    def pass_on(self, named: Named, source: int, target: int, device: torch.device) -> Named:
        """Bring named tensors from one part to another, to whose `device` they go; both call it.

        The source is answered none.
        """
        if self._part == source:
            what = [(name, each.dtype, tuple(each.shape)) for name, each in named.items()]
            dist.send_object_list([what], group=self._group, group_dst=target, device=_HOST)
            for each in named.values():
                dist.send(each.contiguous(), group=self._group, group_dst=target)
            return {}
        told: list[Any] = [None]
        dist.recv_object_list(told, group=self._group, group_src=source, device=_HOST)
        found = {name: torch.empty(shape, dtype=of, device=device) for name, of, shape in told[0]}
        for each in found.values():
            dist.recv(each, group=self._group, group_src=source)
        return found

    def share(self, n: int) -> range:
        """Every `parts`-th of them, from this part's own number on."""
        return range(self._part, n, self._parts)


def resharder(
    world: World | None,
    action: Action,
    source: Loaded | None,
    targets: Sequence[Loaded],
    *,
    check: bool = False,
) -> Resharder | BucketStream:
    """What carries out a reshard, this rank's part of it: moves computed from both ends.

    With `check` hashes are taken on the way, where weights do not stay.
    """
    from rlflow.engines.reshard.resharder import Resharder

    group = None if world is None else world.reshard_group(action)
    if action.transport in LENT:
        return _stream(world, action, source, targets, group, check=check)
    end = source if source is not None else next(iter(targets), None)
    here = {target.instance.name: target.model.shards() for target in targets}
    return Resharder(
        None if source is None else source.model.shards(),
        [here.get(name, {}) for name in action.targets],
        group,
        transport=str(action.transport) if group is not None else "copy",
        only=None if end is None else end.model.trained_names(),
    )


def _stream(
    world: World | None,
    action: Action,
    source: Loaded | None,
    targets: Sequence[Loaded],
    group: dist.ProcessGroup | None,
    *,
    check: bool,
) -> BucketStream:
    """What brings weights to engines in buckets, by the ranks beside theirs."""
    from rlflow.engines.process.client.model import EngineModel
    from rlflow.engines.reshard.ends import home
    from rlflow.engines.reshard.streaming import BucketStream, Lending

    here = {target.instance.name: target.model for target in targets}
    lent: list[Lending] = []
    for name in action.targets:
        replicas = world.replicas(action, name) if world is not None else [((0,), True)]
        for ranks, owned in replicas:
            model = here.get(name) if owned else None
            taker = model.taker() if isinstance(model, EngineModel) else None
            lent.append(Lending(ranks, taker))
    shards = {} if source is None else source.model.shards()
    return BucketStream(
        shards or None,
        lent,
        group,
        device=home(shards) if world is None else torch.device(world.device),
        limit=UPDATE_BUCKET,
        check=check,
    )
