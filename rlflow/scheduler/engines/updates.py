"""How new weights get to engines, and the seconds of it: stage by stage, with the longest one.

Where an engine opens buckets on its devices, they are gathered, broadcast and loaded side by side.
Where weights go through the staging in host memory most stages wait for the one before: what the
engine's worker lacks comes by gloo, what it has from its own device; then the engine's process
copies the staging while every rank loads its part. Rates say where they are from. Knows no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.scheduler.costs.estimate import TABLE, Costs
from rlflow.scheduler.costs.pieces import as_measured
from rlflow.scheduler.costs.ranks.rank_memory import Holds
from rlflow.scheduler.devices.collectives import as_shared, group_of
from rlflow.scheduler.devices.hardware import CPU_COLLECTIVES, Kind
from rlflow.scheduler.engines.engines import on_cpu
from rlflow.scheduler.engines.moving import (
    ASSUMED,
    CALL,
    CALLS,
    brought,
    loaded_bytes,
    move_key,
    moving,
)
from rlflow.scheduler.models.shapes import dtype_bytes
from rlflow.scheduler.plan.hosts import num_hosts_of
from rlflow.scheduler.plan.plan import LENT, UPDATE_BUCKET, Cost, Instance, Transport
from rlflow.scheduler.plan.text import duration

# Gloo through TCP, of a rank: the rate of its collectives, which is measured on one host.
GLOO = CPU_COLLECTIVES
# One thread that copies memory on a server: assumed.
HOST_COPY = 10e9
# Between a GPU and memory that is not pinned, through the driver's own buffers: assumed.
PAGEABLE = 8e9
# A file on NVMe, written and synced by one process, and read from the page cache: assumed.
DISK_WRITE, DISK_READ = 2e9, 8e9
# What an engine takes of buckets on its devices, and an update of any size: the line through what
# verl measures of 0.6B, 32B and 72B whose weights stay on their devices (0.61, 14.2 and 28.8 s by
# NCCL, "sharded delta weight sync", 2026). 30B in pieces that are joined first took 7 s (verl's
# checkpoint engine, slime), so it is the engine's Python that sets the rate, not its links.
LOADED, BEGIN = 5.5e9, 0.4
# Of the staging, in one request of an engine.
HOST_BUCKET = 256 << 20
# Bytes that quantising reads and writes in float32 for each byte that it saves: the weight and its
# copy, magnitudes, quotients, what is clamped, and the values; one kernel after the other.
PASSES = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStages:
    """What an update does, with its seconds: `each` in turn, then all that goes on `beside`."""

    way: str
    each: tuple[tuple[str, float], ...]
    beside: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the update."""
        return sum(seconds for _, seconds in self.each) + max(
            (s for _, s in self.beside), default=0
        )

    def describe(self) -> str:
        """Which way the weights go, and what takes the longest of it."""
        name, longest = max((*self.each, *self.beside), key=lambda stage: stage[1])
        return f"{self.way}; {name} takes {duration(longest)} of {duration(self.seconds)}"


def bucket_limit(at_once: bool) -> int:
    """Bytes of a bucket, of which ranks that gather at the same time have three."""
    return UPDATE_BUCKET // 2 if at_once else UPDATE_BUCKET


def takes_buckets(instance: Instance, costs: Costs) -> bool:
    """Whether an instance is an engine that opens memory of devices: as told, or on accelerators.

    SGLang and vLLM do, of whole models in which no other drafts.
    """
    options, model = instance.engine_plan.lendable, costs.graph.model(instance.model)
    if options is None or model.lora is not None or instance.engine_plan.has_drafter:
        return False
    unsaid = instance.engine_plan.in_float8 or not on_cpu(instance, costs)
    return options.updates == "device" or (options.updates is None and unsaid)


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
    if how in LENT:
        holds = bucket_holds(source, first, costs)
        cost = replace(cost, holds=holds, transient=sum(size for _, size in holds))
    if on_cpu(first, costs) or cost.seconds is None:
        return moving(cost, first, "reshard", what, costs), ""
    way = lent_update if how in LENT else staged_update
    found = max((way(source, engine, costs) for engine in engines), key=lambda s: s.seconds)
    record = costs.cluster.measured.find(move_key(costs, first, "reshard", what), costs.setting)
    if record is not None:
        return as_measured(cost, record, costs.setting), found.way
    priced = replace(cost, seconds=found.seconds, source=f"{TABLE}; {ASSUMED}")
    return costs.with_dispatch(priced), found.describe()


def least_update(engine: Instance, costs: Costs) -> float:
    """Seconds in which new weights come to an engine at least; 0 where runs have measured any.

    Of an engine on accelerators that loads buckets, of any source.
    """
    if costs.cluster.measured.records or on_cpu(engine, costs) or not takes_buckets(engine, costs):
        return 0.0
    whole = loaded_bytes(replace(engine, tp=1, devices=engine.devices[:1]), costs)
    return BEGIN + whole / LOADED


def gathers_at_once(source: Instance, costs: Costs) -> bool:
    """Whether each rank of a source gathers a bucket while others do: it is on several hosts."""
    return len({costs.cluster.host_of(device) for device in source.devices}) > 1


def bucket_holds(source: Instance, engine: Instance, costs: Costs) -> Holds:
    """What every device of both ends holds of an update: two buckets, one of the largest weight.

    Three of half as much where ranks gather them at the same time: a rank has one until its turn.
    And what a bucket is gathered into before it is quantised.
    """
    shape, model = costs.shapes[engine.model], costs.graph.model(engine.model)
    if shape is None:
        return ()
    size = dtype_bytes(model)
    whole, inside = shape.parameters * size, shape.hidden * shape.ffn * size
    largest = max(shape.hidden * shape.vocab * size, inside)
    at_once = gathers_at_once(source, costs)
    limit = bucket_limit(at_once)
    buckets = min(max(largest, limit), whole) + (1 + at_once) * min(limit, whole)
    if not engine.engine_plan.in_float8:
        return (("buckets", buckets),)
    return (("buckets", buckets), ("what is quantised", min(max(inside, limit), whole)))


def lent_update(source: Instance, engine: Instance, costs: Costs) -> UpdateStages:
    """What an update in buckets on the devices takes.

    Beside it the first rank's worker copies them to the host, for an engine that is lost. What is
    quantised is gathered in full, and its source reads and writes it on the way. A rank gathers a
    bucket, a share of it from each of the others: on one host one after the other, on several all
    at the same time. Then each bucket is broadcast by itself.
    """
    whole = loaded_bytes(replace(engine, tp=1, devices=engine.devices[:1]), costs)
    shape, low = costs.shapes[engine.model], engine.engine_plan.in_float8
    size = dtype_bytes(costs.graph.model(engine.model))
    gathered = whole if shape is None or not low else shape.parameters * size
    kind = costs.cluster.kind_of(engine.devices[0])
    everyone = sorted({*source.devices, *engine.devices})
    sources, all_ranks = (group_of(costs.cluster, d) for d in (source.devices, everyone))
    at_once = gathers_at_once(source, costs)
    owners = min(len(source.devices), -(-gathered // bucket_limit(at_once))) if at_once else 1
    count = max(1.0, gathered / bucket_limit(at_once))
    sent = sources.all_to_all(gathered / owners) + count * all_ranks.all_gather(whole / count)
    if low:
        passed = PASSES * (gathered - whole) / len(source.devices)
        sent += passed / (kind.bandwidth * kind.reached)
    return UpdateStages(
        way="no weight waits for the host",
        each=(("beginning and ending it", BEGIN),),
        beside=(
            ("the engine's load", whole / LOADED),
            ("gather, quantising and broadcast" if low else "gather and broadcast", sent),
            ("the copy for a lost engine", whole / (kind.host_link * kind.reached)),
        ),
    )


def staged_update(source: Instance, engine: Instance, costs: Costs) -> UpdateStages:
    """What an update through the staging in host memory takes."""
    whole = loaded_bytes(replace(engine, tp=1, devices=engine.devices[:1]), costs)
    lacked = costs.resharded(source, engine, in_place=False) or 0
    kind = as_shared(costs.cluster, engine.devices)
    own = max(whole * len(engine.owners) - lacked, 0) / len(engine.owners)
    sent, got = lacked / len(source.devices), lacked / len(engine.owners)
    wire, pageable = GLOO, _pageable(kind)
    if len({costs.cluster.host_of(d) for d in (*source.devices, *engine.devices)}) > 1:
        wire = min(GLOO, kind.nic * kind.reached)
    first = [
        ("the gather by gloo", max(sent, got) / wire + sent / pageable),
        ("the copy from the device", own / (kind.host_link * kind.reached)),
        ("asking the engine", CALL * (CALLS["reshard"] + whole / HOST_BUCKET)),
    ]
    then, together = _from_host(engine, whole, costs)
    each, beside = (first, then) if together else (first + then, [])
    way = "through a copy in host memory"
    return UpdateStages(way=way, each=tuple(each), beside=tuple(beside))


def _pageable(kind: Kind) -> float:
    """B/s between a device and memory that is not pinned, as measured or assumed."""
    return kind.curves.pageable(HOST_BUCKET) or PAGEABLE


def _repeated(engine: Instance, costs: Costs) -> int:
    """Bytes of an update that each rank loads beyond its share: keys and values of its head."""
    shape, model = costs.shapes[engine.model], costs.graph.model(engine.model)
    if shape is None or model.lora is not None:
        return 0
    return shape.repeated_keys(engine.tp) * dtype_bytes(model)


def _from_host(engine: Instance, whole: int, costs: Costs) -> tuple[list[tuple[str, float]], bool]:
    """From the staging to every rank, by memory, a file or a broadcast, as the options say.

    By memory buckets are copied and loaded side by side. A broadcast is received and loaded in one
    request of SGLang's, a file is read when all of it is there.
    """
    pageable = _pageable(costs.cluster.kind_of(engine.devices[0]))
    options, hosts = engine.engine_plan.sglang, num_hosts_of(engine, costs.cluster)
    way = "memory" if options is None else options.way(hosts)
    part = whole / engine.tp + _repeated(engine, costs)
    if way == "disk":
        file = ("the file", whole / DISK_WRITE + whole / DISK_READ)
        return [file, ("the load", part / pageable)], False
    if way == "group":
        # A tree without a pipeline: each round sends everything once more.
        rounds = engine.tp.bit_length()
        sent = ("the broadcast by gloo", rounds * whole / GLOO)
        return [sent, ("the load", whole / pageable)], False
    return [("the copy of the staging", whole / HOST_COPY), ("the load", part / pageable)], True
