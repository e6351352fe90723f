"""Notes on functions that keep state which a resumed run would not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Calling
from rlflow.graph.rules.remembering import remembers
from rlflow.graph.user.op import USER_BODY


def memory_notes(graph: Graph) -> list[str]:
    """A line for every function that keeps state in its module, its closure or its defaults."""
    return [
        f"{node.name} keeps {', '.join(names)} from call to call, which no checkpoint holds and "
        f"each process has of its own{_advice(node)}"
        for node in graph.nodes
        if (names := sorted({name for each in _functions(node) for name in remembers(each)}))
    ]


def _functions(node: Node) -> list[Callable[..., Any]]:
    calling = node.role(Calling)
    function = node.op.function if calling is None else calling.function
    each = getattr(function, "functions", None)
    found = list(each.values()) if isinstance(each, Mapping) else [function]
    return [one for one in found if callable(one)]


def _advice(node: Node) -> str:
    own = node.op.body == USER_BODY
    return '; numbers of an op with per="batch" are kept by @rf.op(state={...})' if own else ""
