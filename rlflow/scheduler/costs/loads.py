"""The rows that a use sees on one rank: how many, how long, and how they lie in blocks of a pool.

The embedded engine's rollouts on an accelerator allocate by the same rule as is asked here,
`rlflow.modelfiles.paging`. Knows rows; no model, no plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from rlflow.modelfiles.paging import BLOCK, bucket, pool_blocks, rows_at_once
from rlflow.scheduler.costs.lengths import Lengths, after, assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows of one part: `rows` of `prompts` prompts of `prompt` tokens, responses as `lengths`.

    `peers` parts end together. Rows of a prompt share it. `most` are the rows that there may be,
    where `rows` is how many there are in expectation.
    """

    rows: float
    prompts: float
    prompt: int
    lengths: Lengths
    peers: int = 1
    most: float | None = None

    @property
    def tokens(self) -> float:
        """Tokens that a forward sees, in expectation."""
        return self.prompts * self.prompt + self.rows * self.lengths.mean

    @property
    def most_tokens(self) -> float:
        """Tokens that a forward sees at the most."""
        return self.prompts * self.prompt + self.rows * self.lengths.longest

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.lengths.longest

    @property
    def pairs(self) -> float:
        """Pairs of a token and one that it attends to, in expectation."""
        mean = self.lengths.mean
        of_responses = self.rows * mean * (self.prompt + mean / 2)
        return self.prompts * self.prompt**2 / 2 + of_responses

    @property
    def in_blocks(self) -> PagedRows:
        """The most rows that there may be, in blocks of a pool."""
        rows = self.most or self.rows
        prompts = rows if self.most else self.prompts
        return paged_rows(rows, prompts, self.prompt, self.lengths.longest)

    def going_on(self, first: int) -> Load:
        """The rows that have not ended after `first` tokens: prompts that are as much longer."""
        rest, share = after(self.lengths, first)
        rows = max(self.rows * share, 1.0)
        longer = replace(self, prompt=self.prompt + first, lengths=rest)
        return replace(longer, rows=rows, prompts=rows, most=max(self.rows, rows))

    def later_turn(self, new: int) -> Load:
        """The rows of a later turn of so many tokens: what is there so far are their prompts."""
        before = max(self.lengths.longest - new, 0)
        longer = replace(self, prompts=self.rows, prompt=self.prompt + before)
        return replace(longer, lengths=assumed(new))


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows of prompts of one length: `n` of each, of at most `new` tokens."""

    prompts: int
    prompt: int
    n: int
    new: int

    @property
    def pool(self) -> int:
        """Tokens that the pool has room for."""
        return _pool(self.prompts, self.prompt, self.n, self.new) * BLOCK

    @property
    def at_once(self) -> int:
        """Rows that decode at once at the most."""
        return rows_at_once(self.prompts * self.n, self.n)

    @property
    def slots(self) -> int:
        """Rows of the largest step."""
        return bucket(self.at_once)


def paged_rows(rows: float, prompts: float, prompt: int, new: int) -> PagedRows:
    """The rows of a part, whole numbers of them."""
    n = max(math.ceil(rows / max(prompts, 1.0)), 1)
    return PagedRows(prompts=math.ceil(rows / n), prompt=prompt, n=n, new=new)


@lru_cache(maxsize=1024)
def _pool(prompts: int, prompt: int, n: int, new: int) -> int:
    return pool_blocks((prompt,) * prompts, n, new)
