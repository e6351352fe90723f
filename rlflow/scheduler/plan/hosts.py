"""Engines whose ranks lie on several hosts, and how weights reach an engine.

Knows devices, hosts and options; no order, and no sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import groupby

from rlflow.errors import Finding
from rlflow.graph.model import Model
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.plan.plan import Instance

Devices = tuple[int, ...]
HostOf = Callable[[int], Hashable]


def host_parts(instance: Instance, host_of: HostOf) -> list[list[Devices]]:
    """The parts of every replica: each is a run of neighbouring devices on one host."""
    return [
        [tuple(part) for _, part in groupby(replica, key=host_of)]
        for replica in instance.row_groups
    ]


def num_hosts(parts: Iterable[Devices], host_of: HostOf) -> int:
    """On how many hosts a replica lies: fewer than it has parts, where two are on one host."""
    return len({host_of(part[0]) for part in parts})


def host_findings(instance: Instance, model: Model, host_of: HostOf) -> list[Finding]:
    """Findings on replicas over several hosts, and on what reaches an engine there.

    The findings of its options, E674 for uneven shares and E676.
    """
    if not instance.engine_plan.own_process:
        return []
    replicas = host_parts(instance, host_of)
    most = max(num_hosts(parts, host_of) for parts in replicas)
    found = instance.engine_plan.settings.host_findings(instance.name, most)
    found = found or uneven(instance.name, [tuple(map(len, parts)) for parts in replicas])
    return [*found, *_way_findings(instance, model, most)]


def uneven(name: str, replicas: Iterable[tuple[int, ...]]) -> list[Finding]:
    """A finding (E674) where the hosts of a replica have unequal numbers of its ranks."""
    for each in replicas:
        if len(set(each)) > 1:
            return [
                Finding(
                    code="E674",
                    what=f"the ranks of {name} are not shared evenly among hosts",
                    got=f"{', '.join(map(str, each))} of them, host by host",
                    expected="as many ranks of a replica on each of its hosts",
                    fix="other devices for its pool, or a smaller tp=",
                )
            ]
    return []


def _way_findings(instance: Instance, model: Model, hosts: int) -> list[Finding]:
    """E676 for an engine that has more to take than its way brings, or would be brought too much.

    SGLang reads files for all that it holds, a draft model that is to stay as it is included.
    """
    options = instance.engine_plan.sglang
    if options is None:
        return []
    way, said = options.updates or options.way(hosts), options.speculative
    more = [] if model.lora is None else ["adapters (lora=)"]
    more += [f"drafter {instance.drafter!r}"] if instance.engine_plan.has_drafter else []
    got = f"updates={options.updates!r}, {hosts} {'host' if hosts == 1 else 'hosts'}"
    if way != "memory" and more:
        return [
            Finding(
                code="E676",
                what=f"{' and '.join(more)} cannot reach {instance.name} by {way}",
                where=model.where,
                got=got,
                expected='updates="memory", and a replica on one host',
                fix='rf.SGLang(updates="memory")' if hosts == 1 else "a tp= that fits on a host",
            )
        ]
    if way == "disk" and said is not None and said.algorithm != "NGRAM":
        return [
            Finding(
                code="E676",
                what=f"what {instance.name} drafts with would not stay as it is: SGLang reads "
                "the policy's files for it too",
                where=model.where,
                got=got,
                expected='updates="memory", or "group"',
                fix=f'rf.SGLang(updates="{"memory" if hosts == 1 else "group"}")',
            )
        ]
    return []


def _hosts(instance: Instance, cluster: Cluster) -> list[int]:
    """On how many hosts each replica is."""
    replicas = host_parts(instance, cluster.host_of)
    return [num_hosts(parts, cluster.host_of) for parts in replicas]


def num_hosts_of(instance: Instance, cluster: Cluster) -> int:
    """On how many hosts the replica lies that spans the most."""
    return max(_hosts(instance, cluster))


def hosts_of_devices(instance: Instance, cluster: Cluster) -> dict[int, int]:
    """On how many hosts the replica of each device lies, by device."""
    replicas = zip(instance.row_groups, _hosts(instance, cluster), strict=True)
    return {device: count for replica, count in replicas for device in replica}


def told_way(instance: Instance, cluster: Cluster) -> str:
    """How weights reach an engine from its host's memory, and on how many hosts it lies."""
    counts, options = _hosts(instance, cluster), instance.engine_plan.sglang
    where = _told_hosts(instance, cluster)
    if options is None:
        return where
    way = options.way(max(counts))
    if way == "group":
        few = options.way(min(counts)) != way
        return f"{where}, and a broadcast from it" + " where there are several" * few
    if way == "disk":
        return f"{where}, and a file in {options.updates_dir or 'a temporary directory'}"
    return where


def _told_hosts(instance: Instance, cluster: Cluster) -> str:
    """On how many hosts replicas are, where any is on several; and in how many parts, if more."""
    counts = _hosts(instance, cluster)
    parts = max(len(replica) for replica in host_parts(instance, cluster.host_of))
    most = max(counts)
    if most == 1:
        return ""
    hosts = f"{most} hosts" + f" in {parts} parts" * (parts > most)
    if min(counts) < most:
        return f", each on up to {hosts}"
    return f", each on {hosts}" if instance.row_parts > 1 else f", on {hosts}"
