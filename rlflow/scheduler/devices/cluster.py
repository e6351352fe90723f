"""Devices: how many, of which kinds, on which hosts, with how many threads.

`cpu:4`, `h100:8`, `cpu:2@4GB`, `h100:8,a100:8`, or a file that declares them. Kinds of
accelerators come from a table of data sheets; a CPU device is a slot of threads with a share of
this machine's memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError, near_names
from rlflow.scheduler.devices.declared import (
    DeclaredDevices,
    is_device_file,
    measured_cpu,
    parse_bytes,
    parse_share,
    read_devices,
)
from rlflow.scheduler.devices.hardware import GB, KINDS, Kind, cpu_kind
from rlflow.scheduler.devices.machine import chosen_text, machine_flags, machine_gpus, usable
from rlflow.scheduler.devices.measured import NOTHING, MeasuredCosts, load_measured

__all__ = [
    "GB",
    "HOST",
    "KINDS",
    "Cluster",
    "Kind",
    "amount",
    "cpu_cluster",
    "machine_cores",
    "machine_memory",
    "mixed_pools",
    "parse_cluster",
]

SPEC = re.compile(
    r"(?P<kind>[a-z0-9]+):(?P<count>\d+)(?:@(?P<memory>\d+(?:\.\d+)?)(?P<unit>[MG]B))?"
)
UNITS = {"MB": 1e6, "GB": 1e9}
CPU_MEMORY_SHARE = 0.8
# Of a machine with GPUs, what sleeps may have; the rest is the system's and the processes'.
HOST_MEMORY_SHARE = 0.9
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
HOST = -1
MACHINE = "gpu"


def amount(size: float) -> str:
    """Bytes as they are printed: `12.3 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def distinct_amounts(one: float, other: float) -> tuple[str, str]:
    """Two sizes as they are printed, with as many digits as tell them apart: `36.51`, `36.48`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if max(one, other) >= scale:
            for digits in range(1, 10):
                texts = f"{one / scale:.{digits}f} {unit}", f"{other / scale:.{digits}f} {unit}"
                if texts[0] != texts[1] or one == other:
                    return texts
    return f"{one:.0f} B", f"{other:.0f} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`count` devices, numbered from 0, with `threads` of the host each.

    All are of `kind`, unless `groups` has the kinds in the order of the devices and how many
    there are of each; then `kind` is that of device 0. `cores` is how many cores CPU devices
    share that are more than the cores, 0 otherwise. `measured` is what earlier runs took on
    such devices.
    """

    kind: Kind
    count: int
    threads: int = 1
    hosts: int = 1
    cores: int = 0
    groups: tuple[tuple[Kind, int], ...] = ()
    measured: MeasuredCosts = field(default=NOTHING, compare=False, repr=False)

    @property
    def kinds(self) -> tuple[tuple[Kind, int], ...]:
        """The kinds in the order of the devices, and how many there are of each."""
        return self.groups or ((self.kind, self.count),)

    def kind_of(self, device: int) -> Kind:
        """The kind of a device; of the host, that of device 0."""
        if not self.groups and device < self.count:
            return self.kind
        first = 0
        for kind, count in self.kinds:
            first += count
            if device < first:
                return kind
        raise IndexError(f"device {device} of {self.count}")

    def host_of(self, device: int) -> int:
        """The host that a device is in: so many as its kind has each, or evenly over `hosts`."""
        if not self.groups:
            return device // -(-self.count // self.hosts)
        host = 0
        for kind, count in self.groups:
            if device < count:
                return host + device // kind.per_host
            device -= count
            host += _hosts(kind, count)
        raise IndexError(f"a device beyond the {self.count} there are")

    def link_domain(self, device: int) -> tuple[str, int, int]:
        """What the links of a device join: equal for two devices where links are between them."""
        first = 0
        for number, (kind, count) in enumerate(self.kinds):
            if kind.linked and device < first + count:
                return "links", number, (device - first) // kind.linked
            first += count
        return "host", self.host_of(device), 0

    @property
    def host_starts(self) -> tuple[int, ...]:
        """The first device of every host, where hosts do not share the devices evenly."""
        if not self.groups:
            return ()
        hosts = [self.host_of(device) for device in range(self.count)]
        return tuple(hosts.index(host) for host in range(self.hosts))

    @property
    def host_memory(self) -> float:
        """Bytes of one host's memory that no CPU device has; the least where hosts differ."""
        return min(kind.host_memory for kind, _ in self.kinds)

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are slots of threads of this machine."""
        return all(kind.name == "cpu" for kind, _ in self.kinds)

    def budgets(self) -> dict[int, int]:
        """Bytes of memory of every device, and under -1 those of one host for what sleeps there."""
        kinds = map(self.kind_of, range(self.count))
        devices = {device: int(kind.usable_memory) for device, kind in enumerate(kinds)}
        return {HOST: int(self.host_memory), **devices}

    def with_kinds(self, **figures: Any) -> Cluster:
        """The cluster with figures of all its kinds said anew."""
        groups = tuple((replace(kind, **figures), count) for kind, count in self.groups)
        return replace(self, kind=replace(self.kind, **figures), groups=groups)

    def enlarged(self, count: int) -> Cluster | None:
        """So many devices at least, where more of the kind may be had: not of CPUs, nor mixed."""
        if count <= self.count:
            return self
        if self.is_cpu or self.groups:
            return None
        return replace(self, count=count, hosts=max(self.hosts, _hosts(self.kind, count)))

    def describe(self) -> str:
        """The printed form: kinds, counts, memory each, threads each."""
        threads = f", {self.threads} thread{'s' if self.threads > 1 else ''}"
        if not self.is_cpu and self.threads == 1:
            threads = ""
        hosts = f", {self.hosts} hosts" if self.hosts > 1 else ""
        if not self.groups:
            return f"{self.kind.name}:{self.count} ({_memory(self.kind)}{threads} each{hosts})"
        named = ",".join(f"{kind.name}:{count}" for kind, count in self.groups)
        each = ", ".join(f"{_memory(kind)} {kind.name}" for kind, _ in self.groups)
        return f"{named} ({each}{threads and f'{threads} each'}{hosts})"


def _memory(kind: Kind) -> str:
    """What plans may use of a device's memory, and of how much where that is less."""
    used, there = amount(kind.usable_memory), amount(kind.memory)
    return used if not kind.reserve else f"{used} of {there}"


def _hosts(kind: Kind, count: int) -> int:
    """Hosts that so many devices of a kind take."""
    return -(-count // kind.per_host)


def machine_memory() -> float:
    """Bytes of memory that this process may use: of the machine, or of its control group."""
    there = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return there
    return min(there, float(limit)) if limit.isdigit() else there


def machine_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cores(declared: DeclaredDevices | None) -> int:
    """Cores of the machine that CPU devices are of: this one's, or what a file says."""
    return declared.cores if declared is not None and declared.cores else machine_cores()


def cpu_cluster(
    count: int,
    threads: int | None = None,
    memory: float | None = None,
    declared: DeclaredDevices | None = None,
) -> Cluster:
    """`count` CPU devices with an even share of the cores and the memory, unless said.

    What a file has `declared` of CPU devices stands for what is known of this machine.
    """
    each = threads if threads is not None else max(1, _cores(declared) // count)
    share = memory if memory is not None else CPU_MEMORY_SHARE * machine_memory() / count
    left = max(machine_memory() - count * share, 0.0)
    kind = cpu_kind(share, each, left, machine_flags())
    if declared is not None and declared.cpu is not None:
        kind = measured_cpu(kind, declared.cpu, each)
    return Cluster(kind=kind, count=count, threads=each)


def parse_cluster(
    text: str | None,
    needed: int,
    threads: int | None = None,
    host_memory: str | None = None,
    reserve: str | None = None,
) -> Cluster:
    """The cluster that `--devices` names; without it, devices of this machine, as many as needed.

    Those are its GPUs, if they are of a kind that is known, else CPU devices; `gpu:8` are eight of
    the machine's kind; a text that ends in `.toml` is a file that declares devices and kinds.

    Kinds are separated by commas, devices numbered in the order written. More CPU devices than
    there are cores share the cores, one thread each. Accelerators are as many to a host as in the
    server of their kind. A host's memory is what `host_memory` or the file says, this machine's
    where its GPUs are of the kind, else that of the server. `reserve` is the share of every
    accelerator's memory that plans leave, that of its kind if left out, nothing of a memory that
    is written after @. Comes with what earlier runs
    measured. Raises UsageError for a spelling, kind or file that is not understood.
    """
    said = None if host_memory is None else parse_bytes(host_memory, "--host-memory")
    declared = None
    if text is not None and is_device_file(text):
        declared = read_devices(Path(text))
        text, said = declared.devices, said if said is not None else declared.host_memory
    own = usable(machine_gpus()) if text is None else None
    if own is not None:
        kind, there = own
        count = min(needed, there)
        found = Cluster(kind=kind, count=count, hosts=_hosts(kind, count), threads=threads or 1)
    elif text is None:
        found = cpu_cluster(needed, threads)
    else:
        kinds = KINDS if declared is None else {**KINDS, **declared.kinds}
        parts = [_parsed(part, text, kinds) for part in text.split(",")]
        found = _joined(text, parts, threads, kinds, declared)
    cores = _cores(declared)
    if found.is_cpu and found.count > cores:
        found = replace(found, cores=cores)
    share = None if reserve is None else parse_share(reserve, "--reserve")
    if share is not None and not found.is_cpu:
        found = found.with_kinds(reserve=share)
    return replace(_with_host_memory(found, said), measured=load_measured())


def _with_host_memory(cluster: Cluster, said: float | None) -> Cluster:
    """The cluster with its hosts' memory: as said, or this machine's where it has the GPUs."""
    if said is None and not cluster.is_cpu:
        own = usable(machine_gpus())
        chips = {kind.chip for kind, _ in cluster.kinds}
        if own is not None and chips == {own[0].chip}:
            said = HOST_MEMORY_SHARE * machine_memory()
    if said is None:
        return cluster
    return cluster.with_kinds(host_memory=said)


def _joined(
    text: str,
    parts: list[tuple[str, int, float | None]],
    threads: int | None,
    kinds: Mapping[str, Kind],
    declared: DeclaredDevices | None,
) -> Cluster:
    """The devices of all parts, in their order; CPU devices only where they are alone."""
    if len(parts) == 1:
        name, count, memory = parts[0]
        if name == "cpu":
            return cpu_cluster(count, threads, memory, declared)
        kind = _kind(name, memory, kinds)
        return Cluster(kind=kind, count=count, hosts=_hosts(kind, count), threads=threads or 1)
    if any(name == "cpu" for name, _, _ in parts):
        raise UsageError(
            Finding(
                code="E202",
                what=f"--devices {text!r} has accelerators and CPU devices",
                expected="kinds of accelerators; ops without a model run on the host",
                fix="--devices h100:8,a100:8",
            )
        )
    groups = tuple((_kind(name, memory, kinds), count) for name, count, memory in parts)
    return Cluster(
        kind=groups[0][0],
        count=sum(count for _, count in groups),
        hosts=sum(_hosts(kind, count) for kind, count in groups),
        threads=threads or 1,
        groups=groups,
    )


def _kind(name: str, memory: float | None, kinds: Mapping[str, Kind]) -> Kind:
    if name == MACHINE:
        own = usable(machine_gpus())
        if own is None:
            raise UsageError(
                Finding(
                    code="E251",
                    what="--devices gpu:COUNT takes the kind of this machine's GPUs",
                    got=chosen_text(machine_gpus()),
                    expected=f"a kind: {', '.join(['cpu', *KINDS])}",
                    fix="--devices h100:8",
                )
            )
        kind = own[0]
    else:
        kind = kinds[name]
    return kind if memory is None else replace(kind, memory=memory, reserve=0.0)


def _parsed(part: str, text: str, kinds: Mapping[str, Kind]) -> tuple[str, int, float | None]:
    """Kind, count and memory of one part of `--devices`."""
    match = SPEC.fullmatch(part)
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
    if count < 1:
        raise UsageError(Finding(code="E202", what=f"--devices {text!r} has no device"))
    if kind not in ("cpu", MACHINE) and kind not in kinds:
        raise UsageError(
            Finding(
                code="E202",
                what=f"--devices {text!r}: no device kind {kind!r} is known",
                expected=", ".join(["cpu", *kinds]),
                near=near_names(kind, ["cpu", *kinds]),
            )
        )
    return kind, count, float(match["memory"]) * UNITS[match["unit"]] if match["memory"] else None


def mixed_pools(pools: Mapping[str, tuple[int, ...]], cluster: Cluster) -> list[Finding]:
    """A finding for every pool whose devices are of several kinds: its slowest would set the pace.

    Pools that reach beyond the cluster are somebody else's to refuse.
    """
    findings = []
    for pool, devices in pools.items():
        if max(devices) >= cluster.count:
            continue
        kinds: dict[str, list[int]] = {}
        for device in devices:
            kinds.setdefault(cluster.kind_of(device).name, []).append(device)
        if len(kinds) < 2:
            continue
        listed = ", ".join(f"{name} {numbers}" for name, numbers in kinds.items())
        largest = max(kinds.values(), key=len)
        findings.append(
            Finding(
                code="E223",
                what=f"pool {pool!r} has devices of several kinds",
                got=f"{listed} of {cluster.describe()}",
                expected="a pool's devices work in step, so they are of one kind",
                fix=f'"{pool}": {largest}',
            )
        )
    return findings
