"""The rows of earlier iterations that nodes keep: their number, their bytes, and a note."""

from __future__ import annotations

from dataclasses import replace

from rlflow.graph.fields import Field
from rlflow.graph.graph import Node
from rlflow.graph.roles import Recalling
from rlflow.graph.rules.check import most_rows
from rlflow.scheduler.costs.distributions import field_bytes
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.plan import KeptRows, Plan

NUMBER = 8
"""Bytes of an integer of a row: the iteration that made it, and the length of each ragged field."""


def with_kept_rows(plan: Plan, costs: Costs) -> Plan:
    """The plan with the most that each node keeps, all rows at their longest, and a note on it."""
    for node in plan.graph.nodes:
        if not node.op.recalls:
            continue
        of = node if node.op.rows == "expand" else plan.graph.node(node.sources[0])
        rows = node.as_a(Recalling).keep * (most_rows(plan.graph, of) or 0)
        kept = KeptRows(node=node.name, rows=rows, size=rows * row_bytes(node, costs))
        text = f"{node.name} keeps at most {rows:,} rows of earlier iterations, "
        text += f"{amount(kept.size)}, in the memory of its host and in each checkpoint"
        plan = replace(plan, kept=(*plan.kept, kept)).noting("kept rows", text)
    return plan


def kept_fields(node: Node) -> tuple[Field, ...]:
    """The fields of rows that a node keeps: those that it reads, or the rows that it makes."""
    if node.op.rows == "expand":
        return node.op.outputs
    return tuple(bound.field for bound in node.inputs)


def row_bytes(node: Node, costs: Costs) -> int:
    """Bytes of a row that a node keeps, with all its fields, at its longest."""
    fields = list(kept_fields(node))
    ragged = sum(field.ragged for field in fields)
    values = sum(field_bytes(field, *costs.tokens(node)) for field in fields)
    return values + NUMBER * (1 + ragged)
