"""The two ends of a cut: a source that reads rows from a record, and a sink that leaves them to it.

Both are ordinary ops with bodies by name. A source has the name and the fields of the node whose
place it takes, so that whoever reads it knows no difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlflow.graph.cut.names import ReadEdge
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Input, Op
from rlflow.graph.roles import Drawn, Recorded, SamplingOptions
from rlflow.graph.rules.check import row_counts

SINK = Op(
    name="sink",
    body="rlflow.ops.bodies.sink:sink",
    inputs=(),
    outputs=(),
    per="row",
    rows="none",
    effect="effectful",
)
SOURCE = Op(
    name="recorded",
    body="rlflow.runtime.record.replaying.source:recorded_rows",
    inputs=(),
    outputs=(),
    per="batch",
    rows="gather",
    roles=(Recorded, SamplingOptions, Drawn),
)


def recorded_source(graph: Graph, read: ReadEdge) -> Node:
    """The node that reads from a record what a node of a graph made.

    How many rows there are, how long they get and what their prompts are like is as declared, for
    a plan counts on it.
    """
    node = graph.node(read.edge)
    above = [node, *_ancestors(graph, node)]
    params: dict[str, Any] = {"record": read.record, "edge": read.edge}
    sampler = next((n.model for n in above if n.op.use == "rollout" and n.model), None)
    if sampler is not None:
        params["sampled_by"] = sampler
        makers = above if node.op.hands_on else [node]
        if any(n.op.use == "rollout" and n.every == 1 for n in makers):
            params["ahead"] = True
    found = [s for n in above if (s := n.role(SamplingOptions)) is not None]
    longest = [t for s in found for t in (s.max_new_tokens, s.max_tokens) if t is not None]
    if longest:
        params["max_new_tokens"] = max(map(int, longest))
    drawn = [d.data for n in above if (d := n.role(Drawn)) is not None]
    if drawn:
        params["data"] = drawn[0]
    return Node(
        name=node.name,
        op=replace(SOURCE, outputs=node.op.outputs),
        inputs=(),
        params=tuple(params.items()),
        every=node.every,
        within=node.within,
        rows_of=node.rows_of,
        where=node.where,
        counts=row_counts(graph, node),
    )


def joined_to(source: Node, maker: Node) -> Node:
    """A source whose rows are those of another node: it brings fields of the rows that are there.

    One field of that node tells it which they are.
    """
    field = min(maker.op.outputs, key=lambda made: (made.name != "group", made.level != "row"))
    wants = Input(name=field.name, dtype=field.dtype, levels=(field.level,))
    op = replace(source.op, inputs=(wants,), per="row", rows="same")
    bound = Binding(name=field.name, source=maker.name, field=field)
    return replace(source, op=op, inputs=(bound,), counts=None)


def _ancestors(graph: Graph, node: Node) -> list[Node]:
    """All nodes that a node's rows come from, the nearest first."""
    found: dict[str, Node] = {}
    waiting = list(node.sources)
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found[name] = graph.node(name)
            waiting += graph.node(name).sources
    return list(found.values())
