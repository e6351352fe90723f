"""The printed form of a graph: a few lines per node, typed, stable to the byte.

    advantage      advantage(kind=grpo)
                   <- actor.rollout: group
                   <- reward: reward
                   -> advantages:float32[row]

Of what a node makes, the fields that somebody reads are printed and the others counted.
This file prints; it decides nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rlflow.graph.fields import Binding, Edge
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import param_text
from rlflow.graph.schedule import due_text

WIDTH = 100
INDENT = "  "


def node_text(node: Node, *, read: frozenset[str], column: int) -> list[str]:
    """A node's lines: its op and options, what it reads from whom, what it makes that is `read`.

    `column` is where the op begins; no line is longer than 100 characters unless a word is.
    """
    model = f"[{node.model}]" if node.model else ""
    options = ", ".join(f"{key}={param_text(value)}" for key, value in node.params)
    lines = _wrap(f"{node.op.name}{model}({options}){_due(node)}", column)
    for source in node.sources:
        names = ", ".join(_binding_text(b) for b in node.inputs if b.source == source)
        lines += _wrap(f"<- {source}: {names}", column, hang=3)
    made = [str(field) for field in node.op.outputs if field.name in read]
    unread = len(node.op.outputs) - len(made)
    if unread:
        made.append(f"({unread} more, unread)")
    if made:
        lines += _wrap(f"-> {', '.join(made)}", column, hang=3)
    first = f"{INDENT}{node.name}".ljust(column) + lines[0].strip()
    return [first, *lines[1:]]


def _due(node: Node) -> str:
    """The iterations that it runs in, where those are not all."""
    return due_text(node.every, node.within).replace(",", "").replace(" iterations", "", 1)


def _binding_text(binding: Binding) -> str:
    made = binding.field.name
    return made if made == binding.name else f"{made} as {binding.name}"


def _wrap(text: str, column: int, hang: int = 4) -> list[str]:
    margin = " " * column
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin + " " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )


def edge_text(edge: Edge) -> str:
    """What an edge joins, with its distance where there is one."""
    distance = f" @{edge.distance}" if edge.distance else ""
    return f"{edge.source} -> {edge.target}{distance}"


def graph_text(graph: Graph) -> str:
    """The whole graph: a heading, the models, the nodes in order, the edges between iterations."""
    counts = f"{len(graph.nodes)} nodes, {len(graph.models)} models"
    lines = [f"{graph.name}   {counts}   graph {graph.hash[:8]}"]
    if graph.models:
        names = _column([model.name for model in graph.models])
        lines += ["", "models"]
        lines += [f"{INDENT}{m.name}".ljust(names) + m.describe() for m in graph.models]
    column = _column([node.name for node in graph.nodes])
    lines += ["", "nodes"]
    for name in graph.order():
        read = frozenset(b.field.name for n in graph.nodes for b in n.inputs if b.source == name)
        lines += node_text(graph.node(name), read=read, column=column)
    others = [edge for edge in graph.edges if edge.kind != "data"]
    if others:
        arrows = _column([edge_text(edge) for edge in others])
        lines += ["", "edges that are not data (@d: d iterations later)"]
        lines += [f"{INDENT}{edge_text(e)}".ljust(arrows) + e.reason for e in others]
    return "\n".join(lines)


def _column(names: Sequence[str]) -> int:
    """Where the second column begins beside these names."""
    return len(INDENT) + max((len(name) for name in names), default=0) + 2
