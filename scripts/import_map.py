"""Draws who imports whom: `python scripts/import_map.py` writes docs/images/imports*.svg.

An arrow goes from a package to one that it imports. Left out is an arrow that others imply: where a
imports b and b imports c, one from a to c. So the picture is the order in which packages build on
each other. `tests/test_site.py` draws it again and compares.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

from rlflow.report.diagrams.draw import draw

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rlflow"
PICTURES = {"imports.svg": (), "imports_scheduler.svg": ("scheduler",)}
IMPORTS = (ast.Import, ast.ImportFrom)
WITH_TORCH = "#ffe0b2"
HEAD = """digraph {
rankdir=TB; nodesep=0.25; ranksep=0.45; bgcolor="transparent";
node [shape=box, style="rounded,filled", fontname="DejaVu Sans", fontsize=12,
      color="#90a4ae", fillcolor="#eceff1", fontcolor="#263238", height=0.35, margin="0.14,0.05"];
edge [color="#78909c", arrowsize=0.6];
"""


def named(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, ...]]:
    """What an import names, as the parts of dotted names."""
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif node.module:
        yield from (tuple(f"{node.module}.{alias.name}".split(".")) for alias in node.names)


@cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[tuple[str, ...]]:
    """What a file imports, at its top or within a function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, IMPORTS):
            yield from named(node)


def needs_torch(path: Path) -> bool:
    """Whether importing a file imports torch, and not one of its functions."""
    top = (node for node in parsed(path).body if isinstance(node, IMPORTS))
    return any(name[0] == "torch" for node in top for name in named(node))


def imports(below: tuple[str, ...]) -> nx.DiGraph:
    """Who imports whom among the files and folders directly below a folder of rlflow."""
    graph = nx.DiGraph(torch=set())
    depth = len(below)
    for path in sorted(PACKAGE.joinpath(*below).rglob("*.py")):
        names = path.relative_to(PACKAGE).with_suffix("").parts
        if names[depth] == "__init__":
            continue
        graph.add_node(names[depth])
        if needs_torch(path):
            graph.graph["torch"].add(names[depth])
        for target in imported(path):
            within = target[0] == "rlflow" and target[1 : 1 + depth] == below
            if within and len(target) > depth + 1 and target[depth + 1] != names[depth]:
                graph.add_edge(names[depth], target[depth + 1])
    graph.remove_nodes_from([n for n in graph if not exists(PACKAGE.joinpath(*below, n))])
    return graph


def exists(path: Path) -> bool:
    """Whether a name is that of a file or a folder, and not of something within one."""
    return path.is_dir() or path.with_suffix(".py").is_file()


def dot(graph: nx.DiGraph) -> str:
    """The picture as DOT text; packages that import each other are one box."""
    boxes = nx.condensation(graph)
    labels = {box: ", ".join(sorted(boxes.nodes[box]["members"])) for box in boxes}
    kept = nx.transitive_reduction(boxes)
    tints = {box: f' [fillcolor="{WITH_TORCH}"]' for box in boxes if torch_in(boxes, box, graph)}
    lines = sorted(f'"{label}"{tints.get(box, "")};' for box, label in labels.items())
    lines += sorted(f'"{labels[a]}" -> "{labels[b]}";' for a, b in kept.edges)
    return HEAD + "\n".join(lines) + "\n}\n"


def torch_in(boxes: nx.DiGraph, box: int, graph: nx.DiGraph) -> bool:
    """Whether a file of a box imports torch."""
    return not graph.graph["torch"].isdisjoint(boxes.nodes[box]["members"])


def picture(below: tuple[str, ...]) -> bytes:
    """The picture of a folder of rlflow."""
    return draw(dot(imports(below)), "svg")


if __name__ == "__main__":
    for name, below in PICTURES.items():
        (ROOT / "docs" / "images" / name).write_bytes(picture(below))
