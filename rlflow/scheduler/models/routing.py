"""How wide fields are of experts that tokens chose, and of pixels, from shapes. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlflow.graph.fields import Field
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.models.shapes import Shape


def with_widths(graph: Graph, shapes: Mapping[str, Shape | None]) -> Graph:
    """The graph with the width of each such field, where its model's shape is known."""
    if not any(f.routed or f.seen for node in graph.nodes for f in node.op.outputs):
        return graph
    return replace(graph, nodes=tuple(_widened(node, shapes) for node in graph.nodes))


def _widened(node: Node, shapes: Mapping[str, Shape | None]) -> Node:
    outputs = tuple(_wide(field, shapes) for field in node.op.outputs)
    inputs = tuple(replace(bound, field=_wide(bound.field, shapes)) for bound in node.inputs)
    return replace(node, op=replace(node.op, outputs=outputs), inputs=inputs)


def _wide(field: Field, shapes: Mapping[str, Shape | None]) -> Field:
    shape = shapes.get(field.routed or field.seen or "")
    if shape is None:
        return field
    if field.seen is not None:
        numbers = None if shape.sight is None else shape.sight.numbers
        return replace(field, width=numbers, seen=None)
    return replace(field, width=shape.routed or None, routed=None)
