"""Which ranks of an engine's replicas are on which host, from where every rank says it is.

Pure; knows neither processes nor how they tell each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from rlflow.errors import PlanError
from rlflow.scheduler.engine_hosts import uneven
from rlflow.scheduler.plan import Instance

Devices = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a rank is: its host's address, and the number of its accelerator there."""

    address: str
    number: int


def replica_hosts(instance: Instance, sites: Mapping[int, Site]) -> list[list[Devices]]:
    """For every replica of an engine its devices by host, hosts in the order of their devices.

    Raises PlanError where an engine cannot lie so: the findings of its options, or E674 where
    hosts have unequal shares of a replica.
    """
    assert instance.options is not None
    found = []
    for first in range(0, len(instance.devices), instance.tp):
        replica = instance.devices[first : first + instance.tp]
        parts = [tuple(p) for _, p in groupby(replica, key=lambda device: sites[device].address)]
        findings = instance.options.host_findings(instance.name, len(parts))
        findings = findings or uneven(instance.name, [tuple(map(len, parts))])
        if findings:
            raise PlanError(*findings)
        found.append(parts)
    return found
