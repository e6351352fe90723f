"""Who made the rows that a node works on, and how long its prompts and responses may be.

Rows of several row sets below each other have several makers. Knows graphs; no costs.
"""

from __future__ import annotations

from typing import Any

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drawn, SamplingOptions
from rlflow.graph.rules.nesting import nodes_within

ASSUMED_PROMPT_TOKENS = 64
ASSUMED_RESPONSE_TOKENS = 256
LOOKED_AT = 64
MOST_ROWS = 300_000


def origins(graph: Graph, node: Node) -> tuple[Node, ...]:
    """The nodes that made the rows: a rollout, the data, or what ended a loop without any.

    Each of several row sets has its own; what counts, chooses or repeats rows makes none.
    """
    maker = graph.node(node.rows_of) if node.rows_of else node
    if maker.ends_loop:
        sampled = (n for n in nodes_within(graph, maker.name) if n.op.rows == "expand")
        return (next(sampled, maker),)
    if maker.counts is None:
        return (maker,)
    firsts = {bound.part: graph.node(bound.source) for bound in reversed(maker.inputs)}
    found = [one for part in sorted(firsts) for one in origins(graph, firsts[part])]
    return tuple(dict.fromkeys(found)) or (maker,)


class Prompts:
    """Tokens of the longest prompt of each data, which is read once for all that is estimated."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}

    def tokens(self, graph: Graph, origin: Node) -> int:
        """Tokens of the longest prompt of the rows that a node has made."""
        data = _data_of(graph, origin)
        if id(data) not in self._known:
            self._known[id(data)] = data, _longest(data)
        return self._known[id(data)][1]


def _data_of(graph: Graph, origin: Node) -> Any:
    """The data that a node's prompts are drawn from; None where they are from none."""
    while (drawn := origin.role(Drawn)) is None:
        parents = [graph.node(name) for name in origin.sources]
        if not parents:
            return None
        origin = parents[0]
    return drawn.data


def _longest(data: Any) -> int:
    """Tokens of the longest prompt: as its first rows have characters, where they are here."""
    if data is None or data.remote or (data.size() or MOST_ROWS) >= MOST_ROWS:
        return ASSUMED_PROMPT_TOKENS
    return max(len(str(row["prompt"])) for row in data.rows()[:LOOKED_AT])


def response_tokens(origin: Node) -> int:
    """Tokens of the longest response of the rows that a node has made, or an assumed number."""
    sampling = origin.role(SamplingOptions)
    return int((sampling and sampling.max_new_tokens) or ASSUMED_RESPONSE_TOKENS)
