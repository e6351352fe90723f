"""What a user's function keeps from call to call where no checkpoint can know of it.

Read from its source, which is not run: globals and names of an enclosing function that it sets,
and mutable ones of its module, its closure or its defaults that it changes in place.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

CHANGES = {
    *("append", "extend", "insert", "pop", "popleft", "appendleft", "remove", "clear", "sort"),
    *("update", "setdefault", "popitem", "add", "discard", "reverse"),
}
MUTABLE = (list, dict, set, bytearray, deque)


def remembers(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names that a function keeps state in, sorted; none where there is no source of it."""
    while isinstance(function, functools.partial):
        function = function.func
    found = inspect.unwrap(function)
    if not inspect.isfunction(found):
        return ()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    except (OSError, TypeError, SyntaxError):
        return ()
    code = found.__code__
    outside = {**found.__globals__, **_closure(found)}
    held = {name: value for name, value in outside.items() if name not in code.co_varnames}
    held |= {name: p.default for name, p in inspect.signature(found).parameters.items()}
    mutable = {name for name, value in held.items() if isinstance(value, MUTABLE)}
    return tuple(sorted(set(_kept(tree, mutable, set(code.co_freevars)))))


def _closure(function: Any) -> dict[str, Any]:
    """What names of enclosing functions hold; those that are not set yet are left out."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = {}
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _kept(tree: ast.AST, mutable: set[str], free: set[str]) -> Iterator[str]:
    """Names that are set outside of the function, and mutable ones that it changes in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Nonlocal):
            yield from (name for name in node.names if name in free)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from _of(node.value, mutable)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CHANGES:
            yield from _of(node.func.value, mutable)  # type: ignore[attr-defined]


def _of(node: ast.expr, mutable: set[str]) -> Iterator[str]:
    """The name at the bottom of an expression such as `seen[key][0]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name) and node.id in mutable:
        yield node.id
