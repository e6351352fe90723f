"""Pass `weights`: inserts reshards, so that every use reads the version of weights it declares.

A use that reads weights its instance does not hold gets a reshard after the update. A use of the
trained instance gets none, and is ordered before the write instead. A use that may be k updates
behind has dependencies that lie k iterations further back; nothing else changes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import gcd

from rlflow.graph.schedule import ALWAYS, Window
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.layouts import held_in_place
from rlflow.scheduler.engines.updates import takes_buckets, update_cost
from rlflow.scheduler.plan.plan import LENT, Action, Dep, Instance, Plan, Reason, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refill:
    """An instance to be filled by a reshard every `every` iterations, and its readers."""

    target: Instance
    readers: tuple[Action, ...]

    @property
    def every(self) -> int:
        """The period that serves every reader."""
        return gcd(*(reader.every for reader in self.readers))


def weights(plan: Plan, context: Context) -> Plan:
    """Insert reshards, and order the readers and writers of each instance."""
    actions = list(plan.actions)
    extra: dict[str, list[Dep]] = {action.id: [] for action in actions}
    for model in plan.graph.models:
        updates = _written_by(plan, model.name)
        if not updates:
            continue
        _chain_updates(updates, extra)
        demands = []
        for instance in plan.instances:
            if instance.model != model.name:
                continue
            readers = [a for a in actions if _reads(a, instance)]
            if instance.trained:
                _order_readers(readers, instance, updates, extra)
            elif readers:
                demands.append(_Refill(target=instance, readers=tuple(readers)))
        for group in _shared_passes(plan, model.name, demands):
            reshard = _reshard(plan, model.name, group, updates, context)
            extra[reshard.id] = []
            extra[updates[0].id].append(Dep(action=reshard.id, distance=1, kind="order"))
            for demand in group:
                for reader in demand.readers:
                    behind = 1 + lag_of(reader, demand.target)
                    dep = Dep(action=reshard.id, distance=behind, kind="weights")
                    extra[reader.id].append(dep)
            actions.append(reshard)
    return replace(plan, actions=tuple(replace(a, after=(*a.after, *extra[a.id])) for a in actions))


def _reads(action: Action, instance: Instance) -> bool:
    """Whether a run reads weights that it does not write; who averages them is one of those."""
    reads = action.kind == "run" and instance.name in dict(action.reads)
    return reads and instance.name not in dict(action.writes)


def lag_of(reader: Action, instance: Instance) -> int:
    """How many updates old the weights are that a reader reads of an instance."""
    return dict(reader.reads)[instance.name]


def _written_by(plan: Plan, model: str) -> tuple[Action, ...]:
    """The runs that write a model's weights, in their order: by node, then piece by piece.

    Of an update whose chunks add up gradients the last one alone; the others read.
    """
    runs = [action for action in plan.actions if action.kind == "run" and action.writes]
    updates = plan.graph.updates(model)
    return tuple(run for node in updates for run in runs if run.node == node.name)


def _chain_updates(updates: tuple[Action, ...], extra: dict[str, list[Dep]]) -> None:
    extra[updates[0].id].append(Dep(action=updates[-1].id, distance=1, kind="weights"))
    for before, after in itertools.pairwise(updates):
        if not any(dep.action == before.id for dep in after.after):
            extra[after.id].append(Dep(action=before.id, distance=0, kind="order"))


def _order_readers(
    readers: list[Action],
    instance: Instance,
    updates: tuple[Action, ...],
    extra: dict[str, list[Dep]],
) -> None:
    """Readers of the trained instance come between the writes of their version and the next."""
    for reader in readers:
        lag = lag_of(reader, instance)
        written = Dep(action=updates[-1].id, distance=1 + lag, kind="weights")
        extra[reader.id].append(written)
        extra[updates[0].id].append(Dep(action=reader.id, distance=-lag, kind="order"))


def _shared_passes(plan: Plan, model: str, demands: list[_Refill]) -> list[list[_Refill]]:
    """The targets of a model in groups that one pass over the source fills.

    One pass reads the source once and keeps all ends busy until the last one is filled. So
    targets share a pass where they are filled equally often, have a device in common (they
    could not be filled side by side anyway; disjoint pools would wait for each other), and
    fit a device together with the source.
    """
    groups: list[list[_Refill]] = []
    for demand in demands:
        for group in groups:
            devices = {device for other in group for device in other.target.devices}
            shares = not devices.isdisjoint(demand.target.devices)
            if shares and group[0].every == demand.every and _fits(plan, model, [*group, demand]):
                group.append(demand)
                break
        else:
            groups.append([demand])
    return groups


def _fits(plan: Plan, model: str, group: list[_Refill]) -> bool:
    """Whether the weights of both ends of one pass fit every device at once."""
    ends = [_source(plan, model), *(demand.target for demand in group)]
    held: dict[int, int] = {}
    for part in {plan.part(end.weights) for end in ends}:
        for device in part.devices:
            held[device] = held.get(device, 0) + (part.size or 0)
    return all(size <= plan.budget(device) for device, size in held.items())


def _source(plan: Plan, model: str) -> Instance:
    source = plan.trained_instance(model)
    if source is None:
        raise AssertionError(f"{model} is updated and no instance is trained")
    return source


def _reshard(
    plan: Plan, model: str, group: list[_Refill], updates: tuple[Action, ...], context: Context
) -> Action:
    source = _source(plan, model)
    targets = [demand.target for demand in group]
    readers = [reader for demand in group for reader in demand.readers]
    pools = dict.fromkeys(target.pool for target in targets)
    lags = sorted({lag_of(reader, d.target) for d in group for reader in d.readers})
    turns = "iteration" if lags[-1] == 1 else "iterations"
    behind = f", {' or '.join(map(str, lags))} {turns} behind" if lags[-1] else ""
    nodes = list(dict.fromkeys(str(reader.node) for reader in readers))
    text = (
        f"{' and '.join(nodes)} read{'s' if len(nodes) == 1 else ''} v[i+1] on "
        f"{' and '.join(pools)}{behind}; {updates[-1].node} writes it on {source.pool}"
    )
    if len(targets) > 1:
        text += f"; one pass fills {len(targets)} instances"
    before = tuple(
        Dep(action=reader.id, distance=-lag_of(reader, demand.target), kind="order")
        for demand in group
        for reader in demand.readers
    )
    every, phase, within = _filled_when(plan, model, group[0].every)
    how = transport(plan, source, targets, context)
    whole = how == "copy" or how in LENT
    lent = how in LENT
    sizes = [context.costs.resharded(source, t, in_place=whole, lent=lent) for t in targets]
    moved = None if None in sizes else sum(size or 0 for size in sizes)
    lanes = len({device for target in targets for device in target.devices})
    devices = tuple(sorted({*source.devices, *(d for t in targets for d in t.devices)}))
    cost = context.costs.copy(moved, lanes, devices=devices, kind="reshard", transport=how)
    cost, told = update_cost(cost, source, targets, how, context.costs)
    text += f"; {told}" if told else ""
    return Action(
        id=f"reshard:{source.name}->{'+'.join(target.name for target in targets)}",
        kind="reshard",
        reason=Reason(rule="stale weights", text=text),
        devices=devices,
        pool="+".join(dict.fromkeys((source.pool, *pools))),
        after=(Dep(action=updates[-1].id, distance=0, kind="weights"), *before),
        instance=source.name,
        targets=tuple(target.name for target in targets),
        needs=tuple(dict.fromkeys((source.weights, *(target.weights for target in targets)))),
        reads=((source.name, -1),),
        writes=tuple((target.name, -1) for target in targets),
        transport=how,
        cost=cost,
        every=every,
        phase=phase,
        within=within,
    )


def _filled_when(plan: Plan, model: str, every: int) -> tuple[int, int, Window]:
    """Period, phase and window of a reshard: before its readers, where it brings anything new.

    Readers of every iteration get what an update writes where it does, all updates alike.
    """
    due = {(node.every, node.phase, node.within) for node in plan.graph.updates(model)}
    if every == 1 and len(due) == 1:
        return due.pop()
    return every, every - 1, ALWAYS


def transport(plan: Plan, source: Instance, targets: list[Instance], context: Context) -> Transport:
    """How weights get from an instance to others.

    Engines that open memory of their devices are lent buckets: gathered where they are if the
    source is on all of their devices, else broadcast to there. Where every process that is filled
    holds all that it needs already, it copies. Otherwise ranks read each other's pieces: processes
    of one host through shared memory, accelerators and several hosts by a collective.
    """
    if all(takes_buckets(target, context.costs) for target in targets):
        needed = {device for target in targets for device in target.devices}
        return "ipc" if needed <= set(source.devices) else "broadcast"
    if plan.backend == "local" or all(held_in_place(source, target) for target in targets):
        return "copy"
    if context.cluster.is_cpu and context.cluster.hosts == 1:
        return "shared memory"
    return "collective"
