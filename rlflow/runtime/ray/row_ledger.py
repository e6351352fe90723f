"""How the rows of every action lie over devices, as far as the controller has to know.

Row numbers and lengths only: what a transfer has to move, whom an action is sent to, whose
answer counts. Partitions are computed once a row set and kept until their last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlflow.graph.graph import Node
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.user.dispatch import RULES
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.execute.rows import (
    chunk_rows,
    dispatched,
    generated,
    laid_out,
    row_positions,
)
from rlflow.runtime.ray.exchange import Exchange, exchange
from rlflow.scheduler.plan.plan import Action, Chunk, Plan, Spread

if TYPE_CHECKING:
    from rlflow.runtime.ray.made import Made

Rows = NDArray[np.int64]
Key = tuple[str, int]

# What a partition of the rows of a set depends on: its rule, how many parts and pieces, the chunk.
Partition = tuple[str, int, int, Chunk | None]


@dataclass(slots=True)
class RowSet:
    """Rows that one node made in one iteration, and the partitions computed of them.

    `tokens` int64 `[rows]`, zeros where unknown; `groups` int64 `[rows]`, None without. `pieces`
    has the rows of those chunks that are cut by who ends first, `grown` the rows as they were
    generated, part by part, by chunk.
    """

    total: int
    tokens: Rows
    groups: Rows | None
    partitions: dict[Partition, tuple[list[Rows], list[Rows]]] = field(default_factory=dict)
    pieces: dict[Chunk, Rows] = field(default_factory=dict)
    grown: dict[Chunk | None, list[Rows]] = field(default_factory=dict)

    def of(self, chunk: Chunk | None) -> Rows:
        """The rows of a chunk, ascending; all of them for None."""
        if chunk is not None and chunk.as_ended:
            return self.pieces[chunk]
        first, last = chunk_rows(self.total, chunk)
        return np.arange(first, last, dtype=np.int64)


class RowLedger:
    """Partitions by action and iteration; `note` is called in the order actions end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._flow = Flow(plan)
        self._sets: dict[Key, RowSet] = {}
        self._parts: dict[Key, list[Rows]] = {}
        self._left: dict[Key, int] = {}
        self._window = 3 + max((action.ahead for action in plan.actions), default=0)

    def asked(self, action: Action) -> tuple[int, ...]:
        """The devices that an action is sent to."""
        if action.kind == "transfer" and action.makes is not None:
            return action.makes.devices
        if action.kind == "run" and action.instance is None:
            spread = action.takes or action.makes
            return action.devices if spread is None else spread.devices
        if action.kind == "run" and action.instance is not None:
            return self._plan.instance(action.instance).owners
        return action.devices

    def answering(self, action: Action) -> tuple[int, ...]:
        """One device for each part of an action's rows: those whose answers are joined."""
        spread = action.makes or action.takes
        if spread is not None:
            return tuple(holders[0] for holders in spread.parts)
        if action.kind == "run" and action.instance is not None:
            groups = self._plan.instance(action.instance).row_groups
            return tuple(holders[0] for holders in groups)
        return self.asked(action)[:1]

    def keep(self, action: Action, iteration: int) -> dict[int, Rows]:
        """For each device the places of the rows whose results stay; empty where all do."""
        spread = action.takes
        if action.kind != "run" or spread is None or spread.rule in RULES:
            return {}
        taken, kept = self._partition(action, iteration, spread)
        found: dict[int, Rows] = {}
        for part, holders in enumerate(spread.parts):
            if len(taken[part]) != len(kept[part]):
                where = row_positions(kept[part], taken[part])
                found |= dict.fromkeys(holders, where)
        return found

    def exchange(self, action: Action, iteration: int) -> Exchange:
        """What a transfer has to move."""
        assert action.takes is not None
        assert action.makes is not None
        wanted, _ = self._partition(action, iteration, action.makes)
        wanted = [rows // action.makes.pieces for rows in wanted]
        return exchange(action.takes, self._held(action, iteration), action.makes, wanted)

    def rows(self, action: Action, iteration: int, device: int) -> tuple[Rows | None, int]:
        """The row numbers a receiver gets, None for all of them, and the rows of the batch.

        Of rows that are laid out in pieces, the numbers of those.
        """
        assert action.makes is not None
        total = self._row_set(action, iteration).total * action.makes.pieces
        if action.makes.rule == "whole" and action.piece_read is None:
            return None, total
        wanted, _ = self._partition(action, iteration, action.makes)
        part = next(i for i, held in enumerate(action.makes.parts) if device in held)
        return wanted[part], total

    def note(self, action: Action, iteration: int, made: Mapping[int, Made]) -> None:
        """Remember how the rows lie that an action has left, and forget those it read last."""
        if action.makes is not None and self._flow.readers(action.id, iteration):
            key = (action.id, iteration)
            self._parts[key] = self._made(action, iteration, made)
            self._left[key] = self._flow.readers(action.id, iteration)
        self._forget(self._flow.sources(action.id), iteration)
        for key in [key for key in self._sets if key[1] < iteration - self._window]:
            del self._sets[key]

    def skip(self, action: Action, iteration: int) -> bool:
        """Forget what an action would have read that does not run; whether that is anything."""
        outside = self._flow.outside(action.id)
        self._forget(outside, iteration)
        return bool(outside)

    def _forget(self, sources: Sequence[str], iteration: int) -> None:
        """Count one reader less of each source that has run."""
        for source in sources:
            key = (source, iteration)
            if key not in self._left and self._plan.action(source).trip is not None:
                continue
            self._left[key] -= 1
            if not self._left[key]:
                del self._left[key], self._parts[key]

    def _made(self, action: Action, iteration: int, made: Mapping[int, Made]) -> list[Rows]:
        assert action.makes is not None
        if action.kind == "transfer":
            return self._partition(action, iteration, action.makes)[0]
        node = self._node(action)
        first = made[self.answering(action)[0]]
        if node.op.rows == "new" or node.op.gathers:
            self._sets[node.name, iteration] = _gathered(first, node)
            return [np.arange(first.rows, dtype=np.int64)]
        if node.op.rows == "expand":
            return self._expanded(action, node, iteration, made)
        return self._partition(action, iteration, action.makes)[1]

    def _expanded(
        self, action: Action, node: Node, iteration: int, made: Mapping[int, Made]
    ) -> list[Rows]:
        """The rows of a rollout, part by part; their tokens make a row set of its own.

        The first chunk that ends makes the set, the others fill in theirs.
        """
        answers = [made[device] for device in self.answering(action)]
        parents = self._taken(action, iteration)
        count = max(sum(len(part) for part in parents), 1)
        pieces = 1 if action.takes is None else action.takes.pieces
        factor = (
            int(node.as_a(SamplingOptions).n or 1) // pieces
            if action.ends_first
            else made_of(answers) // count
        )
        parts = [
            rows if answer.numbers is None else answer.numbers
            for rows, answer in zip(generated(parents, factor), answers, strict=True)
        ]
        key = (node.name, iteration)
        if key not in self._sets:
            total = self._row_set(action, iteration).total * pieces * factor
            groups = np.arange(total, dtype=np.int64) // max(pieces * factor, 1)
            self._sets[key] = _row_set(total, groups)
        if action.chunk is not None and action.ends_first:
            self._sets[key].pieces[action.chunk] = np.sort(np.concatenate(parts))
        self._sets[key].grown[action.chunk] = parts
        for part, answer in zip(parts, answers, strict=True):
            if answer.tokens is not None:
                self._sets[key].tokens[part] = answer.tokens
        return parts

    def _held(self, action: Action, iteration: int) -> list[Rows]:
        """The rows that an action's first source left for it, part by part.

        Chunks are joined in the order of their rows, as `store.together` joins them.
        """
        node = self._node(action)
        source = node.name if action.kind == "transfer" else node.sources[0]
        found = [self._parts[key, iteration] for key in self._flow.origins(action.id, source)]
        if len(found) == 1:
            return found[0]
        return [np.sort(np.concatenate(pieces)) for pieces in zip(*found, strict=True)]

    def _taken(self, action: Action, iteration: int) -> list[Rows]:
        """Those of them that are of the action's chunk."""
        held, chunk = self._held(action, iteration), action.piece_read
        if chunk is None or chunk.as_ended:
            return held
        pieces = 1 if action.takes is None else action.takes.pieces
        first, last = chunk_rows(self._row_set(action, iteration).total * pieces, chunk)
        return [rows[(rows >= first) & (rows < last)] for rows in held]

    def _generated(self, action: Action, iteration: int) -> list[Rows]:
        """The rows of an action's batch, or of its chunk, as they were generated, part by part."""
        grown = self._row_set(action, iteration).grown
        if action.piece_read in grown:
            return grown[action.piece_read]
        return [np.sort(np.concatenate(pieces)) for pieces in zip(*grown.values(), strict=True)]

    def _partition(
        self, action: Action, iteration: int, spread: Spread
    ) -> tuple[list[Rows], list[Rows]]:
        """The rows of each part of a spread: those taken, and those kept.

        A chunk is spread as a batch of its own.
        """
        if spread.rule == "generated":
            carried = action.kind == "transfer" and action.takes != spread
            made = self._taken if not carried else self._generated
            held = made(action, iteration)
            return held, held
        rows = self._row_set(action, iteration)
        key = (spread.rule, len(spread.parts), spread.pieces, action.piece_read)
        if key not in rows.partitions:
            node = self._node(action)
            chosen = laid_out(rows.of(action.piece_read), spread.pieces)
            of = chosen // spread.pieces
            whole = rows.groups is None or not len(chosen) or spread.pieces > 1
            groups = None if whole or rows.groups is None else rows.groups[of]
            taken, kept = dispatched(
                spread.rule,
                rows.tokens[of],
                groups if groups is None else groups - groups[0],
                len(spread.parts),
                whole_groups=node.op.per == "group",
                where=node.where,
            )
            rows.partitions[key] = [chosen[r] for r in taken], [chosen[r] for r in kept]
        return rows.partitions[key]

    def _row_set(self, action: Action, iteration: int) -> RowSet:
        """The row set that an action's rows belong to: that of the node which made them."""
        node = self._node(action)
        made_by_it = action.kind == "transfer" and node.op.rows in ("new", "expand", "gather")
        origin = node if made_by_it else self._origin(node)
        return self._sets[origin.name, iteration]

    def _origin(self, node: Node) -> Node:
        """The node that made the rows which a node reads."""
        source = self._plan.graph.node(node.sources[0])
        while source.op.rows == "same":
            source = self._plan.graph.node(source.sources[0])
        return source

    def _node(self, action: Action) -> Node:
        return self._plan.graph.node(str(action.node))


def made_of(answers: Sequence[Made]) -> int:
    """The rows that all parts have made together."""
    return sum(answer.rows for answer in answers)


def _gathered(made: Made, node: Node) -> RowSet:
    """The rows of a source, or those that were gathered, in the groups that they say."""
    if node.op.rows == "new":
        return _row_set(made.rows, None)
    found = _row_set(made.rows, made.groups)
    if made.tokens is not None:
        found.tokens[:] = made.tokens
    return found


def _row_set(total: int, groups: Rows | None) -> RowSet:
    return RowSet(total=total, tokens=np.zeros(total, dtype=np.int64), groups=groups)
