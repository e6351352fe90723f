"""What may be asked of a cut: nodes by name, and edges that a record has. Findings otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlflow.errors import Finding, known_names, near_names
from rlflow.graph.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEdge:
    """An edge that is read from the record of a run: what node `edge` made there."""

    record: str
    edge: str


def name_findings(graph: Graph, only: Sequence[str], read: Sequence[ReadEdge]) -> Iterator[Finding]:
    """E330 for what is no node, E331 for nodes within loops, E332 for edges that cannot be read."""
    asked = [(f"--only {name}", name) for name in only]
    asked += [(f"--from {each.record}:{each.edge}", each.edge) for each in read]
    names = [node.name for node in graph.nodes]
    for option, name in asked:
        if name not in names:
            yield no_node(graph, option, name)
        elif graph.node(name).loop is not None:
            yield _within_a_loop(graph, option, name)
    for number, each in enumerate(read):
        if each.edge not in names:
            continue
        if not graph.node(each.edge).op.outputs:
            yield Finding(
                code="E332",
                what=f"--from {each.record}:{each.edge}: {each.edge} makes no rows",
                where=graph.node(each.edge).where,
                expected=known_names([node.name for node in graph.nodes if node.op.outputs]),
            )
        if any(other.edge == each.edge for other in read[:number]):
            yield Finding(
                code="E332",
                what=f"--from {each.record}:{each.edge}: {each.edge} is read from a record already",
                fix="leave out one of the two",
            )


def no_node(graph: Graph, said: str, name: str) -> Finding:
    """The finding for a name that no node of a graph has; `said` is how it was asked for."""
    names = [node.name for node in graph.nodes]
    return Finding(
        code="E330",
        what=f"{said}: the graph has no node {name!r}",
        where=graph.source,
        expected=known_names(names),
        near=near_names(name, names),
    )


def _within_a_loop(graph: Graph, option: str, name: str) -> Finding:
    outermost = graph.loops_of(graph.node(name))[-1].name
    said = option.removesuffix(name)
    return Finding(
        code="E331",
        what=f"{option}: {name!r} is within a loop, and trips of a loop do not run alone",
        where=graph.node(name).where,
        expected=f"what ends the loop: {outermost}",
        fix=f"{said}{outermost}",
    )
