"""What a plan needs of each host: devices, cores, memory. Knows no way to ask for them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rlflow.cli.commands import Planned
from rlflow.scheduler.devices.cluster import HOST, amount
from rlflow.scheduler.devices.hardware import CPU_PROCESS
from rlflow.scheduler.plan.text import counted

# Beside the ranks of a host: the controller, and the process of functions without a model.
OTHER_PROCESSES = 2
# Of a host's memory, what Ray keeps rows in; the same share as of a cluster of the run's own.
STORE_SHARE = 0.2
GIB = 2**30
LEAST_GRACE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """What each of `hosts` equal hosts gives: `devices` of `kind`, of which `gpus` are GPUs.

    `planned` are the bytes that the plan counts on the host, `processes` those of so many
    processes beside it, `memory` the two with Ray's share, or as it was said. `fair` is the share
    of a server's memory that its GPUs have a claim to, 0 without GPUs or where memory was said;
    `whole` is true where they are all that the server has. A stop takes `grace` seconds.
    """

    hosts: int
    devices: int
    kind: str
    gpus: int
    cores: int
    threads: int
    planned: int
    processes: int
    memory: int
    fair: int
    whole: bool
    grace: int

    @property
    def gibibytes(self) -> int:
        """The memory in GiB, rounded up."""
        return math.ceil(self.memory / GIB)

    @property
    def most_gibibytes(self) -> int:
        """The memory in GiB where no more may be taken than is asked for: the fair share too."""
        return math.ceil(max(self.memory, self.fair) / GIB)

    @property
    def store(self) -> int:
        """Bytes of Ray's object store."""
        return int(max(self.memory, self.fair) * STORE_SHARE)

    @property
    def told(self) -> str:
        """What the plan counts; a plan of models whose files are not here counts nothing."""
        return amount(self.planned) if self.planned else "nothing"

    def lines(self) -> list[str]:
        """Where the numbers come from, in sentences."""
        each = " each" if self.hosts > 1 else ""
        devices = counted(self.devices, f"{self.kind} device")
        return [
            f"{counted(self.hosts, 'host')} of {devices}{each}",
            f"{self.cores} cores a host: {self.threads} a device, {OTHER_PROCESSES} for the "
            "controller and functions without a model",
            f"{amount(self.memory)} of memory a host: {self.told} that the plan counts, "
            f"{amount(self.processes)} for processes, a fifth of all for Ray's objects",
            *([f"{amount(self.fair)} is the share of its server"] if self.fair else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """As plain data; memory in bytes."""
        return asdict(self)


def host_need(planned: Planned, hosts: int, memory: float | None) -> HostNeed:
    """What a plan needs of each of so many hosts; `memory` in bytes if said, else as it counts."""
    plan, cluster = planned.compiled.plan, planned.cluster
    used = max(max(devices) for devices in plan.pools.values()) + 1
    each = -(-used // hosts)
    hosts = -(-used // each)
    on_devices = [
        sum(plan.peaks.get(d, 0) for d in range(host * each, min(used, (host + 1) * each)))
        for host in range(hosts)
    ]
    counted_here = plan.peaks.get(HOST, 0) + (max(on_devices) if cluster.is_cpu else 0)
    engines = len({d for i in plan.engines for group in i.row_groups for d in group if d < each})
    processes = int((each + OTHER_PROCESSES + engines) * CPU_PROCESS)
    server = cluster.host_memory * each / cluster.kind.per_host
    latency = plan.timing.latency if plan.timing is not None else 0.0
    return HostNeed(
        hosts=hosts,
        devices=each,
        kind=cluster.kind.name,
        gpus=0 if cluster.is_cpu else each,
        cores=each * cluster.threads + OTHER_PROCESSES,
        threads=cluster.threads,
        planned=counted_here,
        processes=processes,
        memory=int(memory or (counted_here + processes) / (1 - STORE_SHARE)),
        fair=0 if cluster.is_cpu or memory else int(server),
        whole=memory is None and not cluster.is_cpu and each == cluster.kind.per_host,
        # Two iterations as the plan estimates them, and a minute to save.
        grace=max(LEAST_GRACE, math.ceil(2 * latency) + 60),
    )
