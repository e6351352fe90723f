"""What a plan says of engines in processes of their own: how many, how large, what is assumed.

Sentences for its notes. Knows no order, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlflow.graph.graph import Node
from rlflow.graph.roles import SamplingOptions
from rlflow.scheduler.costs.drafting import frozen_files
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.serving import pool_record
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.engines.engines import (
    GRAPHS,
    POOL,
    asleep_holds,
    asleep_record,
    kept_asleep,
    on_cpu,
    row_parts_over,
    start_key,
)
from rlflow.scheduler.engines.updates import takes_buckets
from rlflow.scheduler.plan.hosts import told_way
from rlflow.scheduler.plan.plan import Instance, Plan
from rlflow.scheduler.plan.text import duration


def noting_engines(plan: Plan, served: Mapping[str, Sequence[Node]], costs: Costs) -> Plan:
    """The plan with what engines are, and which samples cannot be drawn again."""
    for instance in plan.engines:
        nodes = served[instance.name]
        plan = plan.noting("engine", _told(instance, plan, nodes, costs))
        said = instance.engine_plan.speculative
        if said is not None and said.draft_model is not None and not frozen_files(instance):
            plan = plan.noting(
                "unknown size",
                f"{instance.name}: the files of {said.draft_model}, which drafts in it, are not on "
                "this machine; neither its weights nor its keys and values are counted",
            )
        drawn = [
            n.name for n in nodes if (n.role(SamplingOptions) or SamplingOptions()).temperature
        ]
        names = " and ".join(drawn)
        if drawn and (
            why := instance.engine_plan.settings.unseeded(on_cpu=on_cpu(instance, costs))
        ):
            plan = plan.noting("seeds", f"sampling of {names} is not replayable{why}")
    return plan


def _told(instance: Instance, plan: Plan, nodes: Sequence[Node], costs: Costs) -> str:
    """How many processes, how large a pool for which rows, and where weights are on their way."""
    options = instance.engine_plan.settings
    part = plan.part(instance.pool_part)
    size = dict(part.holds).get(POOL, part.size)
    tokens = options.max_total_tokens
    held = (
        ", whose linear layers are float8 in blocks of 128 x 128" * instance.engine_plan.in_float8
    )
    many = "a process of its own"
    if instance.row_parts > 1:
        many = f"{instance.row_parts} processes of its own, one for each replica"
    pool = "a pool of unknown size" if size is None else f"a pool of {amount(size)}"
    pool += f" for {tokens} tokens" if tokens is not None else ""
    known = pool_record(instance, costs)
    pool += f" ({known.source_for(costs.setting)})" if known is not None else ""
    room = [f"{amount(held)} of {name}" for name, held in part.holds if name != POOL]
    pool += f", beside it {' and '.join(room)}" if room else ""
    pool += f", and {instance.drafter} drafts in it" if instance.engine_plan.has_drafter else ""
    pool += _told_frozen(instance)
    weights = costs.weights(replace(instance, tp=1, devices=instance.devices[:1]))
    staged = "" if weights is None else f" of {amount(weights)}"
    lent = takes_buckets(instance, costs)
    beside = "buckets on its devices, and where it wakes or was lost " * lent
    return (
        f"{instance.name} is {options.title} in {many}{held}, with {pool}"
        f"{_told_waiting(instance, nodes, costs)}; weights reach it through {beside}"
        f"a copy{staged} in its host's memory{told_way(instance, costs.cluster)}"
        f"{_told_asleep(instance, costs)}"
        f"{_told_start(instance, costs)}"
    )


def _told_frozen(instance: Instance) -> str:
    """Which draft model that stays as it is lies in it, where its files are here."""
    said, files = instance.engine_plan.speculative, frozen_files(instance)
    if said is None or not files:
        return ""
    size = amount(sum(file.stat().st_size for file in files))
    return f", and {said.draft_model} ({size}) drafts in it, whose keys and values are not counted"


def _told_start(instance: Instance, costs: Costs) -> str:
    """How long it takes to start, where an earlier run has measured that."""
    record = costs.cluster.measured.find(start_key(costs, instance), costs.setting)
    if record is None:
        return ""
    return f"; it starts in {duration(record.seconds)} ({record.source_for(costs.setting)})"


def _told_waiting(instance: Instance, nodes: Sequence[Node], costs: Costs) -> str:
    """Which rows wait, and for how many there is room at once; empty where none does."""
    shape, said = costs.shapes[instance.model], []
    if shape is None:
        return ""
    for node in nodes:
        load = costs.load(node, row_parts_over(instance, node))
        room = costs.roofline(instance, shape).at_once(load)
        if room < load.rows:
            said.append(f"{room:.0f} of {load.rows:.0f} rows of {node.name}")
    return f", {' and '.join(said)} at once" if said else ""


def _told_asleep(instance: Instance, costs: Costs) -> str:
    """What the process keeps while it sleeps, and how that is known."""
    record = asleep_record(instance, costs)
    if on_cpu(instance, costs):
        if record is None:
            return ""
        return (
            f", its processes hold {amount(record.held)} of it beside weights and pool "
            f"({record.source_for(costs.setting)})"
        )
    source = "assumed" if record is None else record.source_for(costs.setting)
    graphs = dict(asleep_holds(instance, costs)).get(GRAPHS)
    part = f", {amount(graphs)} of it {GRAPHS}" if graphs else ""
    kept = amount(kept_asleep(instance, costs))
    return f"; asleep it keeps {kept} of each device{part} ({source})"
