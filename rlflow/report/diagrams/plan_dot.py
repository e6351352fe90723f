"""A plan as DOT: a column per pool, actions with their time and peak, and why each is there.

Drawn from the plain data of `Plan.to_json()` and of its graph. What must finish first is
an edge by kind; order that other edges imply already is left out of the picture, never
out of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import graphviz
import networkx as nx

from rlflow.report.charts.look import (
    ACTION_STYLES,
    FAINT,
    LINE,
    MODEL_TINT,
    NO_MODEL,
    PAPER,
    POOL_FILL,
    SOFT_INK,
    Document,
    Style,
    graph_colours,
    mode_text,
    shorten,
    tint,
    wrapped,
)
from rlflow.report.diagrams.fold import NEXT_TRIP, folded_plan
from rlflow.report.diagrams.graph_dot import NEXT_TRIP_LOOK, Direction
from rlflow.report.diagrams.legend import (
    EDGE_ATTRIBUTES,
    GRAPH_ATTRIBUTES,
    NODE_ATTRIBUTES,
    Row,
    edge_label,
    font,
    left_stacked,
    legend_label,
    line_sample,
    model_swatch,
    stacked,
    swatch,
    title_label,
)
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.plan.text import duration

HOST_POOL = "host"
REASON_WIDTH = 30
NOTE_WIDTH = 110
DEVICE_LINE = "#B8C2CC"

Dependency = tuple[str, str, str, int]


def plan_digraph(plan: Document, graph: Document, direction: Direction) -> graphviz.Digraph:
    """The picture of a plan document; `graph` is the document of the graph it runs."""
    plan = folded_plan(plan)
    digraph = graphviz.Digraph(
        f"{plan['pipeline']} {plan['placement']}",
        graph_attr={
            **GRAPH_ATTRIBUTES,
            "rankdir": direction,
            "nodesep": "0.3",
            "ranksep": "0.34",
            "newrank": "true",
            "label": legend_label(*_legend(plan, graph)),
        },
        node_attr=NODE_ATTRIBUTES,
        edge_attr=EDGE_ATTRIBUTES,
    )
    with digraph.subgraph(name="cluster_plan") as body:
        title = title_label(str(plan["pipeline"]), _facts(plan), _notes(plan))
        body.attr(label=title, labelloc="t", labeljust="l", color="white", margin="12")
        for pool, members in _columns(plan).items():
            _column(body, pool, members, plan, graph)
        _edges(body, plan, graph)
    return digraph


def _facts(plan: Document) -> str:
    period = plan["timing"]["period"] if plan["timing"] else None
    facts = [f"placement {plan['placement']}", plan["cluster"], f"backend {plan['backend']}"]
    if period is not None:
        facts.append(f"{duration(period)} an iteration, estimated")
    return " · ".join(facts)


def _notes(plan: Document) -> list[str]:
    """What stands under the title: each pool's devices and peak, then what the passes noted."""
    pools = [_pool_facts(pool, plan) for pool in plan["pools"]]
    notes = [f"{note['rule']}: {note['text']}" for note in plan["notes"]]
    return [shorten(line, NOTE_WIDTH) for line in (*pools, *notes)]


def column_of(action: Document, plan: Document) -> str | None:
    """The pool an action is drawn in; None for one that works on two pools at once."""
    if action["devices"] == [-1] or tuple(action["devices"]) == (-1,):
        return HOST_POOL
    return action["pool"] if action["pool"] in plan["pools"] else None


def _columns(plan: Document) -> dict[str | None, list[Document]]:
    columns: dict[str | None, list[Document]] = {}
    for action in plan["actions"]:
        columns.setdefault(column_of(action, plan), []).append(action)
    return columns


def _column(
    body: graphviz.Digraph,
    pool: str | None,
    members: list[Document],
    plan: Document,
    graph: Document,
) -> None:
    if pool is None:
        for action in members:
            _action(body, action, plan, graph)
        return
    with body.subgraph(name=f"cluster_pool_{pool}") as column:
        column.attr(
            label=left_stacked([font(pool, size=13, bold=True)]),
            labelloc="t",
            labeljust="l",
            style="filled,rounded",
            fillcolor=POOL_FILL,
            color=LINE,
            margin="14",
        )
        for action in members:
            _action(column, action, plan, graph)


def _pool_facts(pool: str, plan: Document) -> str:
    devices = list(plan["pools"][pool])
    first, last = devices[0], devices[-1]
    run = len(devices) > 1 and devices == list(range(first, last + 1))
    numbers = f"{first}-{last}" if run else ", ".join(map(str, devices))
    text = f"pool {pool}: device{'s' if len(devices) > 1 else ''} {numbers}"
    peaks = [plan["peaks"].get(str(device), 0) for device in devices]
    if any(peaks):
        budget = min(plan["budgets"].get(str(device), 0) for device in devices)
        text += f", peak memory {amount(max(peaks))} of {amount(budget)}"
    return text


def _action(body: graphviz.Digraph, action: Document, plan: Document, graph: Document) -> None:
    inserted = ACTION_STYLES.get(action["kind"])
    style = inserted or _run_style(action, plan, graph)
    lines = [
        font(f"{action['number']}  ", size=9, colour=style.ink if inserted else FAINT)
        + font(_name(action), size=12 if inserted is None else 11, colour=style.ink, bold=True)
    ]
    lines += [font(text, size=9, colour=style.ink) for text in _subject(action)]
    lines.append(font(_figures(action), size=9, colour=style.ink if inserted else SOFT_INK))
    if inserted:
        lines += [
            font(line, size=8, colour=style.ink)
            for line in wrapped(_because(action), REASON_WIDTH, 2)
        ]
    body.node(
        _id(action["id"]),
        label=stacked(lines),
        shape=style.shape,
        peripheries=str(style.borders),
        style="filled" if inserted else "filled,rounded",
        fillcolor=style.fill,
        color=style.line,
        penwidth="2.2" if inserted is None and style.line != NO_MODEL else "1.2",
        margin="0.14,0.06",
        tooltip=graphviz.escape(f"{action['id']}: {action['reason']['text']}"),
    )


def action_model(action: Document, plan: Document) -> str | None:
    """The model that an action works on, if it does."""
    models = {instance["name"]: instance["model"] for instance in plan["instances"]}
    return models.get(action["instance"] or "")


def _run_style(action: Document, plan: Document, graph: Document) -> Style:
    model = action_model(action, plan)
    if model is None:
        return Style(word="run", fill=PAPER)
    colour = graph_colours(graph)[model]
    return Style(word="run", fill=tint(colour, MODEL_TINT), line=colour)


def _name(action: Document) -> str:
    if action["kind"] == "run":
        return str(action["id"])
    return ACTION_STYLES[action["kind"]].word + mode_text(action)


def _subject(action: Document) -> list[str]:
    if action["kind"] == "reshard":
        first, *others = action["targets"]
        return [f"{action['instance']} → {first}", *(f"and {other}" for other in others)]
    ahead = [f"{action['ahead']} ahead"] if action["ahead"] else []
    if action["kind"] == "transfer":
        fields = ", ".join(action["fields"])
        return [*wrapped(f"{action['node']}: {fields}", REASON_WIDTH, 3), *ahead]
    if action["part"]:
        return [str(action["part"])]
    period = [] if action["every"] == 1 else [f"every {action['every']} iterations"]
    trips = [f"each of up to {action['trips']} trips"] if action["trips"] > 1 else []
    return [*period, *trips, *ahead]


def _because(action: Document) -> str:
    """The reason; without what a transfer's own lines say already."""
    text = str(action["reason"]["text"])
    return text.rpartition("; ")[2] if action["kind"] == "transfer" else text


def _figures(action: Document) -> str:
    seconds = action["cost"]["seconds"]
    facts = ["time not known" if seconds is None else duration(seconds)]
    if action["kind"] != "run" and action["cost"]["moved"]:
        facts.append(f"{amount(action['cost']['moved'])} moved")
    if action["peak"] is not None and action["kind"] in ("run", "reshard"):
        facts.append(f"peak {amount(action['peak'])}")
    return " · ".join(facts)


def dependencies(plan: Document) -> Iterator[Dependency]:
    """(before, after, kind, distance) of the edges that a picture needs.

    Left out: order and device edges within an iteration that a longer path implies, and
    order edges between iterations whose ends take turns on a device anyway.
    """
    dag = nx.DiGraph()
    devices = {action["id"]: set(action["devices"]) - {-1} for action in plan["actions"]}
    found = [
        (dep["action"], action["id"], dep["kind"], dep["distance"])
        for action in plan["actions"]
        for dep in action["after"]
    ]
    dag.add_edges_from(
        (before, after)
        for before, after, kind, distance in found
        if not distance and kind != NEXT_TRIP
    )
    needed = set(nx.transitive_reduction(dag).edges)
    for before, after, kind, distance in found:
        if kind in ("order", "device") and distance == 0 and (before, after) not in needed:
            continue
        if kind == "order" and distance > 0 and devices[before] & devices[after]:
            continue
        yield before, after, kind, distance


def _edges(body: graphviz.Digraph, plan: Document, graph: Document) -> None:
    """Edges to a later iteration are laid out backwards, so that time runs one way.

    A device's turn ends with a dashed grey edge to its next one; it needs no figure.
    """
    colours = graph_colours(graph)
    place = {action["id"]: index for index, action in enumerate(plan["actions"])}
    for before, after, kind, distance in dependencies(plan):
        look: dict[str, str] = {"color": SOFT_INK}
        if kind == "device":
            look |= {"color": DEVICE_LINE, "arrowsize": "0.5", "weight": "0" if distance else "6"}
        elif kind == "weights":
            model = action_model(plan["actions"][place[before]], plan)
            look |= {"color": colours.get(model or "", NO_MODEL), "penwidth": "1.6"}
        elif kind == "order":
            look |= {"style": "dotted", "penwidth": "1.4"}
        ends = [_id(before), _id(after)]
        if kind == NEXT_TRIP:
            body.edge(*reversed(ends), edgetooltip="the next trip of the loop", **NEXT_TRIP_LOOK)
            continue
        if distance:
            mark = font(f"@{distance}", size=9, colour=look["color"], bold=True)
            look |= {"style": "dashed", "weight": "0"}
            look |= {} if kind == "device" else {"label": edge_label([mark])}
            if place[before] > place[after]:
                ends.reverse()
                look["dir"] = "back"
        body.edge(*ends, edgetooltip=kind, **look)


def _legend(plan: Document, graph: Document) -> tuple[list[Row], list[str]]:
    kinds = {action["kind"] for action in plan["actions"]}
    edges = list(dependencies(plan))
    lines = [line_sample("━━▶", "rows", SOFT_INK)]
    for kind, stroke, word, colour in (
        ("weights", "━━▶", "weights", NO_MODEL),
        ("order", "· · · ▶", "order", SOFT_INK),
        ("device", "━━▶", "turns on a device", DEVICE_LINE),
        (NEXT_TRIP, "╌ ╌ ▶", "the next trip", FAINT),
    ):
        if any(edge[2] == kind for edge in edges):
            lines.append(line_sample(stroke, word, colour))
    if any(edge[3] for edge in edges):
        lines.append(line_sample("╌ ╌ ▶", "@d: d turns later", SOFT_INK))
    models = {action_model(action, plan) for action in plan["actions"]}
    named = [model_swatch(*entry) for entry in graph_colours(graph).items() if entry[0] in models]
    inserted = [swatch(style) for kind, style in ACTION_STYLES.items() if kind in kinds]
    return [("models", named), ("inserted", inserted)], lines


def _id(name: str) -> str:
    """An action's identity in DOT: a colon would be read as a port."""
    return name.replace(":", "_")
