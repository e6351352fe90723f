"""Pass `rewrite`: the graph that computes the same with less work.

`REWRITES` are its parts. Each is a pure function `(Plan, Context) -> Plan` that changes the plan's
graph and says in a note what it did. They know what ops declare and where the placement puts
nodes, and neither rows nor time.
"""

from __future__ import annotations

from collections.abc import Callable

from rlflow.scheduler.context import Context
from rlflow.scheduler.passes.rewrite.base import base_weights
from rlflow.scheduler.passes.rewrite.equal import equal_nodes
from rlflow.scheduler.passes.rewrite.fused import fused_forwards
from rlflow.scheduler.passes.rewrite.old_policy import old_policy
from rlflow.scheduler.passes.rewrite.unused import unused_models, unused_nodes
from rlflow.scheduler.plan.plan import Plan

REWRITES: tuple[tuple[str, Callable[[Plan, Context], Plan]], ...] = (
    ("old policy", old_policy),
    ("unused node", unused_nodes),
    ("base weights", base_weights),
    ("equal nodes", equal_nodes),
    ("one forward", fused_forwards),
    ("unused model", unused_models),
)


def rewrite(plan: Plan, context: Context) -> Plan:
    """Apply every rewrite once, in an order in which none makes work for an earlier one."""
    for _, apply in REWRITES:
        plan = apply(plan, context)
    return plan
