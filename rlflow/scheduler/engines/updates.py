"""Seconds that new weights take to an engine on accelerators, stage by stage, and the longest one.

Where weights go through the staging in host memory each stage waits for the one before: what the
engine's worker lacks comes by gloo, what it has from its own device, the engine's process copies
the staging, and every rank loads its part. Rates say where they are from. Decides nothing, and
knows no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.scheduler.costs.estimate import TABLE, Costs
from rlflow.scheduler.costs.pieces import as_measured
from rlflow.scheduler.devices.hardware import CPU_COLLECTIVES
from rlflow.scheduler.engines.engines import (
    ASSUMED,
    CALL,
    CALLS,
    brought,
    loaded_bytes,
    move_key,
    moving,
    on_cpu,
)
from rlflow.scheduler.plan.hosts import num_hosts_of
from rlflow.scheduler.plan.plan import Cost, Instance, Transport
from rlflow.scheduler.plan.text import duration

# Gloo through TCP, of a rank: the rate of its collectives, which is measured on one host.
GLOO = CPU_COLLECTIVES
# One thread that copies memory on a server: assumed.
HOST_COPY = 10e9
# Between a GPU and memory that is not pinned, through the driver's own buffers: assumed.
PAGEABLE = 8e9
# A file on NVMe, written and synced by one process, and read from the page cache: assumed.
DISK_WRITE, DISK_READ = 2e9, 8e9
# What a server of an engine copies in one request.
REQUEST_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStages:
    """What an update does, each with its seconds; one after the other."""

    way: str
    each: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        """Seconds of the update."""
        return sum(seconds for _, seconds in self.each)

    def describe(self) -> str:
        """Which way the weights go, and what takes the longest of it."""
        name, longest = max(self.each, key=lambda stage: stage[1])
        return f"{self.way}; {name} takes {duration(longest)} of {duration(self.seconds)}"


def update_cost(
    cost: Cost,
    source: Instance,
    targets: Sequence[Instance],
    how: Transport | None,
    costs: Costs,
) -> tuple[Cost, str]:
    """The cost of a reshard, and which way weights go to engines on accelerators; else "".

    `cost` is that of the copies alone. Engines of several targets are filled side by side, and
    the slowest counts. Measured where an earlier run did the same.
    """
    engines = [target for target in targets if target.engine_plan.in_process]
    if not engines:
        return cost, ""
    first, what = engines[0], brought(cost.moved)
    if on_cpu(first, costs) or cost.seconds is None:
        return moving(cost, first, "reshard", what, costs), ""
    found = max(
        (staged_update(source, engine, costs) for engine in engines), key=lambda s: s.seconds
    )
    record = costs.cluster.measured.find(move_key(costs, first, "reshard", what), costs.setting)
    if record is not None:
        return as_measured(cost, record, costs.setting), found.way
    priced = replace(cost, seconds=found.seconds, source=f"{TABLE}; {ASSUMED}")
    return costs.with_dispatch(priced), found.describe()


def staged_update(source: Instance, engine: Instance, costs: Costs) -> UpdateStages:
    """What an update through the staging in host memory takes."""
    whole = loaded_bytes(replace(engine, tp=1, devices=engine.devices[:1]), costs)
    lacked = costs.resharded(source, engine, in_place=False) or 0
    kind = costs.cluster.kind_of(engine.devices[0])
    own = max(whole * len(engine.owners) - lacked, 0) / len(engine.owners)
    sent, got = lacked / len(source.devices), lacked / len(engine.owners)
    wire = GLOO
    if len({costs.cluster.host_of(d) for d in (*source.devices, *engine.devices)}) > 1:
        wire = min(GLOO, kind.nic * kind.reached)
    stages = [
        ("the gather by gloo", max(sent, got) / wire + sent / PAGEABLE),
        ("the copy from the device", own / (kind.host_link * kind.reached)),
        *_from_host(engine, whole, costs),
        ("asking the engine", CALL * (CALLS["reshard"] + whole / REQUEST_BYTES)),
    ]
    return UpdateStages(way="through a copy in host memory", each=tuple(stages))


def _from_host(engine: Instance, whole: int, costs: Costs) -> list[tuple[str, float]]:
    """From the staging to every rank, by memory, a file or a broadcast, as the options say."""
    options, hosts = engine.engine_plan.sglang, num_hosts_of(engine, costs.cluster)
    way = "memory" if options is None else options.way(hosts)
    part = whole / engine.tp
    if way == "disk":
        return [
            ("the file", whole / DISK_WRITE + whole / DISK_READ),
            ("the load", part / PAGEABLE),
        ]
    if way == "group":
        # A tree without a pipeline: each round sends everything once more.
        rounds = engine.tp.bit_length()
        return [
            ("the broadcast by gloo", rounds * whole / GLOO),
            ("the load", whole / PAGEABLE),
        ]
    return [("the copy of the staging", whole / HOST_COPY), ("the load", part / PAGEABLE)]
