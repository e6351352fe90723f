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
from rlflow.graph.graph import Node
from rlflow.graph.placement import On
from rlflow.graph.roles import Drafted, Routed
from rlflow.graph.rules.check import num_prompts
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.drafting import (
    backup,
    drafter_part,
    held_weights,
    reserved,
    staged_bytes,
    token_bytes,
)
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.ranks.rank_memory import Holds
from rlflow.scheduler.costs.serving import engine_key, pool_size, with_slots
from rlflow.scheduler.devices.measured import Record
from rlflow.scheduler.engines.float8 import float8_findings
from rlflow.scheduler.plan.engine_plan import EnginePlan
from rlflow.scheduler.plan.hosts import hosts_of_devices
from rlflow.scheduler.plan.instance import told_options
from rlflow.scheduler.plan.plan import Instance, Part, Plan

ROOM = 0.9
PROCESS, GRAPHS, POOL = "its process", "CUDA graphs", "keys and values"


def use_findings(nodes: Sequence[Node], chosen: Mapping[str, On]) -> list[Finding]:
    """A finding for every assignment of an engine that reaches what is no rollout."""
    wrong: dict[On, list[Node]] = {}
    for node in nodes:
        where = chosen.get(node.name)
        if where is None or node.op.use == "rollout":
            continue
        if EnginePlan.chosen(where).own_process:
            wrong.setdefault(where, []).append(node)
    generate = {str(node.model) for node in nodes if node.op.use == "rollout"}
    return [_no_rollout(where, given, generate) for where, given in wrong.items()]


def _no_rollout(where: On, nodes: Sequence[Node], generate: Collection[str]) -> Finding:
    named = [f"{node.name} ({node.op.use or node.op.name})" for node in nodes]
    pool, engine = where.pool, EnginePlan.chosen(where).name
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
    chosen = EnginePlan.chosen(where)
    if not chosen.own_process:
        return []
    engine, options, drafted = chosen.name, chosen.settings, node.role(Drafted)
    said = {
        "fsdp": where.fsdp if where.fsdp not in (None, 1) else None,
        "ep": where.ep if where.ep not in (None, 1) else None,
        "pp": where.pp if where.pp not in (None, 1) else None,
        "virtual": where.virtual if where.virtual not in (None, 1) else None,
        "schedule": where.schedule if where.schedule not in (None, "1f1b") else None,
        "cp": where.cp if where.cp not in (None, 1) else None,
        "recompute": where.recompute or None,
        "offload": ",".join(where.offloads) or None,
        "reshard_after_forward": where.reshard_after_forward,
        "compile": where.compile or None,
        "sequence": where.sequence or None,
        "tf32": where.tf32 or None,
        "gradient_sync": where.gradient_sync,
        "micro": where.micro,
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
    adapted, lora = options.adapted, model.lora
    unadapted = options.unadapted(() if lora is None else lora.targets)
    reasons = {
        "a value head": model.head == "value",
        f"adapters on {' and '.join(unadapted)} (lora=)": bool(unadapted),
        f"dtype {model.dtype}": model.dtype == "float64",
        f"drafter {node.drafter!r}": bool(drafted and not options.drafts),
        'experts that it tells of (routing="record")': bool(node.role(Routed)) > options.routes,
    }
    has = [reason for reason, holds in reasons.items() if holds]
    if not has:
        return float8_findings(node, where, costs)
    return [
        Finding(
            code="E249",
            what=f"{node.name}: engine {engine!r} runs no model with {' and '.join(has)}",
            where=model.where,
            got=f"model {model.name!r}",
            expected="a causal language model in float32 or bfloat16, trained as a whole"
            + (f", or by adapters on {', '.join(adapted)}" if adapted else ""),
            fix=f'"{model.name}.rollout": rf.on("{where.pool}")',
        )
    ]


def with_pool(instance: Instance, nodes: Sequence[Node], room: int, costs: Costs) -> Instance:
    """The engine with a pool of so many tokens as its options say, or as its rollouts need.

    One that drafts is told how many rows it computes at once, too. What is derived leaves a part
    of `room` bytes free, and holds one row at the least. A share of the memory becomes tokens on a
    CPU, where a device is a part of the host that an engine does not know of.
    """
    instance = with_slots(instance, costs)
    if any(node.role(Routed) for node in nodes):
        instance = told_options(instance, routed_experts=True)
    options = instance.engine_plan.settings
    shape = costs.shapes[instance.model]
    if shape is None or options.max_total_tokens is not None:
        return instance
    if options.mem_fraction_static is not None and not on_cpu(instance, costs):
        return instance
    longest = max(sum(costs.tokens(node)) for node in nodes) + reserved(instance)
    each, said = token_bytes(instance, costs), pool_size(instance, costs)
    if said is not None:
        tokens = max(longest, int(said / each))
        return told_options(instance, max_total_tokens=tokens)
    wanted = max(_tokens(node, instance, costs) for node in nodes)

    def told(engine: Instance) -> Instance:
        fitting = int((ROOM * room - _beside_pool(engine, nodes, costs)) / each)
        return told_options(instance, max_total_tokens=max(longest, min(wanted, fitting)))

    # A pool of another size may have SGLang compute more rows at once, which takes of its room.
    return told(told(instance))


def room_of_smaller_pool(
    instance: Instance, nodes: Sequence[Node], less: int, costs: Costs
) -> int | None:
    """The room in which a pool is smaller by so many bytes; None where no tokens are said of it."""
    tokens = instance.engine_plan.settings.max_total_tokens
    if tokens is None:
        return None
    fewer = math.ceil(less / token_bytes(instance, costs))
    size = (tokens - fewer) * token_bytes(instance, costs)
    return int((_beside_pool(instance, nodes, costs) + size) / ROOM)


def _beside_pool(instance: Instance, nodes: Sequence[Node], costs: Costs) -> int:
    """Bytes of a device that an engine holds beside its pool while it generates."""
    held = (held_weights(instance, costs) or 0) + kept_asleep(instance, costs)
    return held + sum(size for _, size in working(instance, nodes, costs))


def row_parts_over(instance: Instance, node: Node) -> int:
    """In how many parts the rows of a node lie over an engine's replicas."""
    return instance.row_parts if node.op.dispatched not in ("all", "first") else 1


def _tokens(node: Node, instance: Instance, costs: Costs) -> int:
    """Tokens of all rows of a part at their longest and one more; of parts, of a group more."""
    parts, rows = row_parts_over(instance, node), costs.rows(node)
    group = math.ceil(rows / (num_prompts(costs.graph, node) or rows))
    most = rows if parts == 1 else math.ceil(rows / parts) + group
    return (most + 1) * (sum(costs.tokens(node)) + reserved(instance))


def pool_bytes(instance: Instance, costs: Costs) -> int | None:
    """Bytes of the pool on each device: of its tokens, or what a fraction of the memory leaves."""
    if costs.shapes[instance.model] is None:
        return None
    size = pool_size(instance, costs)
    return None if size is None else int(size)


def kept_asleep(instance: Instance, costs: Costs) -> int:
    """Bytes that an engine's process keeps on each device while it sleeps.

    On a CPU a device's memory is of tensors alone: the process is in its host's.
    """
    return sum(size for _, size in asleep_holds(instance, costs))


def asleep_holds(instance: Instance, costs: Costs) -> Holds:
    """The same by what it is: as an earlier run has measured it in all, else assumed."""
    if on_cpu(instance, costs):
        return ()
    record = asleep_record(instance, costs)
    if record is not None:
        return ((PROCESS, int(record.held)),)
    most = max(costs.cluster.kind_of(device).engine for device in instance.devices)
    shape = costs.shapes[instance.model]
    serving = None if shape is None else costs.roofline(instance, shape).serving
    graphs = ((GRAPHS, serving.graph_bytes),) if serving and serving.captured else ()
    return (("context and workspaces", int(most)), *graphs)


def working(instance: Instance, nodes: Sequence[Node], costs: Costs) -> Holds:
    """What an engine computes in: activations and logits of the rollout that has the most.

    On an accelerator its process keeps this memory from pass to pass, as long as its pool is awake.
    """
    found = [costs.working(node, instance, row_parts_over(instance, node)) for node in nodes]
    return max(found, key=lambda holds: sum(size for _, size in holds), default=())


def asleep_record(instance: Instance, costs: Costs) -> Record | None:
    """What an earlier run has measured of such an engine asleep."""
    return costs.cluster.measured.find(asleep_key(costs, instance), costs.setting)


def asleep_key(costs: Costs, instance: Instance) -> str:
    """What an engine's memory while it sleeps is measured under."""
    return keys.asleep(engine_key(costs, instance), on_cpu=on_cpu(instance, costs))


def kept_of(held: float, instance: Instance, costs: Costs) -> float:
    """Bytes to measure of what a sleeping engine holds of a device; on a CPU of its host.

    There weights and pool stay in it, and are counted by the sizes that a plan gives them.
    """
    if not on_cpu(instance, costs):
        return held
    return held - (held_weights(instance, costs) or 0) - (pool_bytes(instance, costs) or 0)


def start_key(costs: Costs, instance: Instance) -> str:
    """What the seconds that an engine takes to start are measured under."""
    return keys.key_of_parts(engine_key(costs, instance), "an engine's start")


def on_cpu(instance: Instance, costs: Costs) -> bool:
    """Whether an engine computes on the host's processors."""
    return costs.cluster.kind_of(instance.devices[0]).name == "cpu"


def on_host(instance: Instance, costs: Costs) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Bytes of the host's memory for each device, its share of the staging; and of some more.

    Where a replica lies on several hosts, as if each of them had one: the first has.
    On a CPU also its share of the process beside weights and pool, where that was measured.
    """
    share, hosts = staged_bytes(instance, costs), hosts_of_devices(instance, costs.cluster)
    fewest = min(hosts.values())
    more = tuple((d, share * (count - fewest)) for d, count in hosts.items() if count > fewest)
    copied = share * fewest
    record = asleep_record(instance, costs) if on_cpu(instance, costs) else None
    return copied + (0 if record is None else int(record.held)), more


def engine_parts(instance: Instance, nodes: Sequence[Node], costs: Costs) -> list[Part]:
    """Weights and pool of an engine; without `memory_saver` neither is ever given back.

    On an accelerator its process is counted with the weights, what it computes in with the pool.
    Of a drafter in an engine weights alone.
    """
    if instance.engine_plan.lies_inside:
        return [drafter_part(instance, costs)]
    weights, pool = held_weights(instance, costs), pool_bytes(instance, costs)
    process, room = asleep_holds(instance, costs), working(instance, nodes, costs)
    room = () if on_cpu(instance, costs) else room
    kept = sum(size for _, size in process)
    whole = None if weights is None else weights + kept
    full = None if pool is None else pool + sum(size for _, size in room)
    stays = instance.engine_plan.settings.memory_saver is False
    copied, more = on_host(instance, costs)
    return [
        Part(
            name=instance.weights,
            instance=instance.name,
            kind="weights",
            size=whole,
            devices=instance.devices,
            residual=(whole or 0) if stays else kept,
            on_host=copied,
            more_on_host=more,
            holds=(("weights", weights), *process) if weights is not None and process else (),
        ),
        Part(
            name=instance.pool_part,
            instance=instance.name,
            kind="pool",
            size=full,
            devices=instance.devices,
            residual=(full or 0) if stays else 0,
            holds=((POOL, pool), *room) if pool is not None and room else (),
        ),
    ]


def with_savers(plan: Plan, costs: Costs) -> Plan:
    """The plan with engines that can give memory back just where they sleep.

    Those have copies of what drafts in them on their hosts.
    """
    asleep = {action.instance for action in plan.actions if action.kind == "sleep"}

    def decided(instance: Instance) -> Instance:
        saver = instance.engine_plan.settings.memory_saver
        saver = instance.name in asleep if saver is None else saver
        return told_options(instance, memory_saver=saver)

    own = {engine.name for engine in plan.engines}
    made = (decided(each) if each.name in own else each for each in plan.instances)
    plan = replace(plan, instances=tuple(made))
    saving = {each.name for each in plan.engines if each.engine_plan.saves_memory}
    kept = {i.weights: backup(i, costs) for i in plan.instances if {i.name, i.inside} & saving}
    parts = (replace(p, on_host=p.on_host + kept.get(p.name, 0)) for p in plan.parts)
    return replace(plan, parts=tuple(parts))


def own_pools(plan: Plan) -> Plan:
    """The plan in which engines go on between the pieces of a rollout in their own pools.

    They need no cache beside it, and never sleep: what is asleep goes on with nothing.
    """
    kept = {
        (str(action.instance), f"{action.node}/cache")
        for action in plan.actions
        if action.ends_first and plan.instance(str(action.instance)).engine_plan.own_process
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
