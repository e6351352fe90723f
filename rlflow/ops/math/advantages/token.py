"""Advantages of single tokens: rewards (and values or baselines) in, advantages out.

Token tensors are padded `[rows, tokens]` with a bool mask, row tensors are `[rows]`, a row
is one response. Masked tokens are skipped as if they did not exist: t + 1 is the next
*unmasked* token. Nothing here carries a gradient. Arithmetic runs in float64; results are
float32, or float64 if the rewards are. Rewards are taken to be finite: the reward op sees
to that. Rows, groups and padding may come in any order.

This file knows neither models nor how a reward came about.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.ops.math.groups import GroupStatistics, Single
from rlflow.ops.math.masked import masked_whiten, select, statistics_dtype

ENERGY_EPS = 1e-8
ROUNDING = 1e-5


@torch.no_grad()
def token_rewards(
    reward: Tensor, mask: Tensor, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Spread an outcome reward over tokens: `[rows]` to `[rows, tokens]`.

    The reward sits on the last unmasked token of its row; a row without one has no place
    for it and gets none. Every unmasked token pays `kl_coef * kl`, with `kl` `[rows, tokens]`
    a divergence estimate under the old policy (Ouyang et al. 2022, eq. 2).

    Others: verl writes the reward of a row without a token to its last padded column.
    """
    still_to_come = mask.flip(-1).cumsum(-1).flip(-1)
    wide = reward.to(statistics_dtype(reward)).unsqueeze(-1)
    spread = select(wide, mask & (still_to_come == 1))
    return spread if kl is None else spread - kl_coef * select(kl, mask)


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    finished: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    With `delta_t = r_t + gamma V_{t+1} - V_t`: `A_t = delta_t + gamma lam A_{t+1}`, and 0
    after the last token. Masked tokens are skipped as if they did not exist, discounting
    included: t + 1 is the next *unmasked* token, and a reward on a masked token is not seen.

    The value after the last token is 0, unless the row was cut before its end: `finished` bool
    `[rows]` says which were not, and the others go on with `bootstrap` `[rows]`, the value of
    the state after the last token, or where that is not given with V of the last unmasked token.
    With `bootstrap` alone every row has its own.

    `rewards`, `values` `[rows, tokens]`. Returns `(advantages, returns)`, both
    `[rows, tokens]` and 0 where masked; `returns` is `A + V` before whitening, and `whiten`
    then whitens the advantages over all unmasked tokens (`masked_whiten`).

    Others: verl, TRL, OpenRLHF and slime never bootstrap, AReaL does. verl skips masked tokens
    as here; OpenRLHF takes them as steps with value and reward 0, slime ignores the mask.
    """
    order = torch.argsort(mask.logical_not(), dim=-1, stable=True)
    reward = select(rewards.double(), mask).gather(-1, order)
    value = select(values.double(), mask).gather(-1, order)
    following = torch.nn.functional.pad(value[:, 1:], (0, 1)) if value.numel() else value
    if finished is not None or bootstrap is not None:
        following = _continued(following, value, mask.sum(-1), finished, bootstrap)
    packed = _discounted(reward + gamma * following - value, gamma * lam)
    advantages = torch.zeros_like(packed).scatter(-1, order, packed)
    returns = select(advantages + select(values, mask), mask)
    return _finish(advantages, returns, mask, statistics_dtype(rewards), whiten)


@torch.no_grad()
def reinforce_pp(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): the whitened discounted reward-to-go.

    `G_t = r_t + gamma G_{t+1}` over the unmasked tokens of a row, masked ones skipped as in
    `gae`. `rewards` `[rows, tokens]`. Returns `(advantages, returns)`, both
    `[rows, tokens]` and 0 where masked; `returns` is `G`, `whiten` whitens the advantages
    over all unmasked tokens, so a row's advantage depends on the lengths of the others.

    Others: verl the same.
    """
    returns = _to_go(rewards, mask, gamma)
    return _finish(returns, returns, mask, statistics_dtype(rewards), whiten)


@torch.no_grad()
def remax(rewards: Tensor, baseline: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al. 2023, arXiv:2310.10505, algorithm 1): reward-to-go minus a greedy reward.

    `A_t = sum_{t' >= t} r_t' - b`, with `baseline` `[rows]` the reward of the greedy response to
    the row's prompt and `rewards` `[rows, tokens]`. Returns `(advantages, returns)`, both
    `[rows, tokens]` and 0 where masked; `returns` is the reward-to-go. Nothing is whitened.

    Others: verl the same.
    """
    returns = _to_go(rewards, mask, 1.0)
    advantages = select(returns - baseline.double().unsqueeze(-1), mask)
    return _finish(advantages, returns, mask, statistics_dtype(rewards), whiten=False)


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    mask: Tensor,
    group: Tensor,
    *,
    weights: Tensor | None = None,
    zero_tail: bool = True,
    single: Single = "zero",
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline, as verl 0.9.1 defines it: a baseline per group and time step.

        A_it = G_it - sum_j G_jt W_jt / (sum_j W_jt + 1e-8)
        W_it = sum_{t' <= t} w_it'^2 (1 - 2 pi_it' + sum_v pi_it'(v)^2)

    G is the undiscounted reward-to-go, t counts unmasked tokens, and j runs over the rows of
    the group that have a t-th one. W is the squared norm of the score in the logits, summed over
    the row so far; `log_probs` and `sum_pi_squared` `[rows, tokens]` are those of the policy
    before the update, pi the probability of the sampled token and the sum over the vocabulary.
    `weights` `[rows, tokens]` are importance weights w, 1 unless given. A term below 0 by
    rounding is 0.

    `zero_tail` sets the baseline to 0 where only the longest row is left: its own return would
    be it. Returns equal in all rows that are left give exactly 0. A row that is alone in its
    group with a token gets 0, or with `single="reward"` its return.

    Returns `(advantages, returns)`, both `[rows, tokens]` and 0 where masked.

    Others: verl's form for one turn aligns rows by column, tokens of tools included; its form
    for several turns aligns them as here. Both have `single="reward"`.
    """
    order = torch.argsort(mask.logical_not(), dim=-1, stable=True)
    returns = _to_go(rewards, mask, 1.0)
    to_go, live = returns.gather(-1, order), mask.gather(-1, order)
    energy = 1 - 2 * select(log_probs.double(), mask).exp() + select(sum_pi_squared.double(), mask)
    energy = torch.where((energy < 0) & (energy > -ROUNDING), 0.0, energy)
    if weights is not None:
        energy = energy * select(weights.double(), mask).square()
    norms = select(select(energy, mask).gather(-1, order).cumsum(-1), live)
    stats = GroupStatistics(mask.any(-1), group)
    packed = select(to_go - _step_baseline(to_go, norms, live, stats.index, zero_tail), live)
    alone = (stats.total(stats.values) == 1).unsqueeze(-1)
    packed = torch.where(alone, to_go if single == "reward" else 0.0, packed)
    advantages = torch.zeros_like(packed).scatter(-1, order, packed)
    return _finish(advantages, returns, mask, statistics_dtype(rewards), whiten=False)


def _step_baseline(
    returns: Tensor, norms: Tensor, live: Tensor, index: Tensor, zero_tail: bool
) -> Tensor:
    """The baseline of every group and step, `[rows, tokens]`, where returns are packed."""
    count = int(index.max()) + 1 if len(index) else 0
    where = index.unsqueeze(-1).expand_as(returns)

    def over_rows(x: Tensor, reduce: str) -> Tensor:
        empty = x.new_zeros(count, x.shape[-1])
        return empty.scatter_reduce(0, where, x, reduce, include_self=False)[index]

    def total(x: Tensor) -> Tensor:
        return over_rows(x, "sum")

    largest = over_rows(torch.where(live, returns, -torch.inf), "amax")
    smallest = over_rows(torch.where(live, returns, torch.inf), "amin")
    left = total(live.double())
    baseline = total(returns * norms) / (total(norms) + ENERGY_EPS)
    baseline = torch.where(largest == smallest, returns, baseline)
    return select(baseline, left > 1) if zero_tail else baseline


def _continued(
    following: Tensor,
    value: Tensor,
    tokens: Tensor,
    finished: Tensor | None,
    bootstrap: Tensor | None,
) -> Tensor:
    """The value after each packed token, with one after the last where the row goes on."""
    last = torch.arange(value.shape[-1], device=value.device) == (tokens - 1).unsqueeze(-1)
    if finished is not None:
        last &= ~finished.unsqueeze(-1)
    return torch.where(last, value if bootstrap is None else bootstrap.unsqueeze(-1), following)


def _to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The discounted reward-to-go over the unmasked tokens, float64, 0 where masked."""
    order = torch.argsort(mask.logical_not(), dim=-1, stable=True)
    packed = _discounted(select(rewards.double(), mask).gather(-1, order), gamma)
    return select(torch.zeros_like(packed).scatter(-1, order, packed), mask)


def _discounted(x: Tensor, factor: float) -> Tensor:
    """`y_t = x_t + factor y_{t+1}` along the last dimension."""
    columns = list(x.unbind(-1))
    for t in range(len(columns) - 2, -1, -1):
        columns[t] = torch.add(columns[t], columns[t + 1], alpha=factor)
    return torch.stack(columns, -1) if columns else x


def _finish(
    advantages: Tensor, returns: Tensor, mask: Tensor, dtype: torch.dtype, whiten: bool
) -> tuple[Tensor, Tensor]:
    """Whiten or only clear the advantages where masked; cast both to `dtype`."""
    final = masked_whiten(advantages, mask) if whiten else select(advantages, mask)
    return final.to(dtype), returns.to(dtype)
