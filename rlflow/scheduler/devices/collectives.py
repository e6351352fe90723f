"""Seconds that ranks take to bring data together, by algorithm and by what joins them.

Alpha-beta estimates: a start, a step for each rank that is passed, bytes over the slowest link
(Thakur et al. 2005; Rabenseifner 2004). Which parameters are sent is decided elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.devices.curves import LEAST_GATHER, Curve
from rlflow.scheduler.devices.hardware import Kind

BUCKET = 64 << 20
HOST_BUCKET = 8 << 20
BUCKETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`ranks` that talk to each other: B/s of each, seconds to start and for each step.

    In what each sends to each, `near` of them, all if it is 0, are reached by links of `link` B/s,
    the others by a rank's own card of `card` B/s. What all-gathers were `measured` to bring to each
    a second, by their bytes, goes before the bandwidth where all are reached by links.
    """

    ranks: int
    bandwidth: float
    start: float
    step: float
    near: int = 0
    link: float = math.inf
    card: float = math.inf
    measured: Curve | None = None

    def all_gather(self, size: float) -> float:
        """Seconds until each rank has all `size` bytes, around a ring."""
        if self.ranks < 2:
            return 0.0
        share, bandwidth = (self.ranks - 1) / self.ranks, self.bandwidth
        if self.measured is not None and size >= LEAST_GATHER:
            bandwidth = self.measured.at(size)
        return self.start + (self.ranks - 1) * self.step + share * size / bandwidth

    def reduce_scatter(self, size: float) -> float:
        """Seconds until each rank has its share of a sum of `size` bytes: a ring the other way."""
        return self.all_gather(size)

    def all_to_all(self, size: float) -> float:
        """Seconds until each rank has sent `size` bytes, a share to each, its own included.

        What stays on a host goes beside what leaves it.
        """
        if self.ranks < 2:
            return 0.0
        near = self.near or self.ranks
        link = min(self.link, self.bandwidth) if near == self.ranks else self.link
        inside = size * (near - 1) / self.ranks / link
        outside = size * (self.ranks - near) / self.ranks / self.card
        return self.start + (self.ranks - 1) * self.step + max(inside, outside)

    def shift(self, size: float) -> float:
        """Seconds until each rank has the `size` bytes of the one before it: a step of a ring."""
        if self.ranks < 2:
            return 0.0
        link = self.card if 0 < self.near < self.ranks else min(self.link, self.bandwidth)
        return self.start + self.step + size / link

    def send(self, size: float) -> float:
        """Seconds until one of two ranks has `size` bytes of the other."""
        return self.start + self.step + size / self.bandwidth

    def all_reduce(self, size: float) -> float:
        """Seconds until each rank has the whole sum: around a ring or over a tree."""
        if self.ranks < 2:
            return 0.0
        ring = 2 * self.all_gather(size) - self.start
        deep = math.ceil(math.log2(self.ranks))
        tree = self.start + 2 * deep * self.step + 2 * size / self.bandwidth
        return min(ring, tree)


ALONE = Group(ranks=1, bandwidth=math.inf, start=0.0, step=0.0)


def group_of(cluster: Cluster, devices: Sequence[int]) -> Group:
    """How devices are joined: by links, or each host's by as many network cards.

    Links are those within a host, or within a rack where they leave it. A ring over hosts
    crosses each border once for every device of the group there, each by its own card. The
    slowest kind of device sets the pace.
    """
    return _group_of(cluster, tuple(devices)) if len(devices) > 1 else ALONE


@lru_cache(maxsize=4096)
def _group_of(cluster: Cluster, devices: tuple[int, ...]) -> Group:
    kinds = [cluster.kind_of(device) for device in devices]
    bandwidth = link = min(kind.bus * kind.reached for kind in kinds)
    slowest = max(kinds, key=lambda kind: kind.latency)
    on_host = Counter(cluster.link_domain(device) for device in devices)
    step = slowest.hop
    if len(on_host) > 1:
        cards = min(on_host.values())
        bandwidth = min(bandwidth, *(cards * kind.nic * kind.reached for kind in kinds))
        step = slowest.far_hop
    return Group(
        ranks=len(devices),
        bandwidth=bandwidth,
        start=slowest.latency,
        step=step,
        near=min(on_host.values()),
        link=link,
        measured=slowest.curves.gather if len(on_host) == 1 else None,
        card=min(kind.nic * kind.reached for kind in kinds),
    )


def copy_bandwidth(cluster: Cluster, devices: Sequence[int]) -> float:
    """B/s of a copy between devices, of each: their hosts' network where there are several."""
    kinds = [cluster.kind_of(device) for device in devices] or [cluster.kind]
    link = min(kind.link * kind.reached for kind in kinds)
    if len({cluster.link_domain(device) for device in devices}) > 1:
        return min(link, *(kind.nic * kind.reached for kind in kinds))
    return link


def as_shared(cluster: Cluster, devices: Sequence[int]) -> Kind:
    """The kind of the first device, whose way to its host others of these use at the same time."""
    kind = cluster.kind_of(devices[0])
    if kind.host_sharing == 1:
        return kind
    ways = Counter(
        (cluster.host_of(device), device % kind.per_host // kind.host_sharing) for device in devices
    )
    return replace(kind, host_link=kind.host_link / max(ways.values()))


def to_host_rate(kind: Kind, size: float) -> float:
    """B/s of a copy of so many bytes between a device and its host, as measured or by the table."""
    measured = kind.curves.to_host(size)
    return kind.host_link * kind.reached if measured is None else min(measured, kind.host_link)


def staging(moved: int, *, on_cpu: bool) -> tuple[tuple[str, int], ...]:
    """What a reshard holds in and out: buckets, as large as the transports take at the most."""
    size = BUCKETS * min(HOST_BUCKET if on_cpu else BUCKET, moved)
    return (("buckets", size),) if size else ()
