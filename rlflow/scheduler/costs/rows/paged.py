"""Rows of a rollout in the blocks of a pool, by the rule that the embedded engine allocates by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from rlflow.modelfiles.paging import BLOCK, MOST_ROWS, bucket, pool_blocks, rows_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """Rows of prompts of one length: `n` of each, of at most `new` tokens, `most` of them at once.

    Of a prompt all decode together, also where those are more.
    """

    prompts: int
    prompt: int
    n: int
    new: int
    most: int = MOST_ROWS

    @property
    def pool(self) -> int:
        """Tokens that the pool has room for."""
        return _pool(self.prompts, self.prompt, self.n, self.new, self.most) * BLOCK

    @property
    def at_once(self) -> int:
        """Rows that decode at once at the most."""
        return rows_at_once(self.prompts * self.n, self.n, self.most)

    @property
    def slots(self) -> int:
        """Rows of the largest step."""
        return bucket(self.at_once)


def paged_rows(
    rows: float, prompts: float, prompt: int, new: int, most: int = MOST_ROWS
) -> PagedRows:
    """The rows of a part, whole numbers of them."""
    n = max(math.ceil(rows / max(prompts, 1.0)), 1)
    return PagedRows(prompts=math.ceil(rows / n), prompt=prompt, n=n, new=new, most=most)


@lru_cache(maxsize=1024)
def _pool(prompts: int, prompt: int, n: int, new: int, most: int) -> int:
    return pool_blocks((prompt,) * prompts, n, new, most)
