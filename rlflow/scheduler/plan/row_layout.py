"""The layout of every run's rows over devices, as its op's dispatch and its instance allow.

Compile-time part of dispatch: which rows a part has is computed where the plan runs, and
what cannot lie so is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Balanced, Oversampled, Recalling
from rlflow.graph.rules.check import most_rows, num_prompts, row_counts
from rlflow.graph.rules.steps import groups_may_part, mini_batches, sample_pieces
from rlflow.graph.user.dispatch import RULES
from rlflow.scheduler.plan.plan import HOST, Action, Chunk, Instance, Spread

HOST_SPREAD = Spread(parts=((HOST,),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node runs: a pool's devices and the instance that serves it, or the host."""

    pool: str
    devices: tuple[int, ...]
    instance: Instance | None

    @property
    def row_parts(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each row part: those that share every layer, and stages, share the rows.

        An engine's rows are on the devices that own its processes.
        """
        if self.instance is None:
            return tuple((device,) for device in self.devices)
        if self.instance.engine_plan.own_process:
            return tuple((device,) for device in self.instance.owners)
        return self.instance.row_groups

    @property
    def sharded(self) -> bool:
        """Whether its ranks compute together, so that none of them may be left out."""
        return self.instance is not None and self.instance.sharded

    def remembers(self, origin: Place) -> bool:
        """Whether it is an engine whose cache has what `origin` made: the same instance."""
        engine = self.instance is not None and self.instance.engine_plan.own_process
        return engine and self.instance == origin.instance

    @property
    def everywhere(self) -> Spread:
        """One part with all rows, held by every device that holds any."""
        held = {device for part in self.row_parts for device in part}
        return Spread(parts=(tuple(device for device in self.devices if device in held),))

    @property
    def first(self) -> Spread:
        """One part with all rows, on the first device."""
        return Spread(parts=(self.devices[:1],))


def takes(
    node: Node, place: Place, made: Mapping[str, Spread], grown: Spread | None = None
) -> Spread | None:
    """The layout of a node's input rows; `made` has the layouts of its sources. None for no inputs.

    `grown` is the layout in which an engine has the rows in its cache; they stay there. With one
    row part every device of the instance has all rows, whatever the dispatch, and so it has where
    replicas deal groups to each other. A collective op
    without a model is not split, since only the ranks of an instance can reach each other.
    """
    if not node.inputs:
        return None
    if place.devices == (HOST,):
        return HOST_SPREAD
    parts, how = place.row_parts, node.op.dispatched
    if how == "first" or (node.op.collective and place.instance is None):
        return place.first
    if how == "all" or len(parts) == 1 or deals(node):
        return place.everywhere
    stays = grown if how == "split" and node.op.rows == "same" else None
    if how == "parts" or stays is not None:
        return stays or made[node.sources[0]]
    return Spread(parts=parts, rule="balanced" if how == "split" else how)


def deals(node: Node) -> bool:
    """Whether it is a rollout whose replicas share groups out themselves, turn by turn together.

    Its rows go on from one iteration to the next, are dropped where they are late, or move.
    """
    roles = node.role(Recalling), node.role(Oversampled), node.role(Balanced)
    return node.op.rows == "expand" and any(role is not None for role in roles)


def cut_groups(graph: Graph, node: Node, taken: Spread | None) -> Spread | None:
    """The layout with the samples of a prompt on several ranks, where that is what it takes.

    There are fewer prompts than parts, rows enough, and the node computes each row by itself, or
    draws it.
    """
    if taken is None or taken.rule != "balanced" or node.op.uneven == "refuse":
        return taken
    groups, rows = (each // mini_batches(node) for each in least_rows(graph, node))
    parts = len(taken.parts)
    if (pieces := sample_pieces(node, groups, parts)) > 1:
        return replace(taken, rule="balanced samples", pieces=pieces)
    if not groups_may_part(node):
        return taken
    return replace(taken, rule="balanced rows") if groups < parts <= rows else taken


def least_rows(graph: Graph, node: Node) -> tuple[int, int]:
    """The fewest prompts that a node's rows descend from in an iteration, and the fewest rows.

    Of a rollout the rows that it draws.
    """
    groups, rows = num_prompts(graph, node), most_rows(graph, node)
    if groups is None or rows is None:
        return 0, 0
    counts = row_counts(graph, node)
    least = groups if counts is None else min(groups, counts.least)
    return least, rows * least // max(groups, 1)


def makes(node: Node, place: Place, taken: Spread | None) -> Spread | None:
    """The layout of the rows that a node makes; None where it makes none.

    Rows that come from no other rows are made whole: on every rank of a model, on the first
    device of a pool otherwise.
    """
    if not node.op.outputs:
        return None
    if taken is None:
        alike = place.instance is not None or node.op.dispatch == "all"
        return place.everywhere if alike else place.first
    if node.op.rows == "expand" and len(taken.parts) > 1:
        return replace(taken, rule="generated", pieces=1)
    return taken


def agree(left: Spread | None, wanted: Spread) -> bool:
    """Whether rows lie as they are read, so that no transfer is needed.

    A user's own rule is asked anew for every op: it may repeat rows for one op and not for the
    next, and may split groups that the next op needs whole.
    """
    return left == wanted and wanted.rule in RULES


def sources_of(makers: Sequence[Action], chunk: Chunk | None) -> tuple[Action, ...]:
    """The runs of a node whose rows a chunk reads: of the same chunk, else all, in row order."""
    own = tuple(maker for maker in makers if chunk is not None and maker.chunk == chunk)
    return own or tuple(sorted(makers, key=lambda maker: maker.chunk.index if maker.chunk else 0))


def in_place(source: Action, target: Action, wanted: Spread) -> bool:
    """Whether an action reads the rows of a source where the source left them.

    Parts balanced within each chunk differ from parts balanced over the whole batch.
    """
    alike = (
        source.chunk == target.piece_read or len(wanted.parts) == 1 or wanted.rule == "generated"
    )
    return alike and agree(source.makes, wanted)


def num_parts(node: Node, place: Place, taken: Spread | None, made: Spread | None) -> int:
    """How many parts share a node's work; ranks may share work on no rows at all."""
    spread = taken or made
    if spread is not None and not deals(node):
        return len(spread.parts)
    return len(place.row_parts) if node.op.dispatched not in ("all", "first") else 1
