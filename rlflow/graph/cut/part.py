"""A part of a graph: named nodes with what they need, and edges that a record brings.

A pure function of graphs, before anything is compiled: what is left is an ordinary graph. Nodes
that nothing kept needs go, and models without a use. What is made at the edge of the cut goes into
a sink, and what a record has comes from a source. Knows neither devices nor files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from rlflow.errors import Finding, UsageError
from rlflow.graph.cut.names import ReadEdge, name_findings
from rlflow.graph.cut.sources import SINK, joined_to, recorded_source
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.model import Model
from rlflow.graph.op import Input

NOTHING = "Nothing was started."


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPart:
    """A part of a graph, and what is said of what was left out: a rule and a text each."""

    graph: Graph
    notes: tuple[tuple[str, str], ...]


def cut_graph(graph: Graph, only: Sequence[str] = (), read: Sequence[ReadEdge] = ()) -> GraphPart:
    """The nodes `only` with all that they need, edges of `read` brought by sources.

    Without `only` everything that has an effect stays. Raises UsageError with every finding: E330
    for a name that is no node's, E331 for a node within a loop, E332 for an edge that makes no
    rows, is read twice, or that nothing kept reads.
    """
    findings = list(name_findings(graph, only, read))
    if findings:
        raise UsageError(*findings, summary=NOTHING)
    brought = {each.edge: recorded_source(graph, each) for each in read}
    fed = replace(graph, nodes=tuple(brought.get(node.name, node) for node in graph.nodes))
    roots = set(only) or {n.name for n in graph.nodes if n.op.effect != "pure" and not n.is_gate}
    kept = _needed(fed, roots)
    unread = [each for each in read if each.edge not in kept]
    if unread:
        raise UsageError(*(_unread(graph, each) for each in unread), summary=NOTHING)
    nodes = _in_row_sets(tuple(node for node in fed.nodes if node.name in kept), brought)
    sinks = [_sink(graph, node) for node in nodes if node.name in only]
    nodes = (*nodes, *(sink for sink in sinks if sink is not None))
    made = replace(graph, nodes=nodes, models=(), headline=_headline(graph, kept))
    made = replace(made, models=tuple(_models(graph, made)))
    return GraphPart(graph=made, notes=tuple(_notes(graph, made, read)))


def _needed(graph: Graph, roots: Collection[str]) -> set[str]:
    """Nodes with all that they need: what they read, the loops they are in, states they share.

    Weights that others make are not needed, but by an average of them: without an update they
    stay as they are loaded.
    """
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        node = graph.node(waiting.pop())
        if node.name in found:
            continue
        found.add(node.name)
        waiting += node.sources
        waiting += [end.name for end in graph.loops_of(node)]
        waiting += [n.name for n in graph.nodes if n.is_gate and n.loop == node.name]
        waiting += [n.name for n in graph.nodes if node.shares and n.shares == node.shares]
        waiting += [update.name for update in graph.updates(node.averages or "")]
    return found


def _in_row_sets(nodes: tuple[Node, ...], brought: Collection[str]) -> tuple[Node, ...]:
    """The nodes with one maker of each row set that a record brings; other sources join its rows.

    That is the node that made them, where it is still there, else the first source.
    """
    names = {node.name for node in nodes}
    makers: dict[str, str] = {}
    for node in nodes:
        if node.name in brought and node.rows_of is not None:
            makers.setdefault(node.rows_of, node.rows_of if node.rows_of in names else node.name)
    by_name = {node.name: node for node in nodes}
    made = []
    for node in nodes:
        maker = makers.get(str(node.rows_of))
        joins = maker is not None and node.name in brought and node.name != maker
        found = joined_to(node, by_name[str(maker)]) if joins else node
        made.append(found if maker is None else replace(found, rows_of=maker))
    return tuple(made)


def _sink(graph: Graph, node: Node) -> Node | None:
    """What reads at the edge of the cut what the whole graph reads of a node; None of no rows.

    Of what makes rows it reads everything, as it does where nobody reads anything.
    """
    if not node.op.outputs:
        return None
    read = {b.field.name for n in graph.nodes for b in n.inputs if b.source == node.name}
    everything = not read or graph.node(node.name).op.rows in ("new", "expand")
    fields = [field for field in node.op.outputs if everything or field.name in read]
    inputs = tuple(Input(name=f.name, dtype=f.dtype, levels=(f.level,)) for f in fields)
    name, taken = f"{node.name}.sink", {other.name for other in graph.nodes}
    while name in taken:
        name += "_2"
    return Node(
        name=name,
        op=replace(SINK, inputs=inputs),
        inputs=tuple(Binding(name=f.name, source=node.name, field=f) for f in fields),
        every=node.every,
        within=node.within,
        rows_of=node.rows_of,
        where=node.where,
    )


def _headline(graph: Graph, kept: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in graph.headline if name.partition("/")[0] in kept)


def models_used(graph: Graph) -> set[str]:
    """The models that the nodes of a graph use."""
    used = {name for n in graph.nodes for name in (n.model, n.drafter, n.averages)}
    return {name for name in used if name is not None}


def _models(graph: Graph, part: Graph) -> Iterator[Model]:
    """The models that are used; those that nothing updates any more have no optimizer."""
    used = models_used(part)
    for model in graph.models:
        if model.name not in used:
            continue
        still = model.optimizer is not None and not part.updates(model.name)
        yield model.model_copy(update={"optimizer": None}) if still else model


def _notes(graph: Graph, part: Graph, read: Sequence[ReadEdge]) -> Iterator[tuple[str, str]]:
    """Models that are not loaded, weights that stay as they are, nodes that are left out."""
    for model in graph.models:
        if model.name not in models_used(part):
            yield "unused model", f"model {model.name} is not loaded: no node of this part uses it"
        elif graph.updates(model.name) and not part.updates(model.name):
            names = " and ".join(node.name for node in graph.updates(model.name))
            yield "part", f"{model.name} stays as it is loaded: {names} is left out"
    gone = [node.name for node in graph.nodes if not part.has_node(node.name)]
    if gone:
        yield "part", f"left out, since nothing here needs it: {', '.join(gone)}"
    for each in read:
        yield "part", f"{each.edge} is read from a record: {each.record}"


def _unread(graph: Graph, each: ReadEdge) -> Finding:
    readers = [node.name for node in graph.nodes if each.edge in node.sources]
    return Finding(
        code="E332",
        what=f"--from {each.record}:{each.edge}: nothing that stays reads {each.edge}",
        where=graph.node(each.edge).where,
        expected=f"an edge above what runs; {each.edge} is read by {', '.join(readers) or 'none'}",
    )
