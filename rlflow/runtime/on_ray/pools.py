"""Temporary."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@dataclass(frozen=True)
class Slot:
    strategy: Any
    address: str
    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Report:
    address: str
    hostname: str
    device: str
    pid: int


class Reservation:
    def __init__(self, group, slots):
        self.group, self.slots = group, slots

    def release(self):
        remove_placement_group(self.group)


def reserve(session, count, *, kind, threads, deadline):
    group = placement_group([{"CPU": threads}] * count, strategy="PACK")
    assert group.wait(deadline)
    return Reservation(
        group,
        tuple(
            Slot(
                PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
                "",
                i,
                threads,
                0,
            )
            for i in range(count)
        ),
    )


def report():
    return Report(ray.util.get_node_ip_address(), socket.gethostname(), "", os.getpid())


def stable_order(reports, bundles):
    return tuple(sorted(range(len(reports)), key=lambda i: (reports[i].address, bundles[i])))


def device_map(reports, order):
    return [f"rank {n}: {reports[i]}" for n, i in enumerate(order)]


def free_port():
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]
