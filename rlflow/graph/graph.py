"""The declared graph: nodes, the edges between them, and the models they use.

Frozen data. Edges are derived from the bindings of the nodes and from the weights
they read and write; an edge carries its distance in iterations. The graph knows
neither devices nor time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import networkx as nx

from rlflow.errors import Source
from rlflow.graph.fields import Binding, Declined, Edge, references
from rlflow.graph.model import Model
from rlflow.graph.op import Op, param_text
from rlflow.graph.roles import (
    AdaptersOff,
    Averaged,
    Drafted,
    LoopEnd,
    LoopGate,
    Paused,
    Portion,
    Recalling,
    Recorded,
    Resumed,
    Role,
    Sharing,
    roles_of,
)
from rlflow.graph.rules.counts import Counts
from rlflow.graph.schedule import ALWAYS, Window, is_due, written
from rlflow.graph.user.lengths import Lengths

R = TypeVar("R", bound=Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An op in a graph: its options in `params`, its period in iterations in `every`.

    It is due in the iterations that `every` divides, of those `within` its window.
    `rows_of` names the node that made the rows it works on, itself where it makes rows.
    `loop` names the node that ends the loop it is in, `trip` which trip through that it is of,
    from 0, and how many there are at most. `counts` says how many rows it makes where that does
    not follow from its options. `roles` are what its options say that it is.
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
    within: Window = ALWAYS
    counts: Counts | None = None
    roles: tuple[Role, ...] = field(init=False, default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", roles_of(self.op.roles, self.params))

    @property
    def phase(self) -> int:
        """The remainder of the iterations that it is due in."""
        return 0

    @property
    def always(self) -> bool:
        """Whether it is due in every iteration."""
        return self.every == 1 and self.within == ALWAYS

    def due(self, iteration: int) -> bool:
        """Whether it runs in an iteration."""
        return is_due(self, iteration)

    def param(self, name: str) -> Any:
        """The option of that name; KeyError if the node has none."""
        return dict(self.params)[name]

    def role(self, kind: type[R]) -> R | None:
        """Its role of that kind; None where it has none."""
        return next((role for role in self.roles if isinstance(role, kind)), None)

    def as_a(self, kind: type[R]) -> R:
        """Its role of that kind; KeyError where it has none."""
        found = self.role(kind)
        if found is None:
            raise KeyError(f"{self.name} is no {kind.__name__}")
        return found

    def being(self, role: Role) -> Node:
        """The same node with the options that spell a role, in the place of those that did."""
        return replace(self, params=role.written(self.params))

    def without(self, kind: type[Role]) -> Node:
        """The same node without the options that spell a role."""
        words = kind.words()
        return replace(self, params=tuple(said for said in self.params if said[0] not in words))

    @property
    def reads_base(self) -> bool:
        """Whether its model's adapters are off: no update changes the weights that it reads."""
        return self.role(AdaptersOff) is not None

    @property
    def drafter(self) -> str | None:
        """The model that proposes tokens to its own, if one does."""
        drafted = self.role(Drafted)
        return None if drafted is None else drafted.by

    @property
    def averages(self) -> str | None:
        """The model whose weights it averages into those of its own, if it does."""
        averaged = self.role(Averaged)
        return None if averaged is None else averaged.source

    @property
    def shares(self) -> str | None:
        """The name of what it keeps from call to call where others read or write that too."""
        sharing = self.role(Sharing)
        return None if sharing is None else sharing.state

    @property
    def resumes(self) -> str | None:
        """The rollout whose unfinished rows it goes on with, if it does."""
        resumed = self.role(Resumed)
        return None if resumed is None else resumed.rollout

    @property
    def drawn_as(self) -> str:
        """The rollout whose rows it draws, all or some of them; its own name for any other."""
        portion = self.role(Portion)
        return self.resumes or (self.name if portion is None else portion.rollout)

    @property
    def ends_loop(self) -> bool:
        """Whether it has what the trips of a loop have made."""
        return self.role(LoopEnd) is not None

    @property
    def is_gate(self) -> bool:
        """Whether it says, after each trip of its loop, how much of the goal that has reached."""
        return self.loop is not None and self.role(LoopGate) is not None

    @property
    def sources(self) -> tuple[str, ...]:
        """The nodes that feed this one, each once, in order of the inputs."""
        return tuple(dict.fromkeys(binding.source for binding in self.inputs))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A pipeline's dataflow: what is computed, with which weights, and what headlines a run."""

    name: str
    nodes: tuple[Node, ...]
    models: tuple[Model, ...]
    staleness: int = 0
    source: Source | None = None
    headline: tuple[str, ...] = ()
    lengths: Lengths | None = None
    """What is said of prompts' and responses' lengths: estimates read it, and no hash does."""
    acceptance: float | None = None
    """What is said of the probability that a drafted token is accepted; read as lengths are."""

    def node(self, name: str) -> Node:
        """The node of that name; KeyError if there is none."""
        return self._by_name[name]

    def model(self, name: str) -> Model:
        """The model of that name; KeyError if there is none."""
        return self._models_by_name[name]

    def has_node(self, name: str) -> bool:
        """Whether a node of that name is declared."""
        return name in self._by_name

    def loops_of(self, node: Node) -> tuple[Node, ...]:
        """The nodes that end the loops which a node is in, from the innermost."""
        if node.loop is None or not self.has_node(node.loop):
            return ()
        end = self.node(node.loop)
        return (end, *self.loops_of(end))

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

    def having(self, kind: type[R]) -> tuple[tuple[Node, R], ...]:
        """The nodes that have a role of that kind, each with it, in the order declared."""
        found = ((node, node.role(kind)) for node in self.nodes)
        return tuple((node, role) for node, role in found if role is not None)

    def updates(self, model: str) -> tuple[Node, ...]:
        """The nodes that write a model's weights, in the order declared."""
        return tuple(n for n in self.nodes if n.model == model and n.op.use == "train")

    def written(self, model: str, version: int) -> int:
        """The newest version of a model's weights up to one: not every iteration need write."""
        return written(self.updates(model), version)

    def sampled_by(self, node: Node) -> str | None:
        """The model whose versions the tokens have that a node reads; None where nobody says."""
        while (bound := next((b for b in node.inputs if b.name == "version"), None)) is not None:
            node = self.node(bound.source)
            read = node.role(Recorded)
            if node.model is not None or read is not None:
                return node.model or (read.sampled_by if read else None)
        return None

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
        its loop begin with, and later turns of its episodes. So does a part of one that is drawn
        where an update ends before. Rows that live through some updates are sampled with weights as
        many newer.
        """
        if node.op.use != "rollout" or node.every != 1:
            return 0
        if (portion := node.role(Portion)) is not None and portion.helps:
            return max(self.staleness - 1, 0)
        trips = (level.trip for level in (node, *self.loops_of(node)))
        later = node.role(Paused) is not None and any(trip and trip[0] for trip in trips)
        turn = node.op.rows == "same" and node.op.output("response_tokens") is not None
        paused = turn and any(n.resumes is not None and n.model == node.model for n in self.nodes)
        if node.resumes is not None or later or paused:
            return max(self.staleness - 1, 0)
        if (lasting := node.role(Recalling)) is not None and node.op.rows == "expand":
            return self.staleness - lasting.keep
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
                edge = Edge(source=source.name, target=target.name, kind="state", distance=distance)
                edges.append(replace(edge, reason=reason))
        for name in (node.name for node in self.nodes if node.op.recalls):
            reason = f"{name} adds to the rows of iteration i-1"
            edges.append(Edge(source=name, target=name, kind="state", distance=1, reason=reason))
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
        return {
            "name": self.name,
            "staleness": self.staleness,
            "models": [
                {"name": m.name, **m.model_dump(mode="json", exclude={"name"})} for m in self.models
            ],
            "nodes": [_node_data(node) for node in self.nodes],
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


def _node_data(node: Node) -> dict[str, Any]:
    """A node as plain data; what only some nodes have is left out of the others'."""
    return {
        "name": node.name,
        "op": node.op.name,
        "per": node.op.per,
        "use": node.op.use,
        "model": node.model,
        "every": node.every,
        "inputs": references(node.inputs),
        "outputs": [str(made) for made in node.op.outputs],
        "params": {key: param_text(value) for key, value in node.params},
        **({"loop": node.loop, "trip": node.trip} if node.loop is not None else {}),
        **({"within": node.within} if node.within != ALWAYS else {}),
        **({"counts": node.counts.as_data()} if node.counts is not None else {}),
        **({"recalls": True} if node.op.recalls else {}),
        **({"effect": node.op.effect} if node.shares is not None else {}),
    }
