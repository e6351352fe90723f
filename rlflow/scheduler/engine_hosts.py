"""Engines whose ranks lie on several hosts, and how weights reach an engine.

Knows devices, hosts and options; no order, and no sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlflow.errors import Finding
from rlflow.graph.engines import SGLang
from rlflow.graph.graph import Graph
from rlflow.scheduler.cluster import Cluster
from rlflow.scheduler.plan import Instance


def shares(instance: Instance, cluster: Cluster) -> list[tuple[int, ...]]:
    """For every replica how many of its ranks each of its hosts has, host by host."""
    found = []
    for first in range(0, len(instance.devices), instance.tp):
        replica = instance.devices[first : first + instance.tp]
        hosts = Counter(cluster.host_of(device) for device in replica)
        found.append(tuple(hosts[host] for host in sorted(hosts)))
    return found


def num_hosts(instance: Instance, cluster: Cluster) -> int:
    """On how many hosts a replica lies, at the most."""
    return max(len(each) for each in shares(instance, cluster))


def host_findings(instances: Iterable[Instance], cluster: Cluster) -> list[Finding]:
    """A finding for every engine whose replicas cannot lie on the hosts that they lie on."""
    findings: list[Finding] = []
    for instance in instances:
        if instance.options is not None:
            hosts = num_hosts(instance, cluster)
            found = instance.options.host_findings(instance.name, hosts)
            findings += found or uneven(instance.name, shares(instance, cluster))
    return findings


def uneven(name: str, replicas: Iterable[tuple[int, ...]]) -> list[Finding]:
    """A finding where hosts have unequal shares of a replica's ranks."""
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


def way_findings(graph: Graph, instances: Iterable[Instance], cluster: Cluster) -> list[Finding]:
    """E676 for every engine that has more to take than files or broadcasts bring."""
    findings = []
    for instance in instances:
        options = instance.options
        if not isinstance(options, SGLang):
            continue
        way = options.way(num_hosts(instance, cluster))
        model = graph.model(instance.model)
        more = [] if model.lora is None else ["adapters (lora=)"]
        more += [] if instance.drafter is None else [f"drafter {instance.drafter!r}"]
        if way != "memory" and more:
            findings.append(
                Finding(
                    code="E676",
                    what=f"{' and '.join(more)} cannot reach {instance.name} by {way}",
                    where=model.where,
                    got=f"updates={options.updates!r}, {num_hosts(instance, cluster)} hosts",
                    expected='updates="memory", and a replica on one host',
                    fix='rf.SGLang(updates="memory")',
                )
            )
    return findings


def told_way(instance: Instance, cluster: Cluster) -> str:
    """How weights reach an engine from its host's memory, and on how many hosts it lies."""
    hosts, options = num_hosts(instance, cluster), instance.options
    where = f", each on {hosts} hosts" if instance.row_parts > 1 else f", on {hosts} hosts"
    where = where if hosts > 1 else ""
    if not isinstance(options, SGLang):
        return where
    way = options.way(hosts)
    if way == "group":
        return f"{where}, and a broadcast from it"
    if way == "disk":
        return f"{where}, and a file in {options.updates_dir or 'a temporary directory'}"
    return where
