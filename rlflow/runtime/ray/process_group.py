"""How a rank finds the others: the process group of all devices, with a deadline.

`torch.distributed` lives here; no plan is run.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlflow.engines.hf.sharded.mesh import PAIRS, Axis
from rlflow.errors import DeviceLostError, Finding
from rlflow.graph.graph import Graph
from rlflow.runtime.ray.places import interface_of
from rlflow.runtime.ray.ranks import GroupCalls, Start
from rlflow.runtime.ray.rendezvous import meet
from rlflow.runtime.worker.world import World
from rlflow.scheduler.plan.plan import HOST, Action, Instance, Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


STAGES: Axis = "pp"
# The interface on which processes of a group listen for each other.
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Host:
    """The world of the host worker: no model, no device, nobody to reduce with."""

    own = HOST
    device = "cpu"
    instances: tuple[Instance, ...] = ()
    helped: tuple[Instance, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.graph

    def mesh(self, instance: Instance) -> DeviceMesh | None:
        """No instance is here."""
        return None

    def peers(self, action: Action) -> None:
        """The host has all rows of what it runs."""


def join_ranks(plan: Plan, start: Start) -> World:
    """Meet the other ranks, and make the groups of the plan.

    Raises DeviceLostError where they are not all there within the deadline.
    """
    rank, size = start.devices.index(start.own), len(start.devices)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK="0",
        MASTER_ADDR=start.master,
        MASTER_PORT=str(start.port),
    )
    # Left alone they take what the host's name leads to, which may be another network.
    own = "lo" if _is_loopback(start.master) else interface_of(start.address)
    if own:
        os.environ.setdefault(GLOO, own)
        os.environ.setdefault(NCCL, f"={own}")  # Alone it is how names of interfaces begin.
    if size > 1:
        backend = "gloo" if start.device == "cpu" else "cpu:gloo,cuda:nccl"
        store = meet(start.master, start.port, token=start.token, seconds=start.timeout)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=start.timeout),
            )
        except (RuntimeError, ValueError) as error:
            raise DeviceLostError(
                Finding(
                    code="E758",
                    what=f"rank {rank} of {size} did not meet the others",
                    got=str(error).splitlines()[0],
                    expected=f"{size} ranks at {start.master}:{start.port} within "
                    f"{start.timeout:g} s",
                )
            ) from error
    if start.device != "cpu":
        torch.cuda.set_device(start.device)
    return World(
        plan,
        start.own,
        start.devices,
        device=start.device,
        timeout=start.timeout,
        address=start.address or start.master,
    )


def group_calls(devices: Sequence[int]) -> dict[str, GroupCalls]:
    """How many collectives this rank has begun in each group; `devices` are the plan's, by rank.

    Groups in which two ranks talk alone are left out: others of them have nothing to count there.
    """
    found: dict[str, GroupCalls] = {}
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        what = group.group_desc
        if what.startswith(PAIRS) or what == f"mesh_{STAGES}":
            continue
        members = tuple(devices[rank] for rank in dist.get_process_group_ranks(group))
        parts: list[Any] = [group._get_backend(kind) for kind in group._device_types]
        count = sum(part._get_sequence_number_for_group() for part in parts)
        found[name] = GroupCalls(group=what, devices=members, count=count)
    return found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
