"""Ceilings: files of 400 lines, functions of 60, four levels of nesting in rlflow."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rlflow"
FILES = sorted(PACKAGE.rglob("*.py"))
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def functions(path):
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def lines(node):
    return node.end_lineno - node.lineno + 1


def nesting(node, depth=0):
    inside = []
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and child in node.orelse and isinstance(child, ast.If)
        inside.append(nesting(child, depth + (isinstance(child, BLOCKS) and not chained)))
    return max(inside, default=depth)


def test_files_are_short():
    long = {str(f.relative_to(PACKAGE)): len(f.read_text().splitlines()) for f in FILES}

    assert {} == {name: count for name, count in long.items() if count > 400}
    assert statistics.median(long.values()) <= 150


def test_functions_are_short():
    counts = {f"{f.name}:{node.name}": lines(node) for f in FILES for node in functions(f)}

    assert {} == {name: count for name, count in counts.items() if count > 60}
    assert statistics.median(counts.values()) <= 10


def test_nesting_is_shallow():
    deep = {f"{f.name}:{node.name}": nesting(node) for f in FILES for node in functions(f)}

    assert {} == {name: depth for name, depth in deep.items() if depth > 4}


def test_every_file_opens_with_a_docstring():
    assert [] == [str(f) for f in FILES if not ast.get_docstring(ast.parse(f.read_text()))]
