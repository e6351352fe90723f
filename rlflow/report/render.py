"""`render`: a graph or a plan in any format, by name or by the suffix of a file.

The one door to the pictures; it knows which drawer makes which format. Drawers are
imported when they are used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from rlflow.errors import Finding, UsageError, known_names, near_names
from rlflow.graph.graph import Graph
from rlflow.scheduler.passes.rewrite.unused import unread
from rlflow.scheduler.plan.plan import Plan

Level = Literal["graph", "plan"]
Direction = Literal["LR", "TB"]

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".mmd": "mermaid",
    ".mermaid": "mermaid",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".json": "json",
}
FORMATS = tuple(dict.fromkeys(SUFFIXES.values()))


def format_of(format: str | None, output: Path | None) -> str:
    """The format asked for: by name, else by the file's suffix, else text.

    Raises UsageError for a name or suffix that stands for no format.
    """
    if format is not None:
        if format in FORMATS:
            return format
        raise UsageError(_unknown(f"--format {format}", format, FORMATS))
    if output is None or str(output) == "-":
        return "text"
    if output.suffix.lower() in SUFFIXES:
        return SUFFIXES[output.suffix.lower()]
    raise UsageError(_unknown(f"-o {output}", output.suffix.lower(), tuple(SUFFIXES)))


def render(
    graph: Graph,
    plan: Plan | None,
    *,
    level: Level,
    format: str | None = None,
    direction: Direction = "TB",
    output: Path | None = None,
) -> str | bytes:
    """The graph (`level="graph"`) or the plan: text, mermaid, dot, json as str, pictures as bytes.

    `direction` is the way of time in pictures: TB is top to bottom, LR left to right. With
    an `output` the result is written there too, unless it is `-`. Raises UsageError for an
    unknown format, for a plan that is not given, and where nothing here can draw.
    """
    form = format_of(format, output)
    if level == "plan" and plan is None:
        raise UsageError(
            Finding(
                code="E664",
                what="a picture of a plan needs a placement",
                fix="--level graph, or --placement NAME",
            )
        )
    if plan is not None and level == "plan":
        result = _render_plan(plan, form, direction)
    else:
        result = _render_graph(graph, form, direction)
    if output is not None and str(output) != "-":
        _write(output, result)
    return result


def _render_graph(graph: Graph, form: str, direction: Direction) -> str | bytes:
    if form == "text":
        from rlflow.graph.text import INDENT, graph_text

        gone = [f"{INDENT}{name}: {why}" for name, why in unread(graph).items()]
        return "\n".join(
            [graph_text(graph).rstrip("\n"), *(["", "will be dropped", *gone] if gone else [])]
        )
    if form == "json":
        return _json(graph.to_json())
    if form == "mermaid":
        from rlflow.report.diagrams.mermaid import graph_mermaid

        return graph_mermaid(graph.to_json(), direction, unread(graph))
    from rlflow.report.diagrams.graph_dot import graph_digraph

    return _picture(graph_digraph(graph.to_json(), direction, unread(graph)).source, form)


def _render_plan(plan: Plan, form: str, direction: Direction) -> str | bytes:
    if form == "text":
        from rlflow.scheduler.plan.text import plan_text

        return plan_text(plan)
    if form == "json":
        return _json(plan.to_json())
    if form == "mermaid":
        from rlflow.report.diagrams.mermaid import plan_mermaid

        return plan_mermaid(plan.to_json(), plan.graph.to_json(), direction)
    from rlflow.report.diagrams.plan_dot import plan_digraph

    return _picture(plan_digraph(plan.to_json(), plan.graph.to_json(), direction).source, form)


def _picture(source: str, form: str) -> str | bytes:
    if form == "dot":
        return source
    from rlflow.report.diagrams.draw import draw

    return draw(source, form)


def _json(document: dict[str, object]) -> str:
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False)


def _write(output: Path, result: str | bytes) -> None:
    data = result if isinstance(result, bytes) else result.rstrip("\n").encode() + b"\n"
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UsageError(
            Finding(
                code="E665",
                what=f"cannot write {output}: {error.strerror}",
                fix="name a directory that exists: -o picture.svg",
            )
        ) from error


def _unknown(what: str, word: str, known: tuple[str, ...]) -> Finding:
    return Finding(
        code="E661",
        what=f"{what} names no format",
        got=repr(word) if word else "no suffix",
        expected=known_names(known),
        near=near_names(word, known),
        fix="--format svg, or -o picture.svg",
    )
