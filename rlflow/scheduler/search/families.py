"""Families of placements: how rollouts lie to what trains, and how old their weights may be.

`colocate` on the same devices, `split` on others, `hybrid` on some of them.
"""

from __future__ import annotations

from typing import Literal

from rlflow.scheduler.search.search import Tried

Relation = Literal["colocate", "split", "hybrid", "other"]


def placement_family(tried: Tried) -> str:
    """How rollouts lie to what trains, and how old their weights may be: `split, 1 stale`."""
    plan = tried.plan
    stale = f", {plan.staleness} stale" if plan.staleness else ""
    return relation_of(tried) + stale


def relation_of(tried: Tried) -> Relation:
    """Whether rollouts have the devices of what trains, others, or some of them."""
    plan = tried.plan
    train: set[int] = set()
    rollout: set[int] = set()
    for action in plan.actions:
        if action.kind != "run" or action.node is None:
            continue
        op = plan.graph.node(action.node).op
        if op.use == "train":
            train |= set(action.devices)
        elif op.use == "rollout" and op.rows == "expand":
            rollout |= set(action.devices)
    if not train or not rollout:
        return "other"
    if train == rollout:
        return "colocate"
    return "split" if train.isdisjoint(rollout) else "hybrid"
