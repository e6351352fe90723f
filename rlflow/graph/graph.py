"""The declared graph: nodes, the edges between them, and the models they use.

Frozen data. Edges are derived from the bindings of the nodes and from the weights
they read and write; an edge carries its distance in iterations. The graph knows
neither devices nor time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import networkx as nx

from rlflow.errors import Source
from rlflow.graph.fields import Field
from rlflow.graph.model import Model
from rlflow.graph.op import Op

EdgeKind = Literal["data", "weights", "order", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """An input of a node, bound to the field of another node that feeds it."""

    name: str
    source: str
    field: Field

    def __str__(self) -> str:
        renamed = "" if self.field.name == self.name else f"{self.field.name} as "
        return f"{self.source}.{renamed}{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A field that was offered to a node and that its options leave unread."""

    source: str
    field: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An op in a graph: its options in `params`, its period in iterations in `every`.

    `rows_of` names the node that made the rows it works on, itself where it makes rows.
    `loop` names the node that ends the loop it is in, `trip` which trip through that it is of,
    from 0, and how many there are at most.
    """

    name: str
    op: Op
    inputs: tuple[Binding, ...]
    params: tuple[tuple[str, Any], ...] = ()
    model: str | None = None
    every: int = 1
    rows_of: str | None = None
    declined: tuple[Declined, ...] = ()
    where: Source | None = None
    loop: str | None = None
    trip: tuple[int, int] | None = None

    def param(self, name: str) -> Any:
        """The option of that name; KeyError if the node has none."""
        return dict(self.params)[name]

    @property
    def reads_base(self) -> bool:
        """Whether its model's adapters are off: no update changes the weights that it reads."""
        return self.op.use == "forward" and ("adapters", "off") in self.params

    @property
    def drafter(self) -> str | None:
        """The model that proposes tokens to its own, if one does."""
        return dict(self.params).get("drafter")

    @property
    def averages(self) -> str | None:
        """The model whose weights it averages into those of its own, if it does."""
        return dict(self.params).get("averages")

    @property
    def shares(self) -> str | None:
        """The name of what it keeps from call to call where others read or write that too."""
        return dict(self.params).get("state")

    @property
    def resumes(self) -> str | None:
        """The rollout whose unfinished rows it goes on with, if it does."""
        return dict(self.params).get("resumes")

    @property
    def ends_loop(self) -> bool:
        """Whether it has what the trips of a loop have made."""
        return self.op.function is None and "at_most" in dict(self.params)

    @property
    def is_gate(self) -> bool:
        """Whether it says, after each trip of its loop, how much of the goal that has reached."""
        return self.loop is not None and self.op.function is None and "goal" in dict(self.params)

    @property
    def sources(self) -> tuple[str, ...]:
        """The nodes that feed this one, each once, in order of the inputs."""
        return tuple(dict.fromkeys(binding.source for binding in self.inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """`target` in iteration i waits for `source` in iteration i - distance, because of `reason`."""

    source: str
    target: str
    kind: EdgeKind
    distance: int
    reason: str
    fields: tuple[str, ...] = ()
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A pipeline's dataflow: what is computed, from what, with which weights."""

    name: str
    nodes: tuple[Node, ...]
    models: tuple[Model, ...]
    staleness: int = 0
    source: Source | None = None

    def node(self, name: str) -> Node:
        """The node of that name; KeyError if there is none."""
        return self._by_name[name]

    def model(self, name: str) -> Model:
        """The model of that name; KeyError if there is none."""
        return self._models_by_name[name]

    def has_node(self, name: str) -> bool:
        """Whether a node of that name is declared."""
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _models_by_name(self) -> dict[str, Model]:
        return {model.name: model for model in self.models}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges: data, then weights, then read-before-write order, then shared state."""
        model_edges = (*self._weight_edges(), *self._order_edges())
        return (*self._data_edges(), *model_edges, *self._state_edges())

    def updates(self, model: str) -> tuple[Node, ...]:
        """The nodes that write a model's weights, in the order declared."""
        return tuple(n for n in self.nodes if n.model == model and n.op.use == "train")

    def readers(self, model: str) -> tuple[Node, ...]:
        """The nodes that read what updates of a model write, without writing it."""
        return tuple(
            n
            for n in self.nodes
            if (n.model == model and n.op.use in ("forward", "rollout") and not n.reads_base)
            or n.drafter == model
        )

    def sharing(self, state: str) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The nodes that read a shared state, and those that write it, in the order declared."""
        nodes = [node for node in self.nodes if node.shares == state]
        writers = tuple(node for node in nodes if node.op.effect == "effectful")
        return tuple(node for node in nodes if node not in writers), writers

    def averaging(self, model: str) -> tuple[Node, ...]:
        """The nodes that take what updates of a model have written into an average of it."""
        return tuple(n for n in self.nodes if n.averages == model != n.model)

    def lag(self, node: Node) -> int:
        """How many updates behind the newest weights a reader may be: the edge's distance - 1.

        Only rollouts that make tokens to learn from run ahead; an evaluation reads the newest. A
        rollout that is resumed goes on with weights of one update more, which later trips through
        its loop begin with, and later turns of its episodes.
        """
        if node.op.use != "rollout" or node.every != 1:
            return 0
        later = node.trip is not None and node.trip[0] > 0 and "until" in dict(node.params)
        turn = node.op.rows == "same" and node.op.output("response_tokens") is not None
        paused = turn and any(n.resumes is not None and n.model == node.model for n in self.nodes)
        if node.resumes is not None or later or paused:
            return max(self.staleness - 1, 0)
        return self.staleness if turn or node.op.rows == "expand" else 0

    def lag_of(self, node: Node, model: str) -> int:
        """How many updates behind the newest weights of a model a reader of it may be.

        A drafter changes no sample, so nobody waits for its last update.
        """
        return self.lag(node) + (node.drafter == model != node.model)

    def _data_edges(self) -> list[Edge]:
        edges = []
        for node in self.nodes:
            for source in node.sources:
                fields = tuple(sorted(b.field.name for b in node.inputs if b.source == source))
                reason = f"{node.name} reads {', '.join(fields)}"
                edges.append(
                    Edge(
                        source=source,
                        target=node.name,
                        kind="data",
                        distance=0,
                        reason=reason,
                        fields=fields,
                    )
                )
        return edges

    def _weight_edges(self) -> list[Edge]:
        edges = []
        for model in self.models:
            updates = self.updates(model.name)
            if not updates:
                continue
            last = updates[-1]
            for reader in self.readers(model.name):
                lag = self.lag_of(reader, model.name)
                version = "i" if lag == 0 else f"i-{lag}"
                edges.append(
                    Edge(
                        source=last.name,
                        target=reader.name,
                        kind="weights",
                        distance=1 + lag,
                        model=model.name,
                        reason=f"{reader.name} reads {model.name} v{version}",
                    )
                )
            for node in self.averaging(model.name):
                edges.append(
                    Edge(
                        source=last.name,
                        target=node.name,
                        kind="weights",
                        distance=0,
                        model=model.name,
                        reason=f"{node.name} takes {model.name} vi+1 into its average",
                    )
                )
            edges.append(
                Edge(
                    source=last.name,
                    target=updates[0].name,
                    kind="weights",
                    distance=1,
                    model=model.name,
                    reason=f"{updates[0].name} trains {model.name} vi",
                )
            )
        return edges

    def _order_edges(self) -> list[Edge]:
        edges = []
        for model in self.models:
            updates = self.updates(model.name)
            for before, after in itertools.pairwise(updates):
                edges.append(
                    Edge(
                        source=before.name,
                        target=after.name,
                        kind="order",
                        distance=0,
                        model=model.name,
                        reason=f"both write {model.name}, as declared",
                    )
                )
            if not updates:
                continue
            for reader in self.readers(model.name):
                edges.append(
                    Edge(
                        source=reader.name,
                        target=updates[0].name,
                        kind="order",
                        distance=0,
                        model=model.name,
                        reason=f"{reader.name} reads {model.name} before it is written",
                    )
                )
            for node in self.averaging(model.name):
                edges.append(
                    Edge(
                        source=node.name,
                        target=updates[0].name,
                        kind="order",
                        distance=1,
                        model=model.name,
                        reason=f"{node.name} reads {model.name} vi+1 before vi+2 is written",
                    )
                )
        return edges

    def _state_edges(self) -> list[Edge]:
        """Readers wait for the writers of as many updates before as weights may be old.

        Those of one iteration take turns, in the order of the trips that they are of.
        """
        edges = []
        for state in dict.fromkeys(node.shares for node in self.nodes if node.shares):
            readers, writers = self.sharing(state)
            lag = 1 + self.staleness
            waits = [(writers[-1], reader, lag) for reader in readers if writers]
            for line in (readers, writers):
                waits += [(one, other, 0) for one, other in itertools.pairwise(line)]
                waits += [(line[-1], line[0], 1)] if len(line) > 1 else []
            for source, target, distance in waits:
                turn = f"of iteration i-{distance}" if distance else "before it"
                reason = f"{target.name} reads {state} as {source.name} {turn} has left it"
                edges.append(
                    Edge(
                        source=source.name,
                        target=target.name,
                        kind="state",
                        distance=distance,
                        reason=reason,
                    )
                )
        return edges

    @cached_property
    def dag(self) -> nx.MultiDiGraph:
        """The edges at distance 0, as a networkx graph in the order declared."""
        dag = nx.MultiDiGraph()
        dag.add_nodes_from(node.name for node in self.nodes)
        dag.add_edges_from((e.source, e.target) for e in self.edges if e.distance == 0)
        return dag

    def order(self) -> list[str]:
        """Node names in dependency order; ties in the order declared."""
        rank = {node.name: index for index, node in enumerate(self.nodes)}
        return list(nx.lexicographical_topological_sort(self.dag, key=rank.__getitem__))

    def to_json(self) -> dict[str, Any]:
        """The graph as plain data, stable to the byte when dumped with sorted keys."""
        from rlflow.graph.text import param_text

        return {
            "name": self.name,
            "staleness": self.staleness,
            "models": [
                {"name": m.name, **m.model_dump(mode="json", exclude={"name"})} for m in self.models
            ],
            "nodes": [
                {
                    "name": n.name,
                    "op": n.op.name,
                    "per": n.op.per,
                    "use": n.op.use,
                    "model": n.model,
                    "every": n.every,
                    "inputs": {b.name: f"{b.source}.{b.field.name}" for b in n.inputs},
                    "outputs": [str(made) for made in n.op.outputs],
                    "params": {key: param_text(value) for key, value in n.params},
                    **({"loop": n.loop, "trip": n.trip} if n.loop is not None else {}),
                }
                for n in self.nodes
            ],
            "edges": [
                {
                    "source": e.source,
                    "target": e.target,
                    "kind": e.kind,
                    "distance": e.distance,
                    "reason": e.reason,
                }
                for e in self.edges
            ],
        }

    @cached_property
    def hash(self) -> str:
        """The content hash, hex: equal graphs have equal hashes in every process."""
        blob = json.dumps(self.to_json(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(blob.encode()).hexdigest()
