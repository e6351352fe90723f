"""Which ranks of an engine's replicas are on which host, from where every rank says it is.

Pure; knows neither processes nor how they tell each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.errors import PlanError
from rlflow.graph.model import Model
from rlflow.scheduler.plan.hosts import Devices, host_findings, host_parts
from rlflow.scheduler.plan.plan import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a rank is: its host's address, and the number of its accelerator there."""

    address: str
    number: int


def replica_hosts(
    instance: Instance, model: Model, sites: Mapping[int, Site]
) -> list[list[Devices]]:
    """For every replica of an engine its devices by host, hosts in the order of their devices.

    Raises PlanError where an engine cannot lie so: what a plan is refused for with its
    cluster's hosts, for those that the run has.
    """

    def host_of(device: int) -> str:
        return sites[device].address

    findings = host_findings(instance, model, host_of)
    if findings:
        raise PlanError(*findings)
    return host_parts(instance, host_of)
