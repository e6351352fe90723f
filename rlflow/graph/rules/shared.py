"""The rule of states that several nodes share: who writes one, and who reads it.

It knows the names of states, and nothing of what is kept under them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.errors import Finding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Sharing


def states_are_shared(graph: Graph) -> Iterator[Finding]:
    """One node reads a shared state and one writes it, with the same options, of rows it made."""
    for state in dict.fromkeys(node.shares for node in graph.nodes if node.shares):
        readers, writers = graph.sharing(state)
        nodes = [node for node in graph.nodes if node.shares == state]
        if len(nodes) == 1 and nodes[0].op.function is not None:
            continue  # a user's op, with a state of its own
        if len(readers) != 1 or len(writers) != 1:
            yield _not_a_pair(state, nodes, readers, writers)
            continue
        reader, writer = readers[0], writers[0]
        drawn, tracked = reader.as_a(Sharing).weights, writer.as_a(Sharing).weights
        if drawn != tracked:
            yield Finding(
                code="E645",
                what=f"{reader.name!r} and {writer.name!r} have different options of {state!r}",
                where=writer.where,
                got=f"{drawn.describe()}\n{tracked.describe()}",
                expected="one object, given to both",
            )
        elif reader.name not in _above(graph, writer):
            yield Finding(
                code="E645",
                what=f"{writer.name!r} tracks other rows than those that {reader.name!r} draws",
                where=writer.where,
                got=f"it reads {', '.join(writer.sources)}",
                expected=f"samples of the prompts of {reader.name!r}",
            )


def _not_a_pair(
    state: str, nodes: list[Node], readers: tuple[Node, ...], writers: tuple[Node, ...]
) -> Finding:
    """Nobody draws or tracks, or several do."""
    lines = [f"{node.name} at {node.where}" for node in nodes]
    drawn = f"{len(readers)} op{'' if len(readers) == 1 else 's'}"
    return Finding(
        code="E645",
        what=f"{drawn} drawing prompts by {state!r}, and {len(writers)} tracking it",
        where=nodes[-1].where,
        got="\n".join(lines),
        expected="one ops.prompts(..., weights=passes) and one ops.track(passes, ...)",
        fix="" if writers else "ops.track(passes, samples, reward)",
    )


def _above(graph: Graph, node: Node) -> set[str]:
    """The nodes whose rows a node's rows come from, by data."""
    found: set[str] = set()
    line = list(node.sources)
    while line:
        name = line.pop()
        if name not in found:
            found.add(name)
            line += graph.node(name).sources
    return found
