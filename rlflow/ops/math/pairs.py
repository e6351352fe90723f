"""Which rows of a group make a pair, and how pairs are found among rows.

Rows are samples: `reward`, `group` and what goes with them are `[rows]`, in any order, groups
interleaved. A pair has an id, that of its group, and stands on two rows: one `chosen`, one
rejected. Rows in no pair have the id -1. This file knows no loss and no tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_PAIR = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """At most one pair a group, and what became of the groups.

    `pair` int64 `[rows]` is the group's id or -1; `chosen` bool `[rows]`; `margin` `[rows]` the
    chosen reward minus the rejected one on both rows of a pair, else 0. `kept`, `ties`,
    `invalid` and `single` count groups: with a pair; of equal best and worst; whose best row is
    not valid; of fewer than two usable rows.
    """

    pair: Tensor
    chosen: Tensor
    margin: Tensor
    kept: int
    ties: int
    invalid: int
    single: int


def penalise_unfinished(reward: Tensor, finished: Tensor, penalty: float) -> Tensor:
    """`reward - penalty` where a response did not end by itself, `[rows]`.

    Taken before pairs are made, so that a response without its EOS loses. Others: TRL 1.16.0
    subtracts it too (`missing_eos_penalty`).
    """
    return torch.where(finished, reward, reward - penalty)


def best_against_worst(
    reward: Tensor,
    group: Tensor,
    *,
    valid: Tensor | None = None,
    usable: Tensor | None = None,
    order: Tensor | None = None,
) -> Pairs:
    """One pair a group: the row of the highest reward against the row of the lowest.

    `valid` bool `[rows]` ranks before the reward: a valid row beats an invalid one, whatever
    their rewards, and a group whose best row is invalid makes no pair. Rows that are not
    `usable` (bool), or whose reward is NaN, are left out. A group whose best and worst are
    equally good makes no pair. Of rows that are equally good the one of the lowest `order`
    (int64, distinct; the row number unless given) is taken.

    Guo et al. 2024 (arXiv:2402.04792, online DPO) draw two samples and let a judge choose; best
    against worst of n is Dong et al. 2024 (arXiv:2405.07863). Others: TRL 1.16.0's online DPO
    draws two and calls the first one chosen where they tie.
    """
    left_out = torch.isnan(reward)
    usable = ~left_out if usable is None else usable & ~left_out
    valid = torch.ones_like(usable) if valid is None else valid
    tie_break = torch.arange(len(reward), device=reward.device) if order is None else order
    rows = torch.argsort(tie_break, stable=True)
    rows = rows[usable[rows]]
    names, inverse = group.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    sizes = torch.bincount(inverse[rows], minlength=len(names))
    up = _ordered(rows, (reward, valid, inverse), descending=False)
    down = _ordered(rows, (reward, valid, inverse), descending=True)
    ends = sizes.cumsum(0)
    enough = sizes > 1
    worst, best = up[(ends - sizes)[enough]], down[(ends - sizes)[enough]]
    apart = (reward[best] != reward[worst]) | (valid[best] != valid[worst])
    good = valid[best]
    best, worst = best[apart & good], worst[apart & good]
    pair = torch.full_like(group, NO_PAIR)
    chosen = torch.zeros_like(usable)
    margin = torch.zeros_like(reward)
    pair[best], pair[worst], chosen[best] = group[best], group[worst], True
    margin[best] = margin[worst] = reward[best] - reward[worst]
    return Pairs(
        pair=pair,
        chosen=chosen,
        margin=margin,
        kept=len(best),
        ties=int((good & ~apart).sum()),
        invalid=int((~good).sum()),
        single=int((~enough).sum()),
    )


def pair_rows(pair: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the chosen and of the rejected sides, int64 `[pairs]`, by ascending id.

    Raises ValueError where an id does not stand on exactly one row of each kind.
    """
    sides = []
    for wanted in (chosen, ~chosen):
        rows = torch.nonzero((pair != NO_PAIR) & wanted)[:, 0]
        sides.append(rows[torch.argsort(pair[rows], stable=True)])
    better, worse = sides
    ids = pair[better]
    if not torch.equal(ids, pair[worse]) or bool((ids[1:] == ids[:-1]).any()):
        raise ValueError("every pair has one chosen and one rejected row")
    return better, worse


def _ordered(rows: Tensor, keys: tuple[Tensor, ...], *, descending: bool) -> Tensor:
    """Rows sorted by their keys, the last one first in rank and always ascending."""
    for number, key in enumerate(keys, 1):
        last = number == len(keys)
        rows = rows[torch.argsort(key[rows], stable=True, descending=descending and not last)]
    return rows
