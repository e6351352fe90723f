"""Loops within loops: which trip of each a node is of, and what a loop has in it.

A loop within another has a node that ends it in every trip of that, so the trip of a node and
those of the ends of its loops say where it is. Knows nothing of what loops are for.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import LoopEnd

OF_TRIP = "#"


@dataclass(frozen=True, slots=True)
class NodeName:
    """What a node is called: by its declared name, and by the trips that it is the copy of.

    `trips` has its trip of each loop around it, from 0, the outermost first. It is written `x#3`
    for trip 3, `x#2.3` for trip 3 within trip 2; the first trips have the name as it was declared.
    """

    declared: str
    trips: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not any(self.trips):
            return self.declared
        return f"{self.declared}{OF_TRIP}{'.'.join(str(index + 1) for index in self.trips)}"

    @classmethod
    def parse(cls, written: str) -> NodeName:
        """The name that is written so."""
        declared, _, numbers = written.partition(OF_TRIP)
        return cls(declared, tuple(int(number) - 1 for number in numbers.split(".") if number))


def declared_name(written: str) -> str:
    """The name under which a node was declared, of which this is a trip's copy or itself."""
    return NodeName.parse(written).declared


def nodes_within(graph: Graph, loop: str) -> tuple[Node, ...]:
    """The nodes of a loop and of those within it, in the order declared."""
    return tuple(n for n in graph.nodes if any(end.name == loop for end in graph.loops_of(n)))


def trips_of(graph: Graph, node: Node) -> tuple[tuple[int, int], ...]:
    """Which trip of each loop that it is in a node is of, and of how many, the outermost first."""
    levels = (node, *graph.loops_of(node))
    return tuple(level.trip for level in reversed(levels) if level.trip is not None)


def path(graph: Graph, node: Node) -> tuple[int, ...]:
    """Which trip of each loop that it is in a node is of, from 0, the outermost first."""
    return tuple(index for index, _ in trips_of(graph, node))


def draw_of(graph: Graph, node: Node, iteration: int) -> int:
    """Which draw of its kind a node makes: the iteration, or counted on over all trips."""
    draw = iteration
    for index, count in trips_of(graph, node):
        draw = draw * count + index
    return draw


def keeps_surplus(graph: Graph, loop: str | None = None) -> bool:
    """Whether a loop, or any at all, leaves rows over for the next iteration."""
    ends = graph.having(LoopEnd)
    return any(end.keeps_surplus for node, end in ends if loop in (None, node.name))
