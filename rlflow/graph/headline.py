"""Which metrics headline a run: what training is to raise, and how that does on held-out data.

They follow from the graph: the rewards from which a policy's updates learn, or else their losses,
and the rewards of evaluations. A pipeline may name others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlflow.errors import Finding, Source, known_names, near_names
from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.nesting import declared_name

REWARD = "reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """Names of metrics, as `metrics.jsonl` has them, the foremost first."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys((*self.training, *self.held_out)))


def headline(graph: Graph) -> Headline:
    """The metrics that headline a run of a graph; those that its pipeline names come first.

    Of updates, those count whose model samples what is learned from; where there is none, all.
    """
    updates = [node for node in graph.nodes if node.op.use == "train"]
    sampling = {node.model for node in graph.nodes if node.op.rows == "expand"}
    learning = [node for node in updates if node.model in sampling] or updates
    found = [name for update in learning for name in _learned_from(graph, update)]
    evaluations = [f"{node.name}/{REWARD}" for node in graph.nodes if node.op.name == "evaluate"]
    return Headline(
        training=tuple(dict.fromkeys(graph.headline or found)), held_out=tuple(evaluations)
    )


def _learned_from(graph: Graph, update: Node) -> list[str]:
    """The rewards that are nearest above an update, or its loss where there are none."""
    level, seen = [update], {update.name}
    while level:
        found = [
            name
            for node in level
            if REWARD not in {made.name for made in node.op.outputs}
            for bound in node.inputs
            if bound.name == REWARD
            for name in _metrics_of(graph, bound.source)
        ]
        if found:
            return found
        above = dict.fromkeys(source for node in level for source in node.sources)
        level = [graph.node(name) for name in above if name not in seen]
        seen.update(above)
    return [f"{update.name}/loss"]


def _metrics_of(graph: Graph, source: str) -> list[str]:
    """The metric in which a node's rewards are logged; of a loop's end, what is logged within."""
    node = graph.node(source)
    if node.op.name in (REWARD, "scores"):
        return [f"{declared_name(source)}/mean"]
    episodes = [n.name for n in graph.nodes if n.op.name == "ended" and source in n.sources]
    if episodes:
        return [f"{declared_name(name)}/{REWARD}" for name in episodes]
    inner = [bound.source for bound in node.inputs if bound.field.name == REWARD]
    return [name for each in dict.fromkeys(inner) for name in _metrics_of(graph, each)]


def no_numbers(names: Iterable[str], nodes: Sequence[Node], where: Source | None) -> list[Finding]:
    """A finding for each name of a headline that is no `node/number` of a node that there is."""
    known = [node.name for node in nodes]
    return [
        Finding(
            code="E133",
            what=f"headline={name!r} is no number of a node",
            where=where,
            expected=f"NODE/NUMBER, such as reward/mean, of {known_names(known)}",
            near=near_names(name.partition("/")[0], known),
        )
        for name in names
        if not any(name.startswith(f"{node}/") for node in known)
    ]


def graph_document(graph: Graph) -> dict[str, Any]:
    """A graph as a run writes it: plain data, its hash, and what headlines a run of it."""
    return graph.to_json() | {"headline": asdict(headline(graph)), "hash": graph.hash}
