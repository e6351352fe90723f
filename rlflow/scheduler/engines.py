"""Instances that are engines in processes of their own: what they may be, hold and cost.

An engine keeps keys and values in a pool that it takes as a whole, whose size is known before it
starts: as its options say, or for all rows of its rollouts at their longest. Knows sizes and
options; no order, and no other instance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.check import num_prompts
from rlflow.graph.engine_options import EngineOptions
from rlflow.graph.graph import Node
from rlflow.graph.placement import On
from rlflow.scheduler import keys
from rlflow.scheduler.cluster import amount
from rlflow.scheduler.costs import Costs
from rlflow.scheduler.engine_hosts import num_hosts, told_way
from rlflow.scheduler.measured import Record
from rlflow.scheduler.pieces import as_measured
from rlflow.scheduler.plan import Action, Cost, Instance, Part, Plan

ROOM = 0.9
CALL = 0.02
CALLS = {"sleep": 1, "wake": 1, "reshard": 3}
ASSUMED = "assumed per call of an engine"
# The metric of a rollout: bytes that its engine kept of each device when it slept last.
ASLEEP = "asleep_bytes"


def use_findings(nodes: Sequence[Node], chosen: Mapping[str, On]) -> list[Finding]:
    """A finding for every assignment of an engine that reaches what is no rollout."""
    wrong: dict[On, list[Node]] = {}
    for node in nodes:
        where = chosen.get(node.name)
        if where is not None and where.options is not None and node.op.use != "rollout":
            wrong.setdefault(where, []).append(node)
    generate = {str(node.model) for node in nodes if node.op.use == "rollout"}
    return [_no_rollout(where, given, generate) for where, given in wrong.items()]


def _no_rollout(where: On, nodes: Sequence[Node], generate: Collection[str]) -> Finding:
    named = [f"{node.name} ({node.op.use or node.op.name})" for node in nodes]
    pool, engine = where.pool, where.options.engine if where.options else ""
    models = list(dict.fromkeys(str(node.model or node.name) for node in nodes))
    fixes = [f'"{name}": rf.on("{pool}")' for name in models]
    engines = [name for name in models if name in generate]
    fixes += [f'"{name}.rollout": rf.on("{pool}", engine="{engine}")' for name in engines]
    return Finding(
        code="E247",
        what=f"engine {engine!r} generates and does nothing else, and is placed for "
        f"{' and '.join(named)}",
        where=nodes[0].where,
        got=f'rf.on("{pool}", engine="{engine}") for more than rollouts',
        expected="an engine for rollouts alone",
        fix=", ".join(fixes),
    )


def option_findings(node: Node, where: On, costs: Costs) -> list[Finding]:
    """What is wrong with an engine for a node: layouts, and models, that it does not have."""
    if where.options is None:
        return []
    engine = where.options.engine
    said = {
        "fsdp": where.fsdp if where.fsdp not in (None, 1) else None,
        "recompute": where.recompute or None,
        "offload": where.offload,
        "weights": where.weights if where.weights == "shared" else None,
    }
    wrong = [f"{name}={value}" for name, value in said.items() if value is not None]
    if wrong:
        return [
            Finding(
                code="E248",
                what=f"{node.name}: engine {engine!r} has no {' and no '.join(wrong)}",
                where=node.where,
                expected="tp= ranks share each layer, devices left over hold replicas, and the "
                "weights are its own",
                fix=f'rf.on("{where.pool}", engine="{engine}", tp={where.tp or 1})',
            )
        ]
    model = costs.graph.model(str(node.model))
    reasons = {
        "a value head": model.head == "value",
        "adapters (lora=)": model.lora is not None,
        f"dtype {model.dtype}": model.dtype == "float64",
        f"drafter {node.drafter!r}": node.drafter is not None,
    }
    has = [reason for reason, holds in reasons.items() if holds]
    if not has:
        return []
    return [
        Finding(
            code="E249",
            what=f"{node.name}: engine {engine!r} runs no model with {' and '.join(has)}",
            where=model.where,
            got=f"model {model.name!r}",
            expected="a causal language model in float32 or bfloat16, trained as a whole",
            fix=f'"{model.name}.rollout": rf.on("{where.pool}")',
        )
    ]


def with_pool(instance: Instance, nodes: Sequence[Node], room: int, costs: Costs) -> Instance:
    """The engine with a pool of so many tokens as its options say, or as its rollouts need.

    What is derived leaves a part of `room` bytes free, and holds one row at the least.
    """
    options = instance.options
    shape = costs.shapes[instance.model]
    if options is None or shape is None or options.max_total_tokens is not None:
        return instance
    if options.mem_fraction_static is not None:
        return instance
    longest = max(sum(costs.tokens(node)) for node in nodes)
    wanted = max(_tokens(node, instance, costs) for node in nodes)
    each = costs.roofline(instance, shape).cache_bytes
    beside = (costs.weights(instance) or 0) + kept_asleep(instance, costs)
    beside += max(costs.held(node, instance, instance.row_parts) for node in nodes)
    fitting = int((ROOM * room - beside) / each)
    tokens = max(longest, min(wanted, fitting))
    return replace(instance, options=options.model_copy(update={"max_total_tokens": tokens}))


def _tokens(node: Node, instance: Instance, costs: Costs) -> int:
    """Tokens of all rows of a part at their longest and one more; of parts, of a group more."""
    parts = instance.row_parts if node.op.dispatched not in ("all", "first") else 1
    rows = costs.rows(node)
    group = math.ceil(rows / (num_prompts(costs.graph, node) or rows))
    most = rows if parts == 1 else math.ceil(rows / parts) + group
    return (most + 1) * sum(costs.tokens(node))


def pool_bytes(instance: Instance, costs: Costs) -> int | None:
    """Bytes of the pool on each device: of its tokens, or what a fraction of the memory leaves."""
    options, shape = instance.options, costs.shapes[instance.model]
    if options is None or shape is None:
        return None
    sizes = []
    if options.max_total_tokens is not None:
        sizes.append(options.max_total_tokens * costs.roofline(instance, shape).cache_bytes)
    if options.mem_fraction_static is not None:
        memory = min(costs.cluster.kind_of(device).memory for device in instance.devices)
        static = options.mem_fraction_static * memory
        sizes.append(max(static - (costs.weights(instance) or 0), 0))
    return int(min(sizes)) if sizes else None


def kept_asleep(instance: Instance, costs: Costs) -> int:
    """Bytes that an engine's process keeps on each device while it sleeps.

    As an earlier run has measured it, else assumed. On a CPU a device's memory is of tensors
    alone: the process is in its host's.
    """
    if _on_cpu(instance, costs):
        return 0
    record = asleep_record(instance, costs)
    if record is not None:
        return int(record.held)
    return int(max(costs.cluster.kind_of(device).engine for device in instance.devices))


def asleep_record(instance: Instance, costs: Costs) -> Record | None:
    """What an earlier run has measured of such an engine asleep."""
    return costs.cluster.measured.find(asleep_key(costs, instance), costs.setting)


def asleep_key(costs: Costs, instance: Instance) -> str:
    """What an engine's memory while it sleeps is measured under."""
    return keys.asleep(_engine_key(costs, instance))


def _on_cpu(instance: Instance, costs: Costs) -> bool:
    return costs.cluster.kind_of(instance.devices[0]).name == "cpu"


def on_host(instance: Instance, costs: Costs) -> int:
    """Bytes of the host's memory for each device: its share of the staging.

    Where a replica lies on several hosts, as if each of them had one: the first has.
    On a CPU also its share of the process beside weights and pool, where that was measured.
    """
    whole = costs.weights(replace(instance, tp=1, devices=instance.devices[:1])) or 0
    staging = math.ceil(whole * num_hosts(instance, costs.cluster) / instance.tp)
    record = asleep_record(instance, costs) if _on_cpu(instance, costs) else None
    if record is None:
        return staging
    tensors = (costs.weights(instance) or 0) + (pool_bytes(instance, costs) or 0)
    return staging + max(int(record.held) - tensors, 0)


def engine_parts(instance: Instance, costs: Costs) -> list[Part]:
    """Weights and pool of an engine; without `memory_saver` neither is ever given back."""
    assert instance.options is not None
    weights, pool = costs.weights(instance), pool_bytes(instance, costs)
    kept = kept_asleep(instance, costs)
    whole = None if weights is None else weights + kept
    stays = instance.options.memory_saver is False
    return [
        Part(
            name=instance.weights,
            instance=instance.name,
            kind="weights",
            size=whole,
            devices=instance.devices,
            residual=(whole or 0) if stays else kept,
            on_host=on_host(instance, costs),
        ),
        Part(
            name=instance.pool_part,
            instance=instance.name,
            kind="pool",
            size=pool,
            devices=instance.devices,
            residual=(pool or 0) if stays else 0,
        ),
    ]


def with_savers(plan: Plan) -> Plan:
    """The plan with engines that can give memory back just where they sleep."""
    asleep = {action.instance for action in plan.actions if action.kind == "sleep"}

    def decided(instance: Instance, options: EngineOptions) -> Instance:
        saver = options.memory_saver
        saver = instance.name in asleep if saver is None else saver
        return replace(instance, options=options.model_copy(update={"memory_saver": saver}))

    made = (i if i.options is None else decided(i, i.options) for i in plan.instances)
    return replace(plan, instances=tuple(made))


def noting_engines(plan: Plan, served: Mapping[str, Sequence[Node]], costs: Costs) -> Plan:
    """The plan with what engines are, and which samples cannot be drawn again."""
    for instance in plan.instances:
        if instance.options is None:
            continue
        plan = plan.noting("engine", _told(instance, plan, costs))
        drawn = [n.name for n in served[instance.name] if dict(n.params).get("temperature")]
        names = " and ".join(drawn)
        if drawn and (why := instance.options.unseeded(on_cpu=_on_cpu(instance, costs))):
            plan = plan.noting("seeds", f"sampling of {names} is not replayable{why}")
    return plan


def _told(instance: Instance, plan: Plan, costs: Costs) -> str:
    """How many processes, how large a pool, and where weights are on their way."""
    options = instance.options
    assert options is not None
    size = plan.part(instance.pool_part).size
    tokens = options.max_total_tokens
    many = "a process of its own"
    if instance.row_parts > 1:
        many = f"{instance.row_parts} processes of its own, one for each replica"
    pool = "a pool of unknown size" if size is None else f"a pool of {amount(size)}"
    pool += f" for {tokens} tokens" if tokens is not None else ""
    weights = costs.weights(replace(instance, tp=1, devices=instance.devices[:1]))
    staged = "" if weights is None else f" of {amount(weights)}"
    return (
        f"{instance.name} is {options.title} in {many}, with {pool}; weights reach it through "
        f"a copy{staged} in its host's memory{told_way(instance, costs.cluster)}"
        f"{_told_asleep(instance, costs)}"
    )


def _told_asleep(instance: Instance, costs: Costs) -> str:
    """What the process keeps while it sleeps, and how that is known."""
    record = asleep_record(instance, costs)
    if _on_cpu(instance, costs):
        if record is None:
            return ""
        return (
            f", its processes hold {amount(record.held)} of it ({record.source_for(costs.setting)})"
        )
    source = "assumed" if record is None else record.source_for(costs.setting)
    return f"; asleep it keeps {amount(kept_asleep(instance, costs))} of each device ({source})"


def move_key(costs: Costs, instance: Instance, kind: str, what: str) -> str:
    """What a sleep, wake or reshard of an engine is measured under."""
    return keys.joined(_engine_key(costs, instance), f"{kind} of an engine's {what}")


def _engine_key(costs: Costs, instance: Instance) -> str:
    """An engine in words of a key: its device, its backend, its model and how that lies."""
    device = costs.cluster.kind_of(instance.devices[0])
    return keys.joined(
        keys.hardware(device.name, costs.cluster.threads),
        costs.backend,
        keys.model(costs.graph.model(instance.model), costs.shapes[instance.model], instance),
    )


def moving(cost: Cost, instance: Instance, kind: str, what: str, costs: Costs) -> Cost:
    """The cost of a sleep, wake or reshard of an engine, which is asked and answers.

    Of a reshard its weights go from the host's memory to its devices as well. Measured where an
    earlier run did the same.
    """
    if cost.seconds is None:
        return cost
    record = costs.cluster.measured.find(move_key(costs, instance, kind, what), costs.setting)
    if record is not None:
        return as_measured(cost, record, costs.setting)
    seconds = CALLS[kind] * CALL
    if kind == "reshard":
        device = costs.cluster.kind_of(instance.devices[0])
        seconds += (costs.weights(instance) or 0) / (device.host_link * device.reached)
    return replace(cost, seconds=cost.seconds + seconds, source=f"{cost.source}; {ASSUMED}")


def engine_moved(plan: Plan, action: Action) -> tuple[Instance, str] | None:
    """The engine that an action fills, wakes or puts to sleep, if there is one, and what of it."""
    if action.kind not in CALLS:
        return None
    names = action.targets if action.kind == "reshard" else (action.instance,)
    found = [i for i in plan.instances if i.name in names and i.options is not None]
    if not found:
        return None
    if action.kind == "reshard":
        return found[0], brought(action.cost.moved)
    return found[0], moved_part(plan.part(str(action.part)), str(action.mode))


def brought(moved: int | None) -> str:
    """What a reshard moves, in words of a key."""
    return f"weights, {moved} bytes"


def moved_part(part: Part, mode: str) -> str:
    """What a sleep or a wake moves, in words of a key."""
    return f"{part.kind}, {mode}"


def own_pools(plan: Plan) -> Plan:
    """The plan in which engines go on between the pieces of a rollout in their own pools.

    They need no cache beside it, and never sleep: what is asleep goes on with nothing.
    """
    kept = {
        (str(action.instance), f"{action.node}/cache")
        for action in plan.actions
        if ends_first(action) and plan.instance(str(action.instance)).options is not None
    }
    if not kept:
        return plan
    going_on, caches = {instance for instance, _ in kept}, {cache for _, cache in kept}
    parts = tuple(
        replace(part, residual=part.size or 0) if part.instance in going_on else part
        for part in plan.parts
        if part.name not in caches
    )
    actions = tuple(
        replace(action, needs=tuple(need for need in action.needs if need not in caches))
        for action in plan.actions
    )
    return replace(plan, actions=actions, parts=parts)


def ends_first(action: Action) -> bool:
    """Whether an action is a piece of a rollout whose rows go on as they end."""
    return action.begins and action.chunk is not None and action.chunk.by == "finish"
