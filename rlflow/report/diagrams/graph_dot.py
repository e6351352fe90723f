"""A graph as DOT: nodes by kind, models by colour, edges with their fields and distances.

Drawn from the plain data of `Graph.to_json()`, so that a run's directory is enough.
Where two nodes have a data edge, an order edge between them adds nothing and is left
out of the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import graphviz

from rlflow.graph.schedule import ALWAYS, due_text
from rlflow.report.charts.look import (
    FAINT,
    MODEL_TINT,
    NO_MODEL,
    NODE_STYLES,
    SOFT_INK,
    Document,
    edge_fields,
    escape,
    graph_colours,
    kind_of,
    listed_names,
    options_text,
    references_of,
    shorten,
    tint,
    wrapped,
)
from rlflow.report.diagrams.fold import NEXT_TRIP, folded_graph
from rlflow.report.diagrams.legend import (
    EDGE_ATTRIBUTES,
    GRAPH_ATTRIBUTES,
    NODE_ATTRIBUTES,
    Row,
    edge_label,
    font,
    legend_label,
    line_sample,
    model_swatch,
    stacked,
    swatch,
    title_label,
)
from rlflow.report.diagrams.versions import versions_of

Direction = Literal["LR", "TB"]

OPTIONS_WIDTH = 34
OPTIONS_LINES = 2
MOST_FIELDS = 4
DROPPED_LINES = 3
NONE: Mapping[str, str] = {}
NEXT_TRIP_LOOK = {"style": "dashed", "color": FAINT, "dir": "back", "weight": "0"}


def graph_digraph(
    graph: Document, direction: Direction, dropped: Mapping[str, str] = NONE
) -> graphviz.Digraph:
    """The picture of a graph document; of a loop that is unrolled, one trip.

    `dropped` are nodes that will not run, with the reason.
    """
    graph = folded_graph(graph)
    digraph = graphviz.Digraph(
        graph["name"],
        graph_attr={
            **GRAPH_ATTRIBUTES,
            "rankdir": direction,
            "nodesep": "0.35",
            "ranksep": "0.45" if direction == "TB" else "0.6",
            "label": legend_label(*_legend(graph)),
        },
        node_attr=NODE_ATTRIBUTES,
        edge_attr=EDGE_ATTRIBUTES,
    )
    with digraph.subgraph(name="cluster_graph") as body:
        body.attr(
            label=title_label(graph["name"], _facts(graph)),
            labelloc="t",
            labeljust="l",
            color="white",
            margin="12",
        )
        _nodes(body, None, graph, dropped)
        _beside_rollout(body, graph)
        _edges(body, graph)
    return digraph


def _nodes(
    body: graphviz.Digraph, loop: str | None, graph: Document, dropped: Mapping[str, str]
) -> None:
    """The nodes of a loop, or those of none, and the frames of the loops among them."""
    own = [node for node in graph["nodes"] if node.get("loop") == loop]
    for node in own:
        _node(body, node, graph, dropped.get(node["name"]))
    framed = {node.get("loop") for node in graph["nodes"]}
    for node in own:
        if node["name"] in framed:
            _loop(body, node["name"], graph, dropped)


def _loop(body: graphviz.Digraph, loop: str, graph: Document, dropped: Mapping[str, str]) -> None:
    """The nodes of a loop in a frame that says how often they may run."""
    end = next(node for node in graph["nodes"] if node["name"] == loop)
    params = end["params"]
    times = f"until {params['when']}, at most {params['at_most']} trips"
    with body.subgraph(name=f"cluster_loop_{_id(loop)}") as frame:
        frame.attr(
            label=edge_label([font(f"{loop}: {times}", size=9, colour=SOFT_INK)]),
            labelloc="t",
            labeljust="r",
            style="dashed,rounded",
            color=FAINT,
            margin="10",
        )
        _nodes(frame, loop, graph, dropped)


def _facts(graph: Document) -> str:
    facts = [_counted(len(graph["nodes"]), "node"), _counted(len(graph["models"]), "model")]
    if graph["staleness"]:
        facts.append(f"rollout may run {graph['staleness']} updates ahead")
    return ", ".join(facts)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _node(body: graphviz.Digraph, node: Document, graph: Document, dropped: str | None) -> None:
    """A node: its name, what it is, the weights that it uses, its options, why it is dropped."""
    style = NODE_STYLES[kind_of(node)]
    colour = graph_colours(graph).get(node["model"] or "", NO_MODEL)
    what = node["op"] + (f"[{node['model']}]" if node["model"] else "")
    start, stop = node.get("within", ALWAYS)
    every = due_text(node["every"], (start, stop))
    lines = [font(node["name"], size=12, bold=True), font(what + every, size=9, colour=SOFT_INK)]
    used = versions_of(graph).get(node["name"], [])
    lines += [font(line, size=9, colour=colour) for line in used]
    lines += [
        font(line, size=9, colour=SOFT_INK)
        for line in wrapped(options_text(node), OPTIONS_WIDTH, OPTIONS_LINES)
    ]
    if dropped is not None:
        why = wrapped(f"will be dropped: {dropped}", OPTIONS_WIDTH, DROPPED_LINES)
        lines += [font(line, size=9, bold=True) for line in why]
    outline = "rounded" if style.shape == "box" else ""
    body.node(
        _id(node["name"]),
        label=stacked(lines),
        shape=style.shape,
        style=",".join(filter(None, ("filled", outline, "dashed" if dropped is not None else ""))),
        peripheries=str(style.borders),
        fillcolor=tint(colour, MODEL_TINT) if node["model"] and dropped is None else style.fill,
        color=colour,
        penwidth="2.4" if node["model"] else "1.2",
        tooltip=_tooltip(node),
    )


def _beside_rollout(body: graphviz.Digraph, graph: Document) -> None:
    """Nodes that only read weights begin with the rollout; drawn there, they cross no edge."""
    first = next((n["name"] for n in graph["nodes"] if kind_of(n) == "rollout"), None)
    alone = [n["name"] for n in graph["nodes"] if n["model"] and not n["inputs"]]
    if first is None or not alone:
        return
    with body.subgraph() as rank:
        rank.attr(rank="same")
        for name in (first, *alone):
            rank.node(_id(name))


def _tooltip(node: Document) -> str:
    read = [each for found in node["inputs"].values() for each in references_of(found)]
    reads = ", ".join(read) or "nothing"
    text = (
        f"{node['name']}: {node['op']}({options_text(node)})\nreads {reads}\n"
        f"makes {', '.join(node['outputs']) or 'nothing'}"
    )
    return str(graphviz.escape(text))


def _edges(body: graphviz.Digraph, graph: Document) -> None:
    """Weights and states are laid out against their direction: readers stand before writers."""
    fields = edge_fields(graph)
    colours = graph_colours(graph)
    models = {node["name"]: node["model"] for node in graph["nodes"]}
    for edge in graph["edges"]:
        pair = (edge["source"], edge["target"])
        ends = (_id(edge["source"]), _id(edge["target"]))
        tooltip = graphviz.escape(edge["reason"])
        if edge["kind"] == "data":
            names = listed_names([shorten(name, 22) for name in fields[pair]], MOST_FIELDS)
            label = edge_label(escape(name) for name in names)
            body.edge(*ends, label=label, edgetooltip=tooltip, weight="4")
        elif edge["kind"] == "weights" or (edge["kind"] == "state" and edge["distance"]):
            colour = colours.get(models[edge["source"]] or "", NO_MODEL)
            text = font(f"@{edge['distance']}", size=10, colour=colour, bold=True)
            body.edge(
                *reversed(ends),
                label=edge_label([text]),
                style="dashed",
                color=colour,
                penwidth="1.6",
                dir="back",
                weight="0",
                edgetooltip=tooltip,
            )
        elif edge["kind"] == NEXT_TRIP:
            look = {**NEXT_TRIP_LOOK, "edgetooltip": "the next trip of the loop"}
            body.edge(*reversed(ends), **look)
        elif pair not in fields:
            body.edge(*ends, style="dotted", penwidth="1.4", edgetooltip=tooltip)


def _legend(graph: Document) -> tuple[list[Row], list[str]]:
    present = {kind_of(node) for node in graph["nodes"]}
    kinds = {edge["kind"] for edge in graph["edges"]}
    lines = [line_sample("━━▶", "data, with its fields", SOFT_INK)]
    if "weights" in kinds:
        lines.append(
            line_sample(
                "╌ ╌ ▶",
                "weights, @d: read d iterations later; v[i]: as iteration i begins",
                SOFT_INK,
            )
        )
    if "state" in kinds:
        lines.append(line_sample("╌ ╌ ▶", "measured, @d: read d iterations later", SOFT_INK))
    if NEXT_TRIP in kinds:
        lines.append(line_sample("╌ ╌ ▶", "the next trip", FAINT))
    if "order" in kinds:
        lines.append(line_sample("· · · ▶", "order: read before it is written", SOFT_INK))
    told = {"data", "update", "evaluate", "user", "loop"} & present
    nodes = [swatch(style) for kind, style in NODE_STYLES.items() if kind in told]
    models = [model_swatch(*entry) for entry in graph_colours(graph).items()]
    return [("nodes", nodes), ("models", models)], lines


def _id(name: str) -> str:
    """A node's identity in DOT: a colon would be read as a port."""
    return name.replace(":", "_")
