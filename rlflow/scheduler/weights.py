"""Passes `weights` and `transfer`: what has to move so that everybody reads what it declared.

A use that reads weights its instance does not hold gets a reshard after the update; a
use of the trained instance gets none, and is ordered before the write instead.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import gcd

from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.bind import Context
from rlflow.scheduler.plan import Action, Dep, Instance, Plan, Reason


def weights(plan: Plan, context: Context) -> Plan:
    """Insert reshards, and the order between readers and writers of each instance."""
    actions = list(plan.actions)
    extra: dict[str, list[Dep]] = {action.id: [] for action in actions}
    for model in plan.graph.models:
        updates = plan.graph.updates(model.name)
        if not updates:
            continue
        _chain_updates(updates, extra)
        for instance in plan.instances:
            if instance.model != model.name:
                continue
            readers = [a for a in actions if a.instance == instance.name and not a.writes]
            if instance.trained:
                _order_readers(readers, updates, extra)
            elif readers:
                reshard = _reshard(plan, instance, readers, updates, context)
                extra[reshard.id] = []
                extra[updates[0].name].append(Dep(action=reshard.id, distance=0, kind="order"))
                for reader in readers:
                    extra[reader.id].append(Dep(action=reshard.id, distance=0, kind="weights"))
                actions.append(reshard)
    return replace(plan, actions=tuple(replace(a, after=(*a.after, *extra[a.id])) for a in actions))


def _chain_updates(updates: tuple[Node, ...], extra: dict[str, list[Dep]]) -> None:
    extra[updates[0].name].append(Dep(action=updates[-1].name, distance=1, kind="weights"))
    for before, after in itertools.pairwise(updates):
        extra[after.name].append(Dep(action=before.name, distance=0, kind="order"))


def _order_readers(
    readers: list[Action], updates: tuple[Node, ...], extra: dict[str, list[Dep]]
) -> None:
    for reader in readers:
        extra[reader.id].append(Dep(action=updates[-1].name, distance=1, kind="weights"))
        extra[updates[0].name].append(Dep(action=reader.id, distance=0, kind="order"))


def _reshard(
    plan: Plan,
    target: Instance,
    readers: list[Action],
    updates: tuple[Node, ...],
    context: Context,
) -> Action:
    source = plan.trained_instance(target.model)
    if source is None:
        raise AssertionError(f"{target.model} is updated and no instance is trained")
    names = " and ".join(reader.id for reader in readers)
    text = (
        f"{names} read{'s' if len(readers) == 1 else ''} v[i] on {target.pool}; "
        f"{updates[-1].name} wrote it on {source.pool}"
    )
    before = tuple(Dep(action=reader.id, distance=1, kind="order") for reader in readers)
    moved = context.costs.weight_bytes(target.model)
    return Action(
        id=f"reshard:{source.name}->{target.name}",
        kind="reshard",
        reason=Reason(rule="stale weights", text=text),
        devices=tuple(sorted({*source.devices, *target.devices})),
        pool=source.pool if source.pool == target.pool else f"{source.pool}+{target.pool}",
        after=(Dep(action=updates[-1].name, distance=1, kind="weights"), *before),
        instance=source.name,
        target=target.name,
        needs=tuple(dict.fromkeys((source.weights, target.weights))),
        reads=((source.name, 0),),
        writes=((target.name, 0),),
        transport=transport(source, target, context),
        cost=context.costs.copy(moved),
        every=gcd(*(reader.every for reader in readers)),
        first=1,
    )


def transport(source: Instance, target: Instance, context: Context) -> str:
    """How weights get from one instance to another: within one process they are copied."""
    if context.cluster.is_cpu or set(source.devices) == set(target.devices):
        return "copy (one process)"
    return "collective"


def transfer(plan: Plan, context: Context) -> Plan:
    """Insert row redistribution between devices that do not share memory."""
    if context.cluster.is_cpu:
        crossing = _crossing_edges(plan)
        if crossing:
            return plan.noting(
                "no transfer",
                f"{len(crossing)} edges cross pools within one process: rows stay where they are",
            )
        return plan
    return _insert_transfers(plan, _crossing_edges(plan), context)


def _crossing_edges(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    """Data edges whose two ends run on different devices, host included."""
    graph: Graph = plan.graph
    crossing = []
    for edge in graph.edges:
        if edge.kind != "data":
            continue
        source, target = plan.action(edge.source), plan.action(edge.target)
        if source.devices != target.devices:
            crossing.append((edge.source, edge.target, edge.fields))
    return crossing


def _insert_transfers(
    plan: Plan, crossing: list[tuple[str, str, tuple[str, ...]]], context: Context
) -> Plan:
    """One transfer for each producer and destination, serving every consumer there."""
    merged: dict[tuple[str, tuple[int, ...]], tuple[list[str], set[str]]] = {}
    for source, target, fields in crossing:
        key = (source, plan.action(target).devices)
        consumers, names = merged.setdefault(key, ([], set()))
        consumers.append(target)
        names.update(fields)
    actions = {action.id: action for action in plan.actions}
    for (source, devices), (consumers, names) in merged.items():
        pool = actions[consumers[0]].pool
        moved = Action(
            id=f"transfer:{source}->{pool}",
            kind="transfer",
            reason=Reason(
                rule="rows elsewhere",
                text=f"{source} makes {', '.join(sorted(names))} "
                f"on {actions[source].pool}; {' and '.join(consumers)} read on {pool}",
            ),
            devices=devices,
            pool=pool,
            node=source,
            fields=tuple(sorted(names)),
            after=(Dep(action=source, distance=0, kind="data"),),
            transport="point to point",
            cost=context.costs.copy(
                context.costs.fields(plan.graph.node(source), tuple(sorted(names)))
            ),
            every=actions[source].every,
        )
        actions[moved.id] = moved
        for consumer in consumers:
            after = tuple(
                replace(dep, action=moved.id)
                if dep.kind == "data" and dep.action == source
                else dep
                for dep in actions[consumer].after
            )
            actions[consumer] = replace(actions[consumer], after=after)
    return replace(plan, actions=tuple(actions.values()))
