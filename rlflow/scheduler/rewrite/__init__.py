"""Pass `rewrite`: the graph that computes the same with less work.

`REWRITES` are its parts, each a pure function `(Plan, Context) -> Plan` on the plan's graph that
says in a note what it did. They know what ops declare and where the placement puts nodes;
neither rows nor time.
"""

from __future__ import annotations

from collections.abc import Callable

from rlflow.scheduler.context import Context
from rlflow.scheduler.plan import Plan
from rlflow.scheduler.rewrite.base import base_weights
from rlflow.scheduler.rewrite.equal import equal_nodes
from rlflow.scheduler.rewrite.fused import fused_forwards
from rlflow.scheduler.rewrite.old_policy import old_policy
from rlflow.scheduler.rewrite.unused import unused_models, unused_nodes

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
