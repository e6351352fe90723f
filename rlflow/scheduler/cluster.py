"""Devices: how many, of which kind, with how much memory and how many threads.

`cpu:4`, `h100:8`, `cpu:2@4GB`. Kinds of accelerators come from a table of their data
sheets; a CPU device is a slot of threads with a share of this machine's memory.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from rlflow.errors import Finding, UsageError, near_names

GB = 1e9
SPEC = re.compile(r"(?P<kind>[a-z0-9]+):(?P<count>\d+)(?:@(?P<memory>[\d.]+)(?P<unit>[MG]B))?")
UNITS = {"MB": 1e6, "GB": 1e9}
CPU_MEMORY_SHARE = 0.8
GPUS_PER_HOST = 8
HOST = -1
HOST_MEMORY = 2e12


def amount(size: float) -> str:
    """Bytes as they are printed: `12.3 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of device: memory (bytes), dense bf16 flop/s, memory and link bandwidth (B/s)."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    source: str


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="a100",
            memory=80 * GB,
            flops=312e12,
            bandwidth=2.04e12,
            link=3e11,
            source="NVIDIA A100 80GB SXM data sheet",
        ),
        Kind(
            name="h100",
            memory=80 * GB,
            flops=989e12,
            bandwidth=3.35e12,
            link=4.5e11,
            source="NVIDIA H100 SXM data sheet",
        ),
        Kind(
            name="h200",
            memory=141 * GB,
            flops=989e12,
            bandwidth=4.8e12,
            link=4.5e11,
            source="NVIDIA H200 SXM data sheet",
        ),
        Kind(
            name="b200",
            memory=180 * GB,
            flops=2250e12,
            bandwidth=7.7e12,
            link=9e11,
            source="NVIDIA HGX B200 data sheet",
        ),
    )
}
CPU_FLOPS_PER_THREAD = 98e9
CPU_BANDWIDTH = 20e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`count` equal devices of one kind; `threads` per device where the kind is `cpu`.

    `cores` is how many cores CPU devices share that are more than the cores, 0 otherwise.
    """

    kind: Kind
    count: int
    threads: int = 1
    hosts: int = 1
    cores: int = 0

    @property
    def host_memory(self) -> float:
        """Bytes of one host's memory that no CPU device has; of accelerators' hosts by the table."""
        if self.is_cpu:
            return max(machine_memory() - self.count * self.kind.memory, 0.0)
        return HOST_MEMORY

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are slots of threads of this machine."""
        return self.kind.name == "cpu"

    def budgets(self) -> dict[int, int]:
        """Bytes of memory of every device, and under -1 those of one host for what sleeps there."""
        each = int(self.kind.memory)
        devices = dict.fromkeys(range(self.count), each)
        return {HOST: int(self.host_memory), **devices}

    def describe(self) -> str:
        """The printed form: kind, count, memory each, threads each."""
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}" if self.is_cpu else ""
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        return f"{self.kind.name}:{self.count} ({amount(self.kind.memory)}{threads} each{hosts})"


def machine_memory() -> float:
    """Bytes of memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def machine_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_cluster(count: int, threads: int | None = None, memory: float | None = None) -> Cluster:
    """`count` CPU devices with an even share of the cores and the memory, unless said."""
    each = threads if threads is not None else max(1, machine_cores() // count)
    share = memory if memory is not None else CPU_MEMORY_SHARE * machine_memory() / count
    kind = Kind(
        name="cpu",
        memory=share,
        flops=CPU_FLOPS_PER_THREAD * each,
        bandwidth=CPU_BANDWIDTH,
        link=CPU_BANDWIDTH,
        source="float32 matrix product measured on one core of an AMD EPYC",
    )
    return Cluster(kind=kind, count=count, threads=each)


def parse_cluster(text: str | None, needed: int, threads: int | None = None) -> Cluster:
    """The cluster that `--devices` names; without it, CPU devices, as many as are needed.

    More CPU devices than this machine has cores share the cores, one thread each. Accelerators
    are taken to be eight to a host. Raises UsageError for a spelling or kind that is not known.
    """
    if text is None:
        return _sharing_cores(cpu_cluster(needed, threads))
    match = SPEC.fullmatch(text)
    if match is None:
        raise UsageError(
            Finding(
                code="E202",
                what=f"--devices {text!r} is not a cluster",
                expected="kind:count or kind:count@memory",
                fix="--devices cpu:2@4GB",
            )
        )
    kind, count = match["kind"], int(match["count"])
    memory = float(match["memory"]) * UNITS[match["unit"]] if match["memory"] else None
    if count < 1:
        raise UsageError(Finding(code="E202", what=f"--devices {text!r} has no device"))
    if kind == "cpu":
        return _sharing_cores(cpu_cluster(count, threads, memory))
    if kind not in KINDS:
        raise UsageError(
            Finding(
                code="E202",
                what=f"--devices {text!r}: no device kind {kind!r} is known",
                expected=", ".join(["cpu", *KINDS]),
                near=near_names(kind, ["cpu", *KINDS]),
            )
        )
    known = KINDS[kind]
    if memory is not None:
        known = Kind(
            name=kind,
            memory=memory,
            flops=known.flops,
            bandwidth=known.bandwidth,
            link=known.link,
            source=known.source,
        )
    return Cluster(kind=known, count=count, hosts=-(-count // GPUS_PER_HOST))


def _sharing_cores(cluster: Cluster) -> Cluster:
    cores = machine_cores()
    return replace(cluster, cores=cores) if cluster.count > cores else cluster
