"""Pools on Ray: devices reserved through placement groups, and the order that numbers them.

One bundle is one device. A reservation takes whole devices of as few nodes as can be, one
placement group a node, or says within its deadline what is missing and who holds it. Ranks
are numbered by where their processes are, so that the map is the same every time. Knows no
plan and no models.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlflow.errors import Finding, PlanError, RunError
from rlflow.runtime.ray.cluster.alive import bounded
from rlflow.runtime.ray.cluster.causes import cause_of
from rlflow.runtime.ray.cluster.holders import holders
from rlflow.runtime.ray.cluster.joining import listens
from rlflow.runtime.ray.cluster.session import RayNode, Session
from rlflow.runtime.ray.places import address_key, device_key

POLL = 0.05
GROUP_SECONDS = 5.0
ASK_SECONDS = 10.0
NODE_SECONDS = 2.0
PIN = 0.001
TYPE = "accelerator_type:"
ANY_KIND = "gpu"

Need = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One device: how an actor asks for it, the node it is on, its place there, its share."""

    strategy: PlacementGroupSchedulingStrategy
    address: str
    bundle: int
    cpus: float
    gpus: float


class Reservation:
    """Devices held until released, or until the session ends; slots by node and bundle."""

    def __init__(self, groups: Sequence[PlacementGroup], slots: Sequence[_Slot]) -> None:
        self._groups = list(groups)
        self.slots = tuple(slots)

    def release(self) -> None:
        """Give the devices back; actors on them are stopped. Twice does no harm."""
        groups, self._groups = self._groups, []
        with contextlib.suppress(RunError):
            bounded(lambda: [*map(remove_placement_group, groups)], ASK_SECONDS, doing="release")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where a process is: its node, its device ids (`""` for a CPU slot) and its number."""

    address: str
    hostname: str
    device: str
    pid: int


def reserve(
    session: Session, count: int, *, kind: str, threads: int, deadline: float
) -> Reservation:
    """Reserve `count` devices of a kind: slots of `threads` cores for `cpu`, else accelerators.

    An accelerator comes with as many cores.

    Devices that are taken are waited for, for `deadline` seconds, then RunError names who
    holds them. Raises PlanError at once where the cluster has too few, or none of that kind.
    """
    need = _need(kind, threads)
    end = time.monotonic() + deadline
    fitting = _of_kind(session.nodes(), kind)
    if sum(_room(node.total, need) for node in fitting) < count:
        raise _too_small(fitting, count, kind, need)
    while True:
        shares = _shares([(node, _room(node.free, need)) for node in fitting], count)
        reservation = _reserved(shares, need) if shares else None
        if reservation is not None:
            return reservation
        if time.monotonic() >= end:
            raise _taken(fitting, count, kind, need, deadline)
        time.sleep(POLL)
        fitting = _of_kind(session.nodes(), kind)


def num_gpus() -> int:
    """How many GPUs this machine has."""
    manager = get_accelerator_manager_for_resource("GPU")
    return 0 if manager is None else int(manager.get_current_node_num_accelerators())


def rooms(session: Session, *, kind: str, threads: int) -> tuple[int, ...]:
    """How many devices of a kind each node has room for now, in the order they are taken.

    Raises PlanError where no node has any of that kind.
    """
    need = _need(kind, threads)
    return tuple(_room(node.free, need) for node in _of_kind(session.nodes(), kind))


def answering_room(session: Session, *, kind: str, threads: int) -> tuple[int, int]:
    """How many devices of a kind the nodes that answer have in all, and how many are free.

    Ray takes a node that is gone for living for up to half a minute.
    """
    need = _need(kind, threads)
    try:
        fitting = _of_kind(session.nodes(), kind)
    except PlanError:  # the last node with such devices is gone
        return 0, 0
    there = [node for node in fitting if listens(node.manager, NODE_SECONDS)]
    return sum(_room(n.total, need) for n in there), sum(_room(n.free, need) for n in there)


def own_report() -> Report:
    """Where this worker process is."""
    ids = ray.get_runtime_context().get_accelerator_ids()
    return Report(
        address=ray.util.get_node_ip_address(),
        hostname=socket.gethostname(),
        device=",".join(ids.get("GPU", ())),
        pid=os.getpid(),
    )


def stable_order(reports: Sequence[Report], bundles: Sequence[int]) -> tuple[int, ...]:
    """Which report is rank 0, rank 1, and so on: whatever order they are given in.

    By node address (numeric, IPv4 before IPv6), host name, device id (numeric), bundle; where
    all of these are equal, by process.
    """
    keys = [
        (address_key(r.address), r.hostname, device_key(r.device), bundle, r.pid)
        for r, bundle in zip(reports, bundles, strict=True)
    ]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def device_map(reports: Sequence[Report], order: Sequence[int]) -> list[str]:
    """One line a rank: its device, node, host and process."""
    rows = [("rank", "device", "node", "host", "process")]
    for rank, place in enumerate(order):
        at = reports[place]
        rows.append((str(rank), at.device or "cpu", at.address, at.hostname, str(at.pid)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _need(kind: str, threads: int) -> Need:
    """What one device takes of its node."""
    cores = {"CPU": float(threads)}
    return cores if kind == "cpu" else {"GPU": 1.0, **cores}


def _room(resources: Mapping[str, float], need: Need) -> int:
    """How many devices fit into what a node has."""
    return min(int(resources.get(name, 0.0) // amount) for name, amount in need.items())


def _names(accelerator_type: str, kind: str) -> bool:
    """Whether Ray's name of an accelerator is of a kind: `A100-80G` of `a100`.

    Ray names a GeForce by its first letter, and has no name for a kind that a file alone knows:
    those are believed.
    """
    words = accelerator_type.lower().split("-")
    return kind in words or kind == ANY_KIND or (words == ["g"] and kind.startswith("rtx"))


def _of_kind(nodes: Sequence[RayNode], kind: str) -> list[RayNode]:
    """Living nodes that have such devices; one that does not say its kind is believed."""
    living = [node for node in nodes if node.alive]
    if kind == "cpu":
        return living
    fitting = [
        node
        for node in living
        if node.total.get("GPU", 0.0) >= 1.0
        and (not _types(node) or any(_names(name, kind) for name in _types(node)))
    ]
    if not fitting:
        raise PlanError(
            Finding(
                code="E773",
                what=f"no node of the Ray cluster has a device of kind {kind!r}",
                got="\n".join(map(_described, living)) or "no living node",
                expected=f"a node with GPU resources, of type {kind.upper()} where it says",
                fix=f"--devices cpu:{len(living)}, or add a node with such devices",
            )
        )
    return fitting


def _types(node: RayNode) -> list[str]:
    return [name.removeprefix(TYPE) for name in node.total if name.startswith(TYPE)]


def _shares(rooms: Sequence[tuple[RayNode, int]], count: int) -> list[tuple[RayNode, int]]:
    """How many devices each node gives: the first with room for all, else node by node.

    Nothing where there is not enough room.
    """
    for node, room in rooms:
        if room >= count:
            return [(node, count)]
    shares = []
    for node, room in rooms:
        if room and count:
            shares.append((node, min(room, count)))
            count -= shares[-1][1]
    return [] if count else shares


def _reserved(shares: Sequence[tuple[RayNode, int]], need: Need) -> Reservation | None:
    """A placement group on each node; None, and nothing held, where somebody was quicker."""
    groups: list[PlacementGroup] = []
    slots: list[_Slot] = []

    def create() -> bool:
        for node, taken in shares:
            bundle = {**need, f"node:{node.address}": PIN}
            name = f"rlflow {os.getpid()}@{socket.gethostname()} {secrets.token_hex(4)}"
            groups.append(placement_group([bundle] * taken, strategy="STRICT_PACK", name=name))
            slots.extend(_slot(groups[-1], node, place, need) for place in range(taken))
        return all(group.wait(GROUP_SECONDS) for group in groups)

    created = False
    try:
        seconds = GROUP_SECONDS * len(shares) + ASK_SECONDS
        created = bounded(create, seconds, doing="creating placement groups")
    except RayError as error:
        refused = Finding(code="E774", what="devices cannot be reserved", got=cause_of(error))
        raise RunError(refused) from error
    finally:
        reservation = Reservation(groups, slots)
        if not created:
            reservation.release()
    return reservation if created else None


def _slot(group: PlacementGroup, node: RayNode, place: int, need: Need) -> _Slot:
    return _Slot(
        strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=place
        ),
        address=node.address,
        bundle=place,
        cpus=need["CPU"],
        gpus=need.get("GPU", 0.0),
    )


def _too_small(nodes: Sequence[RayNode], count: int, kind: str, need: Need) -> PlanError:
    have = sum(_room(node.total, need) for node in nodes)
    return PlanError(
        Finding(
            code="E772",
            what=f"the pools need {count} {kind} devices, the Ray cluster has room for {have}",
            got="\n".join(
                f"{_described(node)}: room for {_room(node.total, need)}" for node in nodes
            ),
            expected=f"{count} times {_amounts(need)}",
            fix=f"--devices {kind}:{have}" if have else "ray start --address ... on more nodes",
        )
    )


def _taken(nodes: Sequence[RayNode], count: int, kind: str, need: Need, seconds: float) -> RunError:
    free = [(node, _room(node.free, need)) for node in nodes]
    rows = [f"{_described(node)}: {room} free" for node, room in free]
    room = sum(room for _, room in free)
    return RunError(
        Finding(
            code="E774",
            what=f"{count} {kind} devices were not free within {seconds:.3g} s",
            got="\n".join([*rows, *(f"held by {holder}" for holder in holders())]),
            expected=f"{count} times {_amounts(need)}",
            fix=f"--devices {kind}:{room}" if room else "wait for the others to end",
        )
    )


def _described(node: RayNode) -> str:
    """A node as errors show it: address, host, devices in all."""
    shown = {name: node.total[name] for name in ("CPU", "GPU") if node.total.get(name)}
    types = f", {', '.join(_types(node))}" if _types(node) else ""
    return f"node {node.address} ({node.hostname}: {_amounts(shown)}{types})"


def _amounts(resources: Need) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
