"""Ceilings: functions of 60 lines, four levels of nesting; longer files than 400 say why."""

from __future__ import annotations

import ast
import statistics
from collections import Counter

from tests.sources import FILES, PACKAGE, nodes, tree

# Files of more than 400 lines, each with its reason. A file is as long as its subject: one that is
# cut in two to fit, with half of a class in each, is harder to read than a long one.
LONG = {
    "graph/graph.py": "a graph and its nodes, from which its edges follow, and its plain data",
    "scheduler/devices/hardware.py": "a table of kinds, each with its sources, and their rates",
    "scheduler/plan/plan.py": "a plan and all that its actions are made of, read side by side",
}
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def functions(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in nodes(path) if isinstance(node, kinds)]


def lines(node):
    return node.end_lineno - node.lineno + 1


def nesting(node, depth=0):
    inside = []
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
        inside.append(nesting(child, depth + (isinstance(child, BLOCKS) and not chained)))
    return max(inside, default=depth)


def test_a_long_file_says_why():
    counts = {str(f.relative_to(PACKAGE)): len(f.read_text().splitlines()) for f in FILES}

    assert set(LONG) == {name for name, count in counts.items() if count > 400}
    assert all(LONG.values())
    assert statistics.median(counts.values()) <= 150


def test_folders_are_small():
    counts = Counter(str(f.parent.relative_to(PACKAGE)) for f in FILES)

    assert {} == {name: count for name, count in counts.items() if count > 15}


def test_functions_are_short():
    counts = {f"{f.name}:{node.name}": lines(node) for f in FILES for node in functions(f)}

    assert {} == {name: count for name, count in counts.items() if count > 60}
    assert statistics.median(counts.values()) <= 10


def test_nesting_is_shallow():
    deep = {f"{f.name}:{node.name}": nesting(node) for f in FILES for node in functions(f)}

    assert {} == {name: depth for name, depth in deep.items() if depth > 4}


def test_every_file_opens_with_a_docstring():
    assert [] == [str(f) for f in FILES if not ast.get_docstring(tree(f))]
