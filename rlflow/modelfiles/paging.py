"""How much memory the keys and values of a rollout take on an accelerator, block by block.

The embedded engine keeps them in a pool of blocks, each of `BLOCK` tokens of one row; whole blocks
of a prompt are there once for all of its rows. The plan counts the pool and the engine allocates it
by the same rule, which is here. Blocks are those of Kwon et al., "PagedAttention"
(arXiv:2309.06180), section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCK = 128
"""Tokens of a block. A row leaves half of one empty on average."""
LOOK = 8
"""Tokens of each row between two looks of the host at what has ended."""
MOST_ROWS = 512
"""Rows that decode at once where memory has room; others wait, but a prompt's begin together."""
POOLED = 0.5
"""The part of all responses' longest that a pool has room for.

Rows that begin together and end anywhere up to the limit hold a quarter of it at the most: of
those, t tokens old, 1 - t are left. Where more do not end, the last ones wait in host memory.
"""


def bucket(count: int) -> int:
    """The power of two that is no less: sizes of steps, so that there are few."""
    return 1 << max(count - 1, 0).bit_length()


def blocks_for(tokens: int) -> int:
    """Blocks that so many tokens take."""
    return -(-tokens // BLOCK)


def first_blocks(prompt: int, new: int) -> int:
    """A row's own blocks when it begins.

    They are for what its prompt's whole blocks leave, and for its tokens up to the first look.
    """
    return blocks_for(prompt % BLOCK + min(new, 1 + LOOK))


def own_blocks(prompt: int, new: int) -> int:
    """A row's own blocks at the most, of `new` tokens after `prompt`."""
    return blocks_for(prompt % BLOCK + new)


def rows_at_once(rows: int, n: int, most: int = MOST_ROWS) -> int:
    """How many of so many rows decode at once, where every prompt has `n`: at most `most`, or n."""
    return min(rows, max(most // n, 1) * n)


def pool_blocks(prompts: Sequence[int], n: int, new: int, at_once: int = MOST_ROWS) -> int:
    """Blocks of the pool for prompts of such lengths, `n` rows each, of at most `new` tokens.

    Of those rows at most `at_once` decode together.

    It has room for whole blocks of the prompts, for every row's beginning and one row's end, and
    beyond that for `POOLED` of what rows may need. One block is nobody's: rows that have ended
    write there.
    """
    together = rows_at_once(len(prompts) * n, n, at_once)
    most = sorted(prompts, reverse=True)[: together // n]
    shared = sum(prompt // BLOCK for prompt in most)
    longest = n * sum(own_blocks(prompt, new) for prompt in most)
    begun = n * sum(first_blocks(prompt, new) for prompt in most)
    begun += max((own_blocks(prompt, new) for prompt in prompts), default=0)
    return 1 + shared + min(max(math.ceil(POOLED * longest), begun), longest)
