"""Advantages of tokens: by hand, by plain loops, and what holds for all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.advantages.token import (
    gae,
    optimal_token_baseline,
    reinforce_pp,
    remax,
    token_rewards,
)
from rlflow.ops.math.masked import masked_whiten
from tests.budget import examples

pytestmark = pytest.mark.torch

GARBAGE = [math.nan, math.inf, -math.inf, 3e38]
PROPERTY = settings(deadline=None, max_examples=examples(40), derandomize=True)
SIZES = (st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 7))


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(expected: Tensor, got: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


def batch(seed: int, rows: int, tokens: int) -> dict[str, Tensor]:
    """Random fields, and a mask with holes, an empty last row and a full first one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[0], mask[-1] = True, False
    probabilities = normal(rows, tokens, 5).softmax(-1)
    return {
        "rewards": normal(rows, tokens),
        "values": normal(rows, tokens),
        "after": normal(rows),
        "log_probs": probabilities[..., 0].log(),
        "sum_pi_squared": probabilities.square().sum(-1),
        "mask": mask,
        "group": torch.randint(0, 3, (rows,), generator=generator),
        "finished": torch.rand(rows, generator=generator) < 0.5,
    }


# --- by hand -------------------------------------------------------------------------------


def test_gae_by_hand():
    """delta = 1.4, 2.35, 1.5 from the left; each advantage adds 0.45 of the next."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = gae(
        f64([1, 2, 3]), f64([0.5, 1, 1.5]), mask, gamma=0.9, lam=0.5, whiten=False
    )
    close(f64([2.76125, 3.025, 1.5]), advantages)
    close(f64([3.26125, 4.025, 3.0]), returns)


def test_gae_skips_a_hole_as_if_it_were_not_there():
    """delta = 1.85, 1.5: the value after the first token is that of the third."""
    mask = torch.tensor([[False, True, False, True, False]])
    rewards, values = f64([7, 1, 7, 3, 7]), f64([9, 0.5, 9, 1.5, 9])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.5, whiten=False)
    close(f64([0, 2.525, 0, 1.5, 0]), advantages)
    close(f64([0, 3.025, 0, 3.0, 0]), returns)


def test_gae_whitens_the_advantages_and_not_the_returns():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rewards, values = f64([1, 2, 3], [4, 0, 0]), f64([0.5, 1, 1.5], [2, 0, 0])
    raw, raw_returns = gae(rewards, values, mask, whiten=False)
    advantages, returns = gae(rewards, values, mask)
    close(masked_whiten(raw, mask), advantages)
    close(raw_returns, returns)


def test_gae_of_one_token_in_the_whole_batch_is_zero_not_an_error():
    mask = torch.tensor([[True, False]])
    advantages, returns = gae(f64([3, 0]), f64([1, 0]), mask)
    assert [[0.0, 0.0]] == advantages.tolist()
    assert [[3.0, 0.0]] == returns.tolist()


def test_reinforce_pp_by_hand():
    mask = torch.tensor([[True, True, False, True]])
    advantages, returns = reinforce_pp(f64([1, 2, 50, 4]), mask, gamma=0.5, whiten=False)
    assert [[3.0, 4.0, 0.0, 4.0]] == returns.tolist()
    assert torch.equal(returns, advantages)
    white, returns = reinforce_pp(f64([1, 2, 50, 4]), mask, gamma=0.5)
    close(masked_whiten(returns, mask), white)


def test_token_rewards_sit_on_the_last_unmasked_token():
    mask = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
    expected = [[0.0, 5.0, 0.0], [0.0, 0.0, 6.0], [0.0, 0.0, 0.0]]
    assert expected == token_rewards(f64(5, 6, 7), mask).tolist()


def test_token_rewards_leave_a_hole_before_the_last_token_empty():
    mask = torch.tensor([[True, False, True, False]])
    assert [[0.0, 0.0, 5.0, 0.0]] == token_rewards(f64(5), mask).tolist()


def test_token_rewards_pay_for_divergence_on_every_unmasked_token():
    mask = torch.tensor([[True, True, False]])
    spread = token_rewards(f64(5), mask, kl=f64([1, 2, 4]), kl_coef=0.5)
    assert [[-0.5, 4.0, 0.0]] == spread.tolist()


# --- GAE of rows that were cut --------------------------------------------------------------


def test_gae_bootstraps_by_hand():
    """The row's tokens are 2 and 4 of five. delta = 1 + 0.9 * 1.5 - 0.5 = 1.85, and at the end
    3 + 0.9 * V' - 1.5: 2.85 with V' = 1.5 of the last token, 6 with V' = 5."""
    mask = torch.tensor([[False, True, False, True, False]])
    rewards, values = f64([7, 1, 7, 3, 7]), f64([9, 0.5, 9, 1.5, 9])
    options = {"gamma": 0.9, "lam": 0.5, "whiten": False}
    cut, done = torch.tensor([False]), torch.tensor([True])

    own, returns = gae(rewards, values, mask, finished=cut, **options)
    close(f64([0, 1.85 + 0.45 * 2.85, 0, 2.85, 0]), own)
    close(f64([0, 2.35 + 0.45 * 2.85, 0, 4.35, 0]), returns)
    close(
        f64([0, 1.85 + 0.45 * 6, 0, 6, 0]),
        gae(rewards, values, mask, finished=cut, bootstrap=f64(5), **options)[0],
    )
    plain = gae(rewards, values, mask, **options)[0]
    given_value = gae(rewards, values, mask, bootstrap=f64(5), **options)[0]
    close(f64([0, 1.85 + 0.45 * 6, 0, 6, 0]), given_value)
    assert torch.equal(plain, gae(rewards, values, mask, finished=done, **options)[0])
    ended = gae(rewards, values, mask, finished=done, bootstrap=f64(5), **options)[0]
    assert torch.equal(plain, ended)


@PROPERTY
@given(*SIZES)
def test_gae_is_a_loop_over_the_tokens_that_count(seed, rows, tokens):
    fields = batch(seed, rows, tokens)
    rewards, values, mask = fields["rewards"], fields["values"], fields["mask"]
    made = torch.zeros_like(rewards)
    for row in range(rows):
        following = 0.0 if fields["finished"][row] else fields["after"][row].item()
        carried = 0.0
        for t in reversed(range(tokens)):
            if mask[row, t]:
                delta = rewards[row, t] + 0.9 * following - values[row, t]
                carried = delta + 0.9 * 0.8 * carried
                made[row, t], following = carried, values[row, t]
    options = {"gamma": 0.9, "lam": 0.8, "finished": fields["finished"]}
    got, returns = gae(rewards, values, mask, bootstrap=fields["after"], whiten=False, **options)
    close(made, got)
    close(torch.where(mask, made + values, 0.0), returns)
    white = gae(rewards, values, mask, bootstrap=fields["after"], **options)[0]
    close(masked_whiten(made, mask), white, 1e-9)


@PROPERTY
@given(*SIZES)
def test_a_bootstrap_with_no_end_in_sight_is_one_more_token(seed, rows, tokens):
    """A cut row is a longer one whose next token has reward 0 and that value, and then ends:
    with gamma = lam = 1 only the sum of what is to come counts."""
    fields = batch(seed, rows, tokens)
    rewards, values, mask, after = (fields[n] for n in ("rewards", "values", "mask", "after"))
    cut = gae(rewards, values, mask, bootstrap=after, whiten=False)[1]
    longer = torch.cat([rewards, after.unsqueeze(-1)], -1)
    wide = torch.cat([mask, mask.any(-1, keepdim=True)], -1)
    close(torch.where(mask, reinforce_pp(longer, wide, whiten=False)[1][:, :-1], 0.0), cut)


def test_an_empty_row_is_not_continued():
    mask = torch.tensor([[False, False], [True, False]])
    made = gae(f64([1, 1], [1, 1]), f64([2, 2], [2, 2]), mask, bootstrap=f64(9, 9), whiten=False)
    assert [[0.0, 0.0], [8.0, 0.0]] == made[0].tolist()


# --- ReMax ----------------------------------------------------------------------------------


def test_remax_by_hand():
    mask = torch.tensor([[True, True, False, True], [False, False, False, False]])
    rewards = f64([1, 2, 50, 4], [9, 9, 9, 9])
    advantages, returns = remax(rewards, f64(3, math.nan), mask)
    assert [[4.0, 3.0, 0.0, 1.0], [0.0] * 4] == advantages.tolist()
    assert [[7.0, 6.0, 0.0, 4.0], [0.0] * 4] == returns.tolist()


# --- optimal token baseline -----------------------------------------------------------------


def energies(*rows: list[float]) -> tuple[Tensor, Tensor]:
    """Log-probs and sums of squares with `1 - 2 pi + sum` of these values: pi = 1/2."""
    return f64(*rows) * 0 + math.log(0.5), f64(*rows)


def test_optimal_token_baseline_by_hand():
    """Returns 5, 3 and 1, 1; energies 1, 2 and 3, 1 sum to 1, 3 and 3, 4. The baselines are
    (5 + 3) / 4 = 2 and (9 + 4) / 7; only the first row has a third token, with return 1."""
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rewards, group = f64([2, 2, 1], [0, 1, 7]), torch.tensor([4, 4])
    log_probs, squares = energies([1, 2, 5], [3, 1, 9])
    fields = (rewards, log_probs, squares, mask, group)

    advantages, returns = optimal_token_baseline(*fields)
    close(f64([3, 3 - 13 / 7, 1], [-1, 1 - 13 / 7, 0]), advantages, 1e-7)
    assert [[5.0, 3.0, 1.0], [1.0, 1.0, 0.0]] == returns.tolist()
    kept = optimal_token_baseline(*fields, zero_tail=False)[0]
    close(f64([3, 3 - 13 / 7, 0], [-1, 1 - 13 / 7, 0]), kept, 1e-7)
    assert 0.0 == kept[0, 2].item()


def test_importance_weights_enter_the_baseline_squared():
    """One token each: energies 1 and 1, weights 2 and 1: baseline (4 * 5 + 0) / 5 = 4."""
    mask, group = torch.ones(2, 1, dtype=torch.bool), torch.tensor([0, 0])
    log_probs, squares = energies([1], [1])
    got = optimal_token_baseline(
        f64([5], [0]), log_probs, squares, mask, group, weights=f64([2], [1])
    )
    close(f64([1], [-4]), got[0], 1e-7)


def test_a_row_alone_in_its_group_has_no_baseline():
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    group = torch.tensor([0, 0, 1])
    fields = (f64([1, 2], [9, 9], [4, 9]), *energies([1, 1], [1, 1], [1, 1]), mask, group)
    assert not optimal_token_baseline(*fields)[0].any()
    kept = optimal_token_baseline(*fields, single="reward")[0]
    assert [[3.0, 2.0], [0.0, 0.0], [4.0, 0.0]] == kept.tolist()


def test_certain_tokens_and_rounding_give_finite_advantages():
    """All energies 0, or below 0 by rounding: the baseline is 0 where returns differ."""
    mask, group = torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 0])
    log_probs = torch.zeros(2, 2)
    for squares in (torch.ones(2, 2), torch.ones(2, 2) - 1e-7):
        got = optimal_token_baseline(
            torch.tensor([[0.0, 1.0], [0.0, 3.0]]), log_probs, squares, mask, group
        )[0]
        assert [[1.0, 1.0], [3.0, 3.0]] == got.tolist()


@pytest.mark.parametrize("value", [0.1, 0.7])
def test_equal_returns_give_exactly_zero(value):
    fields = batch(5, 4, 3)
    mask = torch.ones(4, 3, dtype=torch.bool)
    rewards = torch.zeros(4, 3, dtype=torch.float64)
    rewards[:, -1] = value
    made = optimal_token_baseline(
        rewards, fields["log_probs"], fields["sum_pi_squared"], mask, torch.zeros(4).long()
    )
    assert not made[0].any()


@PROPERTY
@given(*SIZES, st.booleans())
def test_optimal_token_baseline_is_a_loop(seed, rows, tokens, zero_tail):
    fields = batch(seed, rows, tokens)
    names = ("rewards", "log_probs", "sum_pi_squared", "mask", "group")
    rewards, log_probs, squares, mask, group = (fields[name] for name in names)
    tracks = []
    for row in range(rows):
        at = mask[row].nonzero().flatten().tolist()
        energy = [(1 - 2 * log_probs[row, t].exp() + squares[row, t]).item() for t in at]
        track = [
            (t, sum(rewards[row, u].item() for u in at[i:]), sum(energy[: i + 1]))
            for i, t in enumerate(at)
        ]
        tracks.append(track)
    expected = torch.zeros_like(rewards)
    for row, track in enumerate(tracks):
        others = [tracks[j] for j in range(rows) if group[j] == group[row] and tracks[j]]
        for i, (t, to_go, _) in enumerate(track):
            live = [other[i] for other in others if len(other) > i]
            weight = sum(one[2] for one in live) + 1e-8
            baseline = sum(one[1] * one[2] for one in live) / weight
            if zero_tail and len(live) == 1:
                baseline = 0.0
            expected[row, t] = 0.0 if len(others) == 1 else to_go - baseline
    got = optimal_token_baseline(*(fields[name] for name in names), zero_tail=zero_tail)[0]
    close(expected, got, 1e-6)


# --- what holds for all ---------------------------------------------------------------------


def all_of(f: dict[str, Tensor]) -> list[Tensor]:
    return [
        *gae(f["rewards"], f["values"], f["mask"], lam=0.9, finished=f["finished"]),
        *gae(f["rewards"], f["values"], f["mask"], bootstrap=f["after"]),
        *reinforce_pp(f["rewards"], f["mask"], gamma=0.9),
        *remax(f["rewards"], f["after"], f["mask"]),
        token_rewards(f["after"], f["mask"], kl=f["values"], kl_coef=0.1),
        *optimal_token_baseline(
            f["rewards"],
            f["log_probs"],
            f["sum_pi_squared"],
            f["mask"],
            f["group"],
            weights=f["values"],
        ),
    ]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_nothing(garbage):
    fields = batch(3, 5, 6)
    dirty = dict(fields)
    for name in ("rewards", "values", "log_probs", "sum_pi_squared"):
        dirty[name] = torch.where(fields["mask"], fields[name], garbage)
    dirty["after"] = torch.where(fields["mask"].any(-1), fields["after"], garbage)
    for clean, got in zip(all_of(fields), all_of(dirty), strict=True):
        assert torch.equal(clean, got)


@PROPERTY
@given(*SIZES)
def test_padding_rows_and_their_order_change_nothing(seed, rows, tokens):
    fields = batch(seed, rows, tokens)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))

    def widen(x: Tensor) -> Tensor:
        fill = 0 if x.dtype in (torch.bool, torch.int64) else math.nan
        sides = (2, 3, 0, 1) if x.dim() == 2 else (0, 1)
        return torch.nn.functional.pad(x[order], sides, value=fill)

    wide = {name: widen(value) for name, value in fields.items()}
    for plain, padded in zip(all_of(fields), all_of(wide), strict=True):
        close(plain[order], padded[:-1, 2:-3], 1e-9)
        assert not padded[-1].any()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_an_empty_batch_is_no_error(shape):
    rows, tokens = shape
    fields = {name: x[:rows] for name, x in batch(0, 2, 3).items()}
    fields = {n: x[:, :tokens] if x.dim() == 2 else x for n, x in fields.items()}
    assert {shape} == {tuple(made.shape) for made in all_of(fields)}


def test_nothing_carries_a_gradient_and_dtypes_are_those_of_the_rewards():
    fields = batch(0, 3, 4)
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in fields.items()}
    for name in ("values", "log_probs"):
        fields[name].requires_grad_()
    assert not any(made.requires_grad for made in all_of(fields))
    assert {torch.float64} == {made.dtype for made in all_of(fields)}
    assert {torch.float32} == {made.dtype for made in all_of(narrow)}
