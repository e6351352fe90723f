"""What the monitor knows of rows: who has made them, how they lie, and who has yet to read them.

Looks up what a plan says, and nothing that a pass has proven.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection

from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.execute.monitor_trips import Instance, Trips
from rlflow.scheduler.plan.plan import Action, Chunk, Plan, Spread

# Rules by which rows that lie right for one action lie right for the next one.
LASTING = ("whole", "balanced", "balanced rows", "generated")


class RowBooks:
    """The rows of one segment: made, carried from layout to layout, read, and dropped.

    `done` has the instances that are over. Rows are kept from the end of the one that made them
    until the last of its readers is over, or left out with a trip.
    """

    def __init__(self, plan: Plan, trips: Trips) -> None:
        self.plan, self.trips = plan, trips
        self.done: set[Instance] = set()
        flow = Flow(plan)
        self._actions = {action.id: action for action in plan.actions}
        self._sources = {action.id: flow.sources(action.id) for action in plan.actions}
        self._outside = {action.id: flow.outside(action.id) for action in plan.actions}
        self._makers = {a.id: givers(plan, a) for a in plan.actions if a.kind == "run"}
        self._readers: dict[str, list[Action]] = {action.id: [] for action in plan.actions}
        for action in plan.actions:
            for source in self._sources[action.id]:
                self._readers[source].append(action)
        self._left: dict[Instance, int] = {}
        self._unread: Counter[Instance] = Counter()
        self._carried: dict[tuple[str, int, Spread | None, Chunk | None], set[str]]
        self._carried = defaultdict(set)
        data = [edge for edge in plan.graph.edges if edge.kind == "data"]
        self._fields = {(edge.source, edge.target): edge.fields for edge in data}

    def start(self, action: Action, iteration: int, name: str) -> None:
        """Check that all that an instance reads was made, lies as it takes it, and is kept."""
        for source in self._makers.get(action.id, ()):
            if not self.trips.left_out(source, iteration):
                there = (source, iteration) in self.done
                assert there, f"{name} starts before {source}@{iteration} has made its rows"
                self._lie_as_taken(action, self._actions[source], iteration, name)
        for source in self._sources[action.id]:
            if self.trips.left_out(source, iteration):
                continue
            kept = (source, iteration) in self._left
            assert kept, f"{name} reads the rows of {source}@{iteration}, which are not kept"
            made = self._actions[source].makes
            alike = action.kind != "transfer" or made == action.takes
            assert alike, f"{name} takes rows where {source}@{iteration} has not made them"

    def _lie_as_taken(self, action: Action, source: Action, iteration: int, name: str) -> None:
        """Each field of a source was made, or carried, to where the action takes its rows.

        A rule of a user's own is asked anew for every action: what it makes is always carried.
        """
        spread = action.takes
        assert spread is not None, f"{name} reads rows, and says not how they lie"
        as_made = spread.rule in LASTING and source.makes == spread
        if self.plan.backend == "local" or as_made:
            return
        cuts = dict.fromkeys((source.chunk, action.chunk))
        brought = [self._carried[str(source.node), iteration, spread, cut] for cut in cuts]
        wanted = self._fields[str(source.node), str(action.node)]
        there = any(fields.issuperset(wanted) for fields in brought)
        assert there, f"{name} lacks {', '.join(wanted)} of {source.id}@{iteration} in its layout"

    def finish(self, action: Action, iteration: int) -> None:
        """Book what an instance leaves behind, and that it has read its rows."""
        self.done.add((action.id, iteration))
        if action.kind == "transfer":
            place = (str(action.node), iteration, action.makes, action.chunk)
            self._carried[place].update(action.fields)
        for source in self._sources[action.id]:
            if not self.trips.left_out(source, iteration):
                self._read(source, iteration)
        readers = sum(reader.due(iteration) for reader in self._readers[action.id])
        readers -= self._unread.pop((action.id, iteration), 0)
        if readers:
            self._left[action.id, iteration] = readers

    def leave_out(self, actions: Collection[str], iteration: int) -> None:
        """Count as readers no more those that are left out, of rows made outside their trip."""
        for action in actions:
            for source in self._outside[action]:
                self._read(source, iteration)

    def _read(self, source: str, iteration: int) -> None:
        """Count one reader less of what a source has made, or will."""
        key = (source, iteration)
        if key not in self._left:
            self._unread[key] += 1
            return
        self._left[key] -= 1
        if self._left[key] == 0:
            del self._left[key]

    def check_drained(self) -> None:
        """Check that nobody has yet to read anything that is kept."""
        assert not self._left, f"rows are kept that nobody will read: {sorted(self._left)}"

    def clear(self) -> None:
        """Forget a segment that is over."""
        self.done.clear()
        self._unread.clear()
        self._carried.clear()


def givers(plan: Plan, action: Action) -> tuple[str, ...]:
    """The runs whose rows an action reads: those of each source's chunks that it overlaps."""
    if not plan.graph.has_node(str(action.node)):
        return ()
    sources = plan.graph.node(str(action.node)).sources
    return tuple(
        other.id
        for other in plan.actions
        if other.kind == "run" and other.node in sources and _overlap(other.chunk, action.chunk)
    )


def _overlap(one: Chunk | None, other: Chunk | None) -> bool:
    """Whether two pieces of a batch have rows in common; None is all of it."""
    if one is None or other is None or one.by != other.by:
        return True
    before = one.index * other.count < (other.index + 1) * one.count
    return before and other.index * one.count < (one.index + 1) * other.count
