"""Graphs and plans as Mermaid flowcharts, which GitHub draws in a README.

Drawn from plain data. Every text is quoted and its special characters written as
Mermaid's entity codes, so that no option of a node can end a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rlflow.report.charts.look import (
    ACTION_STYLES,
    INK,
    MODEL_TINT,
    NO_MODEL,
    NODE_STYLES,
    PAPER,
    Document,
    edge_fields,
    graph_colours,
    kind_of,
    listed_names,
    mode_text,
    shorten,
    tint,
)
from rlflow.report.diagrams.fold import NEXT_TRIP, folded_graph, folded_plan
from rlflow.report.diagrams.graph_dot import NONE
from rlflow.report.diagrams.plan_dot import action_model, column_of, dependencies
from rlflow.report.diagrams.versions import versions_of
from rlflow.scheduler.plan.text import duration

Direction = Literal["LR", "TB"]

MOST_FIELDS = 4
REASON_WIDTH = 60
PLAIN = frozenset(" .,:@()=+-_/?'→·…")


def quoted(text: str) -> str:
    """A label: plain characters stay, all others become entity codes such as `#91;`."""
    safe = (c if c.isalnum() or c in PLAIN else f"#{ord(c)};" for c in text)
    return "".join(safe)


def _label(lines: Iterable[str]) -> str:
    return '"' + "<br/>".join(quoted(line) for line in lines) + '"'


def graph_mermaid(graph: Document, direction: Direction, dropped: Mapping[str, str] = NONE) -> str:
    """A graph document as a flowchart: fields on data edges, weights dotted with @distance.

    `dropped` are nodes that will not run, with the reason.
    """
    graph = folded_graph(graph)
    ids = {node["name"]: f"n{index}" for index, node in enumerate(graph["nodes"])}
    fields = edge_fields(graph)
    lines = [f"flowchart {direction}"]
    used = versions_of(graph)
    for node in graph["nodes"]:
        opening, closing = ("[(", ")]") if kind_of(node) == "data" else ("(", ")")
        model = f"[{node['model']}]" if node["model"] else ""
        every = f", every {node['every']} iterations" if node["every"] != 1 else ""
        gone = [f"will be dropped: {dropped[n]}" for n in (node["name"],) if n in dropped]
        said = [*used.get(node["name"], []), *gone]
        text = _label([node["name"], f"{node['op']}{model}{every}", *said])
        lines.append(f"  {ids[node['name']]}{opening}{text}{closing}")
    for edge in graph["edges"]:
        pair = (edge["source"], edge["target"])
        source, target = ids[pair[0]], ids[pair[1]]
        if edge["kind"] == "data":
            lines.append(
                f"  {source} -->|{_label(listed_names(fields[pair], MOST_FIELDS))}| {target}"
            )
        elif edge["kind"] == "weights" or (edge["kind"] == "state" and edge["distance"]):
            word = "weights" if edge["kind"] == "weights" else "measured"
            mark = _label([f"{word} @{edge['distance']}"])
            lines.append(f"  {source} -.->|{mark}| {target}")
        elif edge["kind"] == NEXT_TRIP:
            lines.append(f"  {source} -.->|{_label(['next trip'])}| {target}")
        elif pair not in fields:
            lines.append(f"  {source} -.-> {target}")
    colours = graph_colours(graph)
    for node in graph["nodes"]:
        line = colours.get(node["model"] or "", NO_MODEL)
        fill = tint(line, MODEL_TINT) if node["model"] else NODE_STYLES[kind_of(node)].fill
        lines.append(_style(ids[node["name"]], fill, line, INK, bool(node["model"])))
    return "\n".join(lines)


def plan_mermaid(plan: Document, graph: Document, direction: Direction) -> str:
    """A plan document as a flowchart: a subgraph per pool, inserted actions with their reason."""
    plan = folded_plan(plan)
    ids = {action["id"]: f"a{action['number']}" for action in plan["actions"]}
    columns: dict[str | None, list[Document]] = {}
    for action in plan["actions"]:
        columns.setdefault(column_of(action, plan), []).append(action)
    lines = [f"flowchart {direction}"]
    for number, (pool, actions) in enumerate(columns.items()):
        indent = "  " if pool is None else "    "
        if pool is not None:
            lines.append(f"  subgraph p{number}[{_label([pool])}]")
        lines += [f"{indent}{_action(action, ids)}" for action in actions]
        if pool is not None:
            lines.append("  end")
    for before, after, kind, distance in dependencies(plan):
        mark = f'|"@{distance}"|' if distance else ""
        mark = '|"next trip"|' if kind == NEXT_TRIP else mark
        stroke = "-->" if kind in ("data", "weights") and not distance else "-.->"
        lines.append(f"  {ids[before]} {stroke}{mark} {ids[after]}")
    colours = graph_colours(graph)
    for action in plan["actions"]:
        lines.append(_action_style(action, plan, ids, colours))
    return "\n".join(lines)


def _action(action: Document, ids: Mapping[str, str]) -> str:
    number = ids[action["id"]][1:]
    seconds = duration(action["cost"]["seconds"])
    seconds += f", {action['ahead']} ahead" if action["ahead"] else ""
    seconds += f", each of {action['trips']} trips" if action["trips"] > 1 else ""
    if action["kind"] == "run":
        return f"{ids[action['id']]}({_label([number + ' ' + action['id'], seconds])})"
    what = " + ".join(action["targets"]) or action["part"] or action["node"]
    reason = shorten(action["reason"]["text"], REASON_WIDTH)
    label = _label([f"{number} {action['kind']}{mode_text(action)} {what}", seconds, reason])
    return f"{ids[action['id']]}[{label}]"


def _action_style(
    action: Document, plan: Document, ids: Mapping[str, str], colours: Mapping[str, str]
) -> str:
    name = ids[action["id"]]
    if action["kind"] != "run":
        look = ACTION_STYLES[action["kind"]]
        return _style(name, look.fill, look.line, look.ink, False)
    model = action_model(action, plan)
    if model is None:
        return _style(name, PAPER, NO_MODEL, INK, False)
    return _style(name, tint(colours[model], MODEL_TINT), colours[model], INK, True)


def _style(name: str, fill: str, line: str, ink: str, thick: bool) -> str:
    width = "3px" if thick else "1px"
    return f"  style {name} fill:{fill},stroke:{line},stroke-width:{width},color:{ink}"
