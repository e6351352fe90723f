"""Advantage estimators: hand-computed cases, invariances, garbage under the mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.advantages import gae, grpo, reinforce_pp, rloo, token_rewards
from rlflow.ops.math.masked import masked_whiten

pytestmark = pytest.mark.torch

GARBAGE = [math.nan, math.inf, -math.inf, 3e38]
ESTIMATORS = {
    "grpo": grpo,
    "grpo batch": lambda r, g: grpo(r, g, scale="batch"),
    "dr_grpo": lambda r, g: grpo(r, g, scale="none"),
    "rloo": rloo,
}
GROUP_ESTIMATORS = pytest.mark.parametrize("name", ESTIMATORS)


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(expected: Tensor, got: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


# GAE


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


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_token_estimators_take_an_empty_batch(shape):
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    assert shape == gae(empty, empty, mask)[0].shape
    assert shape == reinforce_pp(empty, mask)[1].shape
    assert shape == token_rewards(torch.zeros(shape[0]), mask).shape


def batch(seed: int, rows: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values, and a mask with holes, an empty last row and a full first one."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    mask[0], mask[-1] = True, False
    return rewards, values, mask


SIZES = (st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 7))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(*SIZES)
def test_gae_without_discount_is_reward_to_go_minus_value(seed, rows, tokens):
    rewards, values, mask = batch(seed, rows, tokens)
    to_go = torch.where(mask, rewards, 0.0).flip(-1).cumsum(-1).flip(-1)
    advantages, returns = gae(rewards, values, mask, whiten=False)
    close(torch.where(mask, to_go - values, 0.0), advantages)
    close(torch.where(mask, to_go, 0.0), returns)
    close(reinforce_pp(rewards, mask)[1], returns)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(*SIZES)
def test_gae_with_lambda_zero_is_the_one_step_error(seed, rows, tokens):
    rewards, values, mask = batch(seed, rows, tokens)
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0, whiten=False)
    for row in range(rows):
        at = mask[row].nonzero().flatten()
        following = torch.cat([values[row, at][1:], torch.zeros(1, dtype=torch.float64)])
        expected = rewards[row, at] + 0.9 * following[: len(at)] - values[row, at]
        close(expected, advantages[row, at])


@settings(deadline=None, max_examples=40, derandomize=True)
@given(*SIZES)
def test_padding_rows_and_their_order_change_no_token_advantage(seed, rows, tokens):
    rewards, values, mask = batch(seed, rows, tokens)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    pad = torch.nn.functional.pad

    def widen(x: Tensor) -> Tensor:
        return pad(x[order], (2, 3, 0, 1), value=False if x.dtype is torch.bool else math.nan)

    for plain, padded in zip(
        (*gae(rewards, values, mask, lam=0.9), *reinforce_pp(rewards, mask, gamma=0.9)),
        (
            *gae(widen(rewards), widen(values), widen(mask), lam=0.9),
            *reinforce_pp(widen(rewards), widen(mask), gamma=0.9),
        ),
        strict=True,
    ):
        close(plain[order], padded[:-1, 2:-3])
        assert not padded[-1].any()


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_token_advantage(garbage):
    rewards, values, mask = batch(3, 4, 5)

    def run(fill: float) -> list[Tensor]:
        r, v = torch.where(mask, rewards, fill), torch.where(mask, values, fill)
        outcome = torch.where(mask.any(-1), r.new_ones(()), fill)
        spread = token_rewards(outcome, mask, kl=v, kl_coef=0.1)
        return [*gae(r, v, mask, lam=0.9), *reinforce_pp(r, mask), spread]

    for clean, dirty in zip(run(0.0), run(garbage), strict=True):
        assert torch.equal(clean, dirty)


def test_nothing_carries_a_gradient():
    rewards, values, mask = batch(0, 3, 4)
    values.requires_grad_()
    assert not any(result.requires_grad for result in gae(rewards, values, mask))
    assert not token_rewards(values[:, 0], mask).requires_grad


# REINFORCE++


def test_reinforce_pp_by_hand():
    mask = torch.tensor([[True, True, False, True]])
    advantages, returns = reinforce_pp(f64([1, 2, 50, 4]), mask, gamma=0.5, whiten=False)
    assert [[3.0, 4.0, 0.0, 4.0]] == returns.tolist()
    assert torch.equal(returns, advantages)
    white, returns = reinforce_pp(f64([1, 2, 50, 4]), mask, gamma=0.5)
    close(masked_whiten(returns, mask), white)


# rewards on tokens


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


# group estimators


def test_grpo_by_hand():
    """Group 7: mean 1/2, deviation sqrt(1/3); group 2: mean 3, deviation sqrt(2)."""
    reward, group = f64(1, 2, 0, 0, 4, 1), torch.tensor([7, 2, 7, 7, 2, 7])
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    close(f64(a, -b, -a, -a, b, a), grpo(reward, group))


def test_grpo_scales_by_hand():
    """All of 1, 2, 0, 0, 4, 1: mean 4/3, squares 34/3, deviation sqrt(34/15)."""
    reward, group = f64(1, 2, 0, 0, 4, 1), torch.tensor([7, 2, 7, 7, 2, 7])
    centred = f64(0.5, -1, -0.5, -0.5, 1, 0.5)
    assert torch.equal(centred, grpo(reward, group, scale="none"))
    close(centred / (math.sqrt(34 / 15) + 1e-4), grpo(reward, group, scale="batch", std_eps=1e-4))


def test_rloo_by_hand():
    """Each reward minus the mean of the others: 1 - 4, 2 - 3.5, 6 - 1.5."""
    reward, group = f64(1, 10, 2, 6), torch.tensor([0, 5, 0, 0])
    close(f64(-3, 0, -1.5, 4.5), rloo(reward, group))
    close(f64(-3, 10, -1.5, 4.5), rloo(reward, group, single="reward"))


def test_a_group_of_one_is_zero_or_its_reward():
    reward, group = f64(3, 1, 2), torch.tensor([4, 9, 9])
    assert 0.0 == grpo(reward, group)[0].item()
    assert pytest.approx(3 / (1 + 1e-6)) == grpo(reward, group, single="reward")[0].item()
    assert 3.0 == grpo(reward, group, scale="none", single="reward")[0].item()
    assert grpo(reward, group)[1:].equal(grpo(reward, group, single="reward")[1:])
    alone = torch.tensor([0])
    assert [0.0] == grpo(f64(3), alone, scale="batch").tolist()
    assert pytest.approx([3.0]) == grpo(f64(3), alone, scale="batch", single="reward").tolist()


@GROUP_ESTIMATORS
@pytest.mark.parametrize("value", [0.1, 0.7, 1e-9, -3e7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(name, value, dtype):
    """Three times 0.1 has a computed deviation of 1.4e-17: max = min decides, not it."""
    reward = torch.full((7,), value, dtype=dtype)
    assert not ESTIMATORS[name](reward, torch.tensor([0, 1, 0, 1, 0, 1, 1])).any()


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_without_an_epsilon_equal_rewards_are_still_zero(scale):
    level, rest = f64(2, 2, 2), f64(2, 2, 2, 1, 4)
    group = torch.tensor([0, 0, 1, 1, 1])
    assert not grpo(level, group[:3], scale=scale, std_eps=0.0).any()
    mixed = grpo(rest, group, scale=scale, std_eps=0.0)
    assert [True, True, False, False, False] == (mixed == 0).tolist()
    assert mixed.isfinite().all()


@GROUP_ESTIMATORS
def test_no_rows_give_no_advantages(name):
    assert (0,) == ESTIMATORS[name](torch.empty(0), torch.empty(0, dtype=torch.int64)).shape


@GROUP_ESTIMATORS
@pytest.mark.parametrize(
    ("given_dtype", "result"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_advantages_are_at_least_float32(name, given_dtype, result):
    reward = torch.tensor([1, 0, 2]).to(given_dtype)
    assert result == ESTIMATORS[name](reward, torch.zeros(3, dtype=torch.int64)).dtype


def test_a_broken_reward_stays_in_its_group():
    got = rloo(f64(1, math.nan, 3, 4), torch.tensor([0, 1, 0, 1]))
    assert [False, True, False, True] == got.isnan().tolist()


REWARDS = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.integers(-3, 3)), min_size=1, max_size=20
)


def columns(rows: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    reward, group = zip(*rows, strict=True)
    return torch.tensor(reward, dtype=torch.float64), torch.tensor(group)


@GROUP_ESTIMATORS
@settings(deadline=None, max_examples=40, derandomize=True)
@given(rows=REWARDS, seed=st.integers(0, 10**6))
def test_group_advantages_move_with_the_rows_and_ignore_the_names(name, rows, seed):
    reward, group = columns(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    plain = ESTIMATORS[name](reward, group)
    close(plain[order], ESTIMATORS[name](reward[order], 1000 - 17 * group[order]), 1e-8)


@GROUP_ESTIMATORS
@settings(deadline=None, max_examples=40, derandomize=True)
@given(rows=REWARDS, shift=st.floats(-100, 100))
def test_a_constant_per_group_changes_nothing(name, rows, shift):
    """Under `scale="batch"` only a constant for all groups leaves the deviation alone."""
    reward, group = columns(rows)
    moved = reward + shift * (1.0 if name == "grpo batch" else group)
    plain, shifted = ESTIMATORS[name](reward, group), ESTIMATORS[name](moved, group)
    spread = reward.max() - reward.min()
    assert ((plain - shifted).abs() <= 1e-7 * (1 + spread)).all()


@GROUP_ESTIMATORS
@settings(deadline=None, max_examples=40, derandomize=True)
@given(rows=REWARDS)
def test_the_advantages_of_a_group_sum_to_zero(name, rows):
    reward, group = columns(rows)
    advantages = ESTIMATORS[name](reward, group)
    for key in group.unique():
        assert pytest.approx(0.0, abs=1e-8) == advantages[group == key].sum().item()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(rows=REWARDS, factor=st.floats(0.5, 8))
def test_scaling_the_rewards_scales_rloo_and_leaves_grpo(rows, factor):
    reward, group = columns(rows)
    close(factor * rloo(reward, group), rloo(factor * reward, group), 1e-9)
    for scale in ("group", "batch"):
        plain = grpo(reward, group, scale=scale, std_eps=0.0)
        scaled = grpo(factor * reward, group, scale=scale, std_eps=0.0)
        close(plain, scaled, 1e-6)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(rows=REWARDS)
def test_rloo_is_dr_grpo_stretched_by_the_group_size(rows):
    reward, group = columns(rows)
    size = (group[:, None] == group).sum(-1)
    stretched = grpo(reward, group, scale="none") * size / (size - 1).clamp(min=1)
    close(stretched, rloo(reward, group), 1e-9)


def check_grpo(estimator):
    """Rewards 0, 0 and 3e-6: nearly degenerate, so the epsilon and n - 1 are visible."""
    reward, group = f64(0, 0, 3e-6), torch.tensor([3, 3, 3])
    expected = 2e-6 / (math.sqrt(3) * 1e-6 + 1e-6)
    assert pytest.approx(expected, rel=1e-9) == estimator(reward, group)[2].item()


def test_grpo_of_a_nearly_degenerate_group():
    check_grpo(grpo)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r, g: (r - r.mean()) / (r.var() + 1e-6).sqrt(),
        lambda r, g: (r - r.mean()) / (r.std(correction=0) + 1e-6),
        lambda r, g: (r - r.mean()) / (r.std() + 1e-4),
        lambda r, g: (r.mean() - r) / (r.std() + 1e-6),
    ],
    ids=["epsilon in the root", "no Bessel", "another epsilon", "wrong sign"],
)
def test_wrong_grpo_is_caught(wrong):
    with pytest.raises(AssertionError):
        check_grpo(wrong)
