"""Rows of one group that begin with the same tokens, sorted so that they share them.

Sorted by their tokens, a row shares its longest common beginning with the row before it: what is
left are the edges of a prefix tree. A token that several rows have in one place, after the same
tokens, gets the same keys, values and predictions in each, so a forward computes it once. This
file knows neither tensors nor attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlflow.errors import Finding

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Rows in the order of a flat sequence, int64 `[rows]`.

    `order` has the number of each row; `shared` how many of its first tokens stand in the row
    before it, and in that row's own order possibly in one before that.
    """

    order: Index
    shared: Index

    def path(self, own_start: Index, length: Index) -> Index:
        """The flat token of every token of every row in this order, joined end to end.

        `own_start` is where a row's own tokens begin, `length` counts all its tokens.
        """
        begin = np.cumsum(length) - length
        within = np.arange(int(length.sum())) - np.repeat(begin, length)
        path: Index = np.repeat(own_start - self.shared, length) + within
        for row in np.flatnonzero(self.shared).tolist():
            here, before, count = begin[row], begin[row - 1], self.shared[row]
            path[here : here + count] = path[before : before + count]
        return path


def unshared_rows(group: Index) -> Prefixes:
    """Rows that share nothing, sorted by group."""
    order = np.argsort(group, kind="stable")
    return Prefixes(order=order, shared=np.zeros_like(order))


def prefixes(group: Index, length: Index, start: Index, values: Index) -> Prefixes:
    """Rows of `group [rows]` whose tokens are `values[start : start + length]`, as a tree.

    Equal rows stand in their own order. Takes memory for every row at the longest row's length.
    """
    longest = int(length.max(initial=0))
    column = np.arange(longest)
    own = column < length[:, None]
    padded = np.full((len(group), longest), -1, dtype=np.int64)
    padded[own] = values[(start[:, None] + column)[own]]
    order = sorted_rows(np.concatenate([group[:, None], padded], 1))
    table, groups = padded[order], group[order]
    same = (table[1:] == table[:-1]) & (table[1:] >= 0) & (groups[1:] == groups[:-1])[:, None]
    shared = np.zeros_like(order)
    shared[1:] = np.logical_and.accumulate(same, axis=1).sum(1)
    return Prefixes(order=order, shared=shared)


def sorted_rows(table: Index) -> Index:
    """The rows of `[rows, columns]` (-1 or more) in lexicographic order, stable."""
    # Bytes compare as the numbers do when the highest stand first and none is negative.
    keys = (table + 1).astype(">u8").view(f"S{8 * table.shape[1]}")[:, 0]
    order: Index = np.argsort(keys, kind="stable")
    return order


def empty_prompt(row: int) -> Finding:
    """The finding for a prompt of no tokens: nothing predicts its first response token."""
    return Finding(
        code="E508",
        what=f"the prompt of row {row} has no tokens",
        expected="at least one token, such as the tokenizer's BOS",
        fix="drop empty prompts where the data is read",
    )
