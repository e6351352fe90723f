"""Which rows go to which part of a batch, and what has to be sent so that they get there.

Pure functions of row numbers, token counts and group ids, all int64 arrays. A part is the
array of its row numbers. This file knows no device, no tensor and no process.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import Finding, RunError, Source, known_names, near_names
from rlflow.graph.user.dispatch import dispatch_pair, registered
from rlflow.runtime.execute.user_dispatch import Asked
from rlflow.scheduler.plan.plan import Chunk

Rows = NDArray[np.int64]

# Groups put together while bins are being filled: one group, or two of these.
Tree = int | tuple[Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSlice:
    """Rows that part `source` of a spread has and part `target` of another one lacks.

    `taken` are positions within the source part, `placed` where they go in the target part,
    both int64 `[rows]`, ascending in `placed`.
    """

    source: int
    target: int
    taken: Rows
    placed: Rows


def chunk_rows(total: int, chunk: Chunk | None) -> tuple[int, int]:
    """The rows of a chunk, of so many in all: the first, and the one after the last.

    Rows follow their prompts, and chunks are equally many whole prompts.
    """
    if chunk is None:
        return 0, total
    return total * chunk.index // chunk.count, total * (chunk.index + 1) // chunk.count


def balanced(tokens: Rows, groups: Rows | None, parts: int) -> list[Rows]:
    """Share rows out over parts so that the parts have about equally many tokens.

    `tokens` `[rows]`, all 0 where unknown; `groups` `[rows]` ids, rows of one id stay together.
    Every part gets rows where there are as many groups as parts; row numbers ascend within a
    part, and parts come in the order of their first row. Groups of equal tokens and rows are
    cut into consecutive runs; others go by the largest differencing method (Karmarkar and Karp
    1982), rows counting where tokens tie. The largest part is at most 4/3 - 1/(3 parts) times
    that of the best partition (Michiels et al. 2007).
    """
    member, weight = _weights(tokens, groups)
    if not len(weight) or (weight == weight[0]).all():
        bins = [run.tolist() for run in np.array_split(np.arange(len(weight)), parts)]
    else:
        bins = _differencing(weight, parts)
    bins.sort(key=lambda chosen: (not chosen, min(chosen, default=0)))
    part_of = np.empty(len(weight), dtype=np.int64)
    for part, chosen in enumerate(bins):
        part_of[chosen] = part
    return _by_part(part_of[member], parts)


def sub_groups(groups: Rows, parts: int) -> Rows:
    """Ids `[rows]` of pieces of groups, so many that every part may have one.

    Each group is cut into equally many consecutive runs of its rows, or into its rows. As few as
    make `parts` of them: rows of a prompt that stay together read it once.
    """
    _, member, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(member, kind="stable")
    begins = np.cumsum(sizes) - sizes
    place = np.empty(len(groups), dtype=np.int64)
    place[order] = np.arange(len(groups)) - begins[member[order]]
    pieces = -(-parts // max(len(sizes), 1))
    most = int(sizes.max(initial=1))
    while pieces < most and int(np.minimum(sizes, pieces).sum()) < parts:
        pieces += 1
    pieces = min(pieces, most)
    found: Rows = member * pieces + place * np.minimum(sizes, pieces)[member] // sizes[member]
    return found


def laid_out(rows: Rows, pieces: int) -> Rows:
    """Numbers of rows of which each is laid out `pieces` times, one after the other."""
    return generated([rows], pieces)[0]


def generated(parents: Sequence[Rows], factor: int) -> list[Rows]:
    """The rows made of each part's parents: p * factor + 0 .. factor - 1 of every parent p."""
    children = np.arange(factor, dtype=np.int64)
    return [(rows[:, None] * factor + children).reshape(-1) for rows in parents]


def dispatched(
    rule: str,
    tokens: Rows,
    groups: Rows | None,
    parts: int,
    *,
    whole_groups: bool = False,
    where: Source | None = None,
) -> tuple[list[Rows], list[Rows]]:
    """The rows each part takes by a rule, and those of them whose results are kept.

    `rule` is one of rlflow's, or the name of a registered pair; `tokens` and
    `groups` are as in `balanced`. Kept rows stand in the order they were taken in, every row in one
    part.
    Raises RunError naming the function, what it returned and what was expected, where a
    registered pair leaves a row out, keeps one twice, gives a number that is no row or another
    number of parts, or with `whole_groups` tears a group apart.
    """
    if rule == "whole":
        assert parts == 1, f"rows that are not shared out have one part, not {parts}"
        everything = [np.arange(len(tokens), dtype=np.int64)]
        return everything, everything
    if rule in ("balanced", "balanced rows", "balanced samples"):
        if groups is not None and rule == "balanced rows":
            groups = sub_groups(groups, parts)
        made = balanced(tokens, groups, parts)
        return made, made
    pair = dispatch_pair(rule)
    if pair is None:
        raise RunError(
            Finding(
                code="E761",
                what=f"no dispatch rule {rule!r} is registered in this process",
                where=where,
                expected=known_names(registered()),
                near=near_names(rule, registered()),
                fix=f'rf.register_dispatch("{rule}", ...) at the top of the pipeline file',
            )
        )
    asked = Asked(pair=pair, rows=len(tokens), parts=parts, where=where)
    taken = asked.taken(tokens, groups)
    if whole_groups and groups is not None:
        asked.require_whole(taken, groups)
    return taken, asked.kept(taken)


def row_positions(rows: Rows, within: Rows) -> Rows:
    """For each of `rows` its first position within a part that has it."""
    order = np.argsort(within, kind="stable")
    found: Rows = order[np.searchsorted(within, rows, sorter=order)]
    assert (within[found] == rows).all(), "a row is looked for in a part that lacks it"
    return found


def cuts(source: Sequence[Rows], target: Sequence[Rows]) -> list[RowSlice]:
    """Who sends what to whom, so that every row of every target part arrives once.

    A row that several source parts hold comes from the part of the target's own number, else
    from the first. The cuts are in order of target, then source. Every row of `target` has to
    be in `source`.
    """
    rows = 1 + max((int(part.max(initial=-1)) for part in (*source, *target)), default=-1)
    owner = np.full(rows, -1, dtype=np.int64)
    for number, part in reversed(list(enumerate(source))):
        owner[part] = number
    made = []
    for number, wanted in enumerate(target):
        sender = owner[wanted]
        assert (sender >= 0).all(), "a row is wanted that no part has"
        if number < len(source):
            sender[np.isin(wanted, source[number])] = number
        for maker in np.unique(sender).tolist():
            placed = np.flatnonzero(sender == maker)
            taken = row_positions(wanted[placed], source[maker])
            made.append(RowSlice(source=maker, target=number, taken=taken, placed=placed))
    return made


def _weights(tokens: Rows, groups: Rows | None) -> tuple[Rows, Rows]:
    """The group of each row, numbered by first row, and what a group weighs.

    A weight is tokens first and rows second, and at least 1: no part stays empty for nothing.
    """
    rows = len(tokens)
    if groups is None:
        return np.arange(rows), tokens * (rows + 1) + 1
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    member = rank[inverse]
    weight = np.zeros(len(first), dtype=np.int64)
    np.add.at(weight, member, tokens * (rows + 1) + 1)
    return member, weight


def _differencing(weight: Rows, parts: int) -> list[list[int]]:
    """Partition by differencing: the groups of each bin.

    Partial partitions list their filled bins, heaviest first. The two that differ most inside
    are joined, heaviest bin to lightest, until one is left. Ties go by weight and age, so what
    bins weigh depends on the weights alone.
    """
    heap = [
        (-int(weight[group]), age, [(int(weight[group]), group)])
        for age, group in enumerate(np.argsort(-weight, kind="stable").tolist())
    ]
    heapq.heapify(heap)
    for age in range(len(heap), 2 * len(heap) - 1):
        one = heapq.heappop(heap)[2]
        two = heap[0][2]
        alone = parts - len(two)
        shared = zip(one[alone:], reversed(two), strict=False)
        joined = one[:alone] + two[: parts - len(one)]
        joined += [(a + b, (left, right)) for (a, left), (b, right) in shared]
        joined.sort(key=operator.itemgetter(0), reverse=True)
        lightest = joined[-1][0] if len(joined) == parts else 0
        heapq.heapreplace(heap, (lightest - joined[0][0], age, joined))
    bins = [_leaves(tree) for _, tree in heap[0][2]]
    return bins + [[] for _ in range(parts - len(bins))]


def _leaves(tree: Tree) -> list[int]:
    """The groups of a tree; trees may be deep, so no recursion."""
    found: list[int] = []
    left: list[Tree] = [tree]
    while left:
        top = left.pop()
        if isinstance(top, tuple):
            left.extend(top)
        else:
            found.append(top)
    return found


def _by_part(part_of: Rows, parts: int) -> list[Rows]:
    """The rows of each part, ascending."""
    order = np.argsort(part_of, kind="stable")
    ends = np.cumsum(np.bincount(part_of, minlength=parts))
    return np.split(order, ends[:-1])
