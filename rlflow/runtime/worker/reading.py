"""What a node reads of the shard store: the fields of its row sets, under its own names.

Knows who made what, and which trips of a loop have run; neither models nor time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlflow.batch import concat_rows, make_batch
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.worker.store import ShardStore, Stored, joined_fields
from rlflow.scheduler.plan.plan import Action, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from rlflow.batch import Batch
    from rlflow.graph.fields import Binding
    from rlflow.graph.graph import Graph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The inputs of one run of a node: those of its first row set, and of the `others`, whole.

    `rows` int64 numbers those of the first one within its `total`, None for all of them; where a
    loop ends, `trips` of it have run.
    """

    inputs: Batch | None = None
    others: tuple[Batch, ...] = ()
    rows: Tensor | None = None
    total: int = 0
    trips: int = 0


class Reading:
    """Looks up inputs in the store of one process."""

    def __init__(self, plan: Plan, flow: Flow, store: ShardStore) -> None:
        self._graph = plan.graph
        self._flow = flow
        self._store = store

    def of(self, action: Action, node: Node, iteration: int) -> Read:
        """The fields that a node reads by its names, and whose rows they are."""
        if not node.inputs:
            return Read()
        if node.ends_loop:
            return self._of_trips(action, node, iteration)
        count = 1 + max(bound.part for bound in node.inputs)
        parts = [
            self._part(action, [b for b in node.inputs if b.part == part], iteration)
            for part in range(count)
        ]
        batches = [make_batch(stored.fields, stored.held) for stored in parts]
        first = parts[0]
        return Read(
            inputs=batches[0], others=tuple(batches[1:]), rows=first.rows, total=first.total
        )

    def _part(self, action: Action, bounds: Sequence[Binding], iteration: int) -> Stored:
        """The fields of one row set."""
        held = {
            source: self.held(
                action, source, iteration, {b.field.name for b in bounds if b.source == source}
            ).of(action.piece_read)
            for source in dict.fromkeys(bound.source for bound in bounds)
        }
        fields = {bound.name: held[bound.source].fields[bound.field.name] for bound in bounds}
        first = held[bounds[0].source]
        return Stored(fields=fields, total=first.total, rows=first.rows)

    def _of_trips(self, action: Action, node: Node, iteration: int) -> Read:
        """What the trips of a loop have left that ran: of all of them, or of the last one."""
        trips: list[list[Binding]] = []
        for bound in node.inputs:
            trip = self._graph.node(bound.source).trip
            index = 0 if trip is None else trip[0]
            trips += [[] for _ in range(index + 1 - len(trips))]
            trips[index].append(bound)
        ran = [bounds for bounds in trips if self._ran(action, bounds[0].source, iteration)]
        batches, last = [], Stored(fields={}, total=0)
        for bounds in ran if node.op.rows == "gather" else ran[-1:]:
            fields = {}
            for bound in bounds:
                last = self.held(action, bound.source, iteration, {bound.field.name})
                fields[bound.name] = last.fields[bound.field.name]
            batches.append(make_batch(fields, last.held))
        if node.op.rows == "gather":
            joined = concat_rows(batches)
            return Read(inputs=joined, total=int(joined.batch_size[0]), trips=len(ran))
        return Read(inputs=batches[0], rows=last.rows, total=last.total, trips=len(ran))

    def _ran(self, action: Action, source: str, iteration: int) -> bool:
        """Whether a node whose rows an action reads has run in an iteration."""
        return all(self._store.has(o, iteration) for o in self._flow.origins(action.id, source))

    def held(self, action: Action, source: str, iteration: int, names: Collection[str]) -> Stored:
        """Fields of a node as they lie here for an action to read, chunks joined."""
        origins = self._flow.origins(action.id, source)
        return joined_fields([self._store.get(origin, iteration) for origin in origins], names)


def fields_read(graph: Graph, node: Node) -> frozenset[str]:
    """The outputs of a node that some other node reads."""
    return frozenset(
        bound.field.name
        for other in graph.nodes
        for bound in other.inputs
        if bound.source == node.name
    )
