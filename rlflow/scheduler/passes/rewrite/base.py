"""Rewrite `base weights`: a trained model without its adapters is the model it started from.

Training adapters (Hu et al. 2021) never changes the weights they were added to, so a reference
with the same weights needs no copy of its own: its forwards run on the trained instance with the
adapters switched off, on the same numbers bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.graph import Graph, Node
from rlflow.graph.model import Model
from rlflow.graph.placement import On, Placement
from rlflow.graph.roles import AdaptersOff
from rlflow.scheduler.context import Context
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.bind.instances import instance_of, layout_of
from rlflow.scheduler.passes.rewrite.edits import with_nodes
from rlflow.scheduler.plan.plan import Plan


def base_weights(plan: Plan, context: Context) -> Plan:
    """Serve frozen models by the trained ones that they are the base of, and load them no more.

    Only where the placement leaves them where the trained instance is, in its layout.
    """
    for frozen in plan.graph.models:
        trained = next((m for m in plan.graph.models if _is_base(frozen, m)), None)
        nodes = [node for node in plan.graph.nodes if node.model == frozen.name]
        if trained is None or not nodes:
            continue
        why = _why_kept(plan, nodes, trained, context.placement)
        if why is None:
            continue
        if why:
            text = f"{frozen.name} is loaded, though {trained.name} holds its weights: {why}"
            plan = plan.noting("base weights", text)
            continue
        plan = _served(plan, frozen, trained, nodes, context)
    return plan


def _is_base(frozen: Model, trained: Model) -> bool:
    """Whether adapters were added to just the weights that a frozen model has.

    A value head is trained beside the adapters; of weights drawn at random nothing is promised.
    """
    same = ("path", "head", "dtype", "init")
    return (
        frozen.optimizer is None
        and trained.lora is not None
        and all(getattr(frozen, name) == getattr(trained, name) for name in same)
        and (frozen.head, frozen.init) == ("lm", "pretrained")
    )


def _why_kept(plan: Plan, nodes: list[Node], trained: Model, placement: Placement) -> str | None:
    """Why a model stays, `` where it need not; None where the placement is to be refused."""
    home = _home(plan.graph, trained, placement)
    if home is None:
        return None
    wanted = layout_of(home, "train", plan.pools)
    for node in nodes:
        own, there = assignment(node, placement), assignment(_moved(node, trained), placement)
        if own is None or there is None:
            return None
        if node.op.use != "forward":
            return f"{node.name} generates with it"
        asked = any(key in placement.assign for key in _keys(node))
        for where, whose in ((own, node.name if asked else ""), (there, f"{trained.name}.forward")):
            if whose and where.pool != home.pool:
                return (
                    f"{whose} is placed on {where.pool}, {trained.name} is trained on {home.pool}"
                )
            states = set(where.offloads) - {"activations"}
            if whose and (states or layout_of(where, "forward", plan.pools) != wanted):
                return f"{whose} is placed in another layout than {trained.name} is trained in"
    return ""


def _home(graph: Graph, trained: Model, placement: Placement) -> On | None:
    """Where a model is trained, None where its updates are not all placed there."""
    homes = [assignment(node, placement) for node in graph.updates(trained.name)]
    return homes[0] if homes and all(where == homes[0] for where in homes) else None


def _keys(node: Node) -> tuple[str, ...]:
    """What a placement may say of just this node or its model."""
    return node.name, f"{node.model}.{node.op.use}", str(node.model)


def _moved(node: Node, trained: Model) -> Node:
    return replace(node, model=trained.name).being(AdaptersOff(adapters="off"))


def _served(plan: Plan, frozen: Model, trained: Model, nodes: list[Node], context: Context) -> Plan:
    where = assignment(nodes[0], context.placement)
    assert where is not None
    size = context.costs.weights(instance_of(nodes[0], where, plan.pools))
    less = "" if size is None else f", {amount(size)} less on each device of {where.pool}"
    names = [node.name for node in nodes]
    text = (
        f"{' and '.join(names)} run{'s' if len(names) == 1 else ''} on {trained.name} without its "
        f"adapters, the weights of {frozen.name}: {frozen.name} is not loaded{less}"
    )
    moved = (_moved(n, trained) if n.model == frozen.name else n for n in plan.graph.nodes)
    plan = with_nodes(plan, moved).noting("base weights", text)
    models = tuple(model for model in plan.graph.models if model is not frozen)
    return replace(plan, graph=replace(plan.graph, models=models))
