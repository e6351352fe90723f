"""What n samples of a prompt say of k of them: pass@k, maj@k, and intervals over prompts.

Both are expectations over the subsets of size k of the n samples, each as likely as any other, and
both are exact: no subset is drawn. Everything is float64. This file knows neither how samples are
made nor when one is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from math import comb

import torch
from torch import Tensor

# Above so many samples the number of subsets is beyond float64.
MOST_SAMPLES = 1000


@cache
def _some_of(n: int, right: int, k: int) -> float:
    """`1 - C(n - right, k) / C(n, k)`, rounded once."""
    every = comb(n, k)
    return (every - comb(n - right, k)) / every


def pass_at(n: int, right: Tensor, k: int) -> Tensor:
    """pass@k of each prompt (Chen et al. 2021, arXiv:2107.03374, section 2.1, eq. 1).

        1 - C(n - c, k) / C(n, k)

    `right` int64 `[prompts]` is c, how many of a prompt's `n` samples are right, 1 <= k <= n;
    returns `[prompts]`: the chance that of k samples drawn without putting back one is right. Its
    mean over repeated draws of n is that of k fresh samples, unlike `1 - (1 - c / n) ** k`, which
    is biased.
    """
    table = torch.tensor([_some_of(n, c, k) for c in range(n + 1)], dtype=torch.float64)
    return table[right]


def majority_at(answers: Sequence[str | None], right: Sequence[bool], ks: Sequence[int]) -> Tensor:
    """maj@k of one prompt for each k of `ks` (Wang et al. 2022, arXiv:2203.11171): `[ks]`.

    The chance that the answer which most of k samples give is right, over all subsets of k of the
    n samples, 1 <= k <= n <= 1000. Of answers that equally many give each is taken as often as any
    other. A sample whose answer is None gives no vote, and a subset without a vote is not right. An
    answer that only some of its samples have right counts by their share.

    maj@1 is the share of the right among all n where every sample has an answer, and so is maj@2:
    two votes that differ are a tie.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - votes.total()
    chances = majority_chances(tuple(sorted(votes.values())), silent)
    found = torch.zeros(len(ks), dtype=torch.float64)
    for answer, size in votes.items():
        good = sum(ok for ok, given in zip(right, answers, strict=True) if given == answer)
        found += torch.stack([chances[size][k] for k in ks]) * (good / size)
    return found


@lru_cache(maxsize=1 << 14)
def majority_chances(votes: tuple[int, ...], silent: int = 0) -> dict[int, Tensor]:
    """The chance that one answer wins, by its number of votes; `[n + 1]` over k.

    `votes` are the votes of all answers, sorted, and `silent` samples give none. An answer of c
    votes wins with j of them where each other one has fewer, or as many: with t of the latter it
    is taken in 1 of t + 1 ties.
    """
    n = sum(votes) + silent
    every = torch.tensor([float(comb(n, k)) for k in range(n + 1)], dtype=torch.float64)
    found = {}
    for size in set(votes):
        others = list(votes)
        others.remove(size)
        won = torch.zeros(n + 1, dtype=torch.float64)
        for j in range(1, size + 1):
            ways = _beaten(others, silent, j, n)
            shares = ways / torch.arange(1, len(ways) + 1, dtype=torch.float64)[:, None]
            won[j:] += comb(size, j) * shares.sum(0)[: n + 1 - j]
        found[size] = won / every
    return found


def _beaten(others: Sequence[int], silent: int, most: int, n: int) -> Tensor:
    """In how many ways others give at most `most` votes each: `[ties + 1, votes + 1]`.

    By how many of them give exactly so many, and how many samples that takes, silent ones counted.
    """
    tying = sum(size >= most for size in others)
    ways = torch.zeros(tying + 1, n + 1, dtype=torch.float64)
    ways[0] = torch.tensor([float(comb(silent, taken)) for taken in range(n + 1)])
    for size in others:
        added = torch.zeros_like(ways)
        for votes in range(min(size, most) + 1):
            moved = ways[:, : n + 1 - votes] * comb(size, votes)
            if votes < most:
                added[:, votes:] += moved
            else:
                added[1:, votes:] += moved[:-1]
        ways = added
    return ways


def bootstrap_interval(
    values: Tensor, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Tensor:
    """The percentile interval of means over prompts (Efron 1979): `[2, metrics]`, low and high.

    `values` `[prompts, metrics]`; each of `draws` takes as many prompts with putting back, the same
    ones for all metrics, by a generator of its own with this `seed`. Samples of a prompt stay
    together, so the interval is that of other prompts of the same kind. Of one prompt, and of
    prompts that are all equal, it is a point.
    """
    generator = torch.Generator().manual_seed(seed)
    count, wide = len(values), values.double()
    means = torch.empty(draws, wide.shape[1], dtype=torch.float64)
    for draw in range(draws):
        means[draw] = wide[torch.randint(count, (count,), generator=generator)].mean(0)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    return torch.quantile(means, ends, dim=0)
