"""Advantages of rows within groups: hand-computed cases, plain loops, invariances."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.advantages.group import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp_baseline,
    rloo,
)
from tests.budget import examples

pytestmark = pytest.mark.torch

PROPERTY = settings(deadline=None, max_examples=examples(40), derandomize=True)


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> Tensor:
    return torch.tensor(values)


def close(expected: Tensor, got: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


def masks(sizes: list[int], width: int | None = None) -> Tensor:
    """A mask of rows with that many tokens, the first of each a hole where there is room."""
    wide = max(sizes, default=0) + 1 if width is None else width
    return torch.tensor([[0 < t <= size for t in range(wide)] for size in sizes], dtype=torch.bool)


# --- by hand --------------------------------------------------------------------------------


def test_grpo_by_hand():
    """Group 7: mean 1/2, deviation sqrt(1/3); group 2: mean 3, deviation sqrt(2)."""
    reward, group = f64(1, 2, 0, 0, 4, 1), ids(7, 2, 7, 7, 2, 7)
    a, b = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    close(f64(a, -b, -a, -a, b, a), grpo(reward, group))


def test_grpo_scales_by_hand():
    """All of 1, 2, 0, 0, 4, 1: mean 4/3, squares 34/3, deviation sqrt(34/15)."""
    reward, group = f64(1, 2, 0, 0, 4, 1), ids(7, 2, 7, 7, 2, 7)
    centred = f64(0.5, -1, -0.5, -0.5, 1, 0.5)
    assert torch.equal(centred, grpo(reward, group, scale="none"))
    close(centred / (math.sqrt(34 / 15) + 1e-4), grpo(reward, group, scale="batch", std_eps=1e-4))


def test_rloo_by_hand():
    """Each reward minus the mean of the others: 1 - 4, 2 - 3.5, 6 - 1.5."""
    reward, group = f64(1, 10, 2, 6), ids(0, 5, 0, 0)
    close(f64(-3, 0, -1.5, 4.5), rloo(reward, group))
    close(f64(-3, 10, -1.5, 4.5), rloo(reward, group, single="reward"))


def test_a_group_of_one_is_zero_or_its_reward():
    reward, group = f64(3, 1, 2), ids(4, 9, 9)
    assert 0.0 == grpo(reward, group)[0].item()
    assert pytest.approx(3 / (1 + 1e-6)) == grpo(reward, group, single="reward")[0].item()
    assert 3.0 == grpo(reward, group, scale="none", single="reward")[0].item()
    assert grpo(reward, group)[1:].equal(grpo(reward, group, single="reward")[1:])
    alone = ids(0)
    assert [0.0] == grpo(f64(3), alone, scale="batch").tolist()
    assert pytest.approx([3.0]) == grpo(f64(3), alone, scale="batch", single="reward").tolist()


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_without_an_epsilon_equal_rewards_are_still_zero(scale):
    level, rest = f64(2, 2, 2), f64(2, 2, 2, 1, 4)
    group = ids(0, 0, 1, 1, 1)
    assert not grpo(level, group[:3], scale=scale, std_eps=0.0).any()
    mixed = grpo(rest, group, scale=scale, std_eps=0.0)
    assert [True, True, False, False, False] == (mixed == 0).tolist()
    assert mixed.isfinite().all()


def test_a_broken_reward_stays_in_its_group():
    got = rloo(f64(1, math.nan, 3, 4), ids(0, 1, 0, 1))
    assert [False, True, False, True] == got.isnan().tolist()


def test_grpo_of_a_nearly_degenerate_group():
    """Rewards 0, 0 and 3e-6: the epsilon beside the deviation and n - 1 are visible."""
    expected = 2e-6 / (math.sqrt(3) * 1e-6 + 1e-6)
    assert pytest.approx(expected, rel=1e-9) == grpo(f64(0, 0, 3e-6), ids(3, 3, 3))[2].item()


def test_dr_grpo_by_hand():
    """Group 7: 1, 0, 0, 1 with mean 1/2; group 2 is alone."""
    reward, group = f64(1, 5, 0, 0, 1), ids(7, 2, 7, 7, 7)
    assert [0.5, 0.0, -0.5, -0.5, 0.5] == dr_grpo(reward, group).tolist()
    assert [0.5, 5.0, -0.5, -0.5, 0.5] == dr_grpo(reward, group, single="reward").tolist()


def test_grpo_with_a_row_left_out_of_its_own_mean():
    """Rewards 1, 2, 6: means of the others 4, 3.5, 1.5; deviation sqrt(7)."""
    reward, group = f64(1, 10, 2, 6), ids(0, 5, 0, 0)
    scaled = f64(-3, 0, -1.5, 4.5) / (math.sqrt(7) + 1e-6)
    close(scaled, grpo(reward, group, leave_one_out=True))
    assert torch.equal(rloo(reward, group), grpo(reward, group, leave_one_out=True, scale="none"))
    kept = grpo(reward, group, leave_one_out=True, scale="none", single="reward")
    assert [-3.0, 10.0, -1.5, 4.5] == kept.tolist()


def test_rloo_whitened_by_hand():
    """Advantages 1, -1, 3, -3: mean 0, squares 20, deviation sqrt(20 / 3)."""
    got = rloo(f64(2, 1, 0, -3), ids(0, 0, 1, 1), whiten=True)
    close(f64(1, -1, 3, -3) / (math.sqrt(20 / 3) + 1e-4), got)


def test_rloo_whitened_with_a_reward_that_is_kept():
    """Advantages 1, -1, 6: mean 2, squares 1 + 9 + 16 = 26, deviation sqrt(13)."""
    got = rloo(f64(1, 0, 6), ids(0, 0, 1), whiten=True, single="reward", std_eps=0.0)
    close(f64(-1, -3, 4) / math.sqrt(13), got)


def test_opo_by_hand():
    """Lengths 1, 3, 0 and rewards 4, 0, 9: baseline (4 + 0 + 0) / 4 = 1."""
    mask = masks([1, 3, 0, 2])
    got = opo(f64(4, 0, 9, 7), ids(3, 3, 3, 8), mask)
    assert [3.0, -1.0, 8.0, 0.0] == got.tolist()
    assert 7.0 == opo(f64(4, 0, 9, 7), ids(3, 3, 3, 8), mask, single="reward")[3].item()


def test_opo_of_a_group_without_a_token_is_zero():
    assert [0.0, 0.0] == opo(f64(1, 2), ids(0, 0), masks([0, 0])).tolist()
    assert (0,) == opo(torch.empty(0), torch.empty(0, dtype=torch.int64), masks([])).shape


def test_gpg_by_hand():
    """Six rows; the group of two equal rewards and the row alone are three without gradient."""
    reward, group = f64(1, 0, 0, 1, 1, 5), ids(0, 0, 0, 1, 1, 2)
    close(2 * f64(2 / 3, -1 / 3, -1 / 3, 0, 0, 0), gpg(reward, group))
    close(f64(2 / 3, -1 / 3, -1 / 3, 0, 0, 0), gpg(reward, group, alpha="none"))
    close(6 / 4 * f64(2 / 3, -1 / 3, -1 / 3, 0, 0, 0), gpg(reward, group, alpha="zero_reward"))
    close(6 / 4 * f64(2 / 3, -1 / 3, -1 / 3, 0, 0, 5), gpg(reward, group, single="reward"))


def test_gpg_counts_a_negative_reward_as_one():
    got = gpg(f64(1, -1, 0, 0), ids(0, 0, 1, 1), alpha="zero_reward")
    assert [2.0, -2.0, 0.0, 0.0] == got.tolist()


def test_gpg_scaled_by_hand():
    """Half of the rows are level, so alpha is 2; the deviation of 3, 1 is sqrt(2)."""
    got = gpg(f64(3, 1, 2, 2), ids(0, 0, 1, 1), scale="group", std_eps=0.5)
    close(f64(2, -2, 0, 0) / (math.sqrt(2) + 0.5), got)


@pytest.mark.parametrize("alpha", ["degenerate", "zero_reward", "none"])
def test_gpg_of_a_batch_that_teaches_nothing_is_zero(alpha):
    assert not gpg(f64(0, 0, 0, 0), ids(0, 0, 1, 1), alpha=alpha).any()


def test_pass_at_k_by_hand():
    """Group 0: 5 leads 3 by 2, deviation of 1, 5, 3 is 2; group 1 has two best."""
    reward, group = f64(1, 4, 5, 3, 4, 9), ids(0, 1, 0, 0, 1, 2)
    assert [0.0, 0.0, 2.0, 0.0, 0.0, 0.0] == pass_at_k(reward, group, scale="none").tolist()
    close(f64(0, 0, 2 / (2 + 1e-6), 0, 0, 0), pass_at_k(reward, group))


def test_pass_at_k_over_the_batch():
    """All of 0, 2, 4, 6: deviation sqrt(20 / 3)."""
    got = pass_at_k(f64(0, 2, 6, 4), ids(0, 0, 1, 1), scale="batch", std_eps=0.0)
    close(f64(0, 2, 2, 0) / math.sqrt(20 / 3), got)


def test_gdpo_by_hand():
    """Each reward is 1, -1 over sqrt(2) in its group; with weights 2 and 1 the sums are
    1, -1, 3, -3 over sqrt(2): squares 20 / 2 over 3."""
    rewards = f64([10, 0], [0, 5], [4, 2], [1, 1])
    group = ids(0, 0, 1, 1)
    sums = f64(1, -1, 3, -3) / math.sqrt(2)
    close(sums, gdpo(rewards, group, weights=(2.0, 1.0), std_eps=0.0, whiten=False))
    close(sums / math.sqrt(10 / 3), gdpo(rewards, group, weights=(2.0, 1.0), std_eps=0.0))
    equal = gdpo(rewards, group, std_eps=0.0, whiten=False)
    close(f64(0, 0, 2, -2) / math.sqrt(2), equal)


def test_gdpo_over_tokens_weighs_rows_by_length():
    """Sums 1, -1 of rows with 1 and 3 tokens: mean -1/2, squares 9/4 + 3/4 over 3."""
    rewards = f64([1], [-1])
    mask = masks([1, 3])
    got = gdpo(rewards, ids(0, 0), mask, scale="none", over="tokens")
    close(f64(1.5, -0.5) / math.sqrt(1 + 1e-8), got)
    with pytest.raises(ValueError, match="mask"):
        gdpo(rewards, ids(0, 0), over="tokens")
    with pytest.raises(ValueError, match="zip"):
        gdpo(rewards, ids(0, 0), weights=(1.0, 2.0))


def test_gdpo_of_a_single_row_that_keeps_its_rewards():
    """Rewards 3 and 4 are 7; beside 1 and -1 the mean is 7/3."""
    got = gdpo(
        f64([1, 0], [-1, 0], [3, 4]),
        ids(0, 0, 1),
        scale="none",
        single="reward",
        std_eps=0.0,
    )
    centred = f64(1 - 7 / 3, -1 - 7 / 3, 7 - 7 / 3)
    close(centred / centred.std(), got)


def test_reinforce_pp_baseline_by_hand():
    """Centred 1, -1 and 2, -2 with 1, 3, 2, 2 tokens: mean (1 - 3) / 8, variance over 7."""
    reward, group, mask = f64(2, 0, 5, 1), ids(0, 0, 1, 1), masks([1, 3, 2, 2])
    tokens = [1.0, -1, -1, -1, 2, 2, -2, -2]
    mean, variance = statistics.mean(tokens), statistics.variance(tokens)
    expected = (f64(1, -1, 2, -2) - mean) / math.sqrt(variance + 1e-8)
    close(expected, reinforce_pp_baseline(reward, group, mask))
    rows = f64(1, -1, 2, -2) / math.sqrt(10 / 3 + 1e-8)
    close(rows, reinforce_pp_baseline(reward, group, mask, over="rows"))
    raw = reinforce_pp_baseline(reward, group, mask, whiten=False)
    assert [1.0, -1.0, 2.0, -2.0] == raw.tolist()


def test_reinforce_pp_baseline_of_rows_without_a_token():
    """The empty row counts for the mean of its group, and for nothing else."""
    reward, group = f64(3, 0, 0), ids(0, 0, 0)
    got = reinforce_pp_baseline(reward, group, masks([1, 1, 0]))
    expected = f64(1.5, -1.5) / math.sqrt(4.5 + 1e-8)
    close(torch.cat([expected, f64(0)]), got)
    assert not reinforce_pp_baseline(reward, group, masks([0, 0, 0])).any()
    assert not reinforce_pp_baseline(reward, group, masks([0, 0, 0]), whiten=False).any()


def test_reinforce_pp_baseline_of_a_group_of_one():
    reward, group, mask = f64(4, 1, 1), ids(0, 1, 1), masks([1, 1, 1])
    assert not reinforce_pp_baseline(reward, group, mask).any()
    kept = reinforce_pp_baseline(reward, group, mask, single="reward", whiten=False)
    assert [4.0, 0.0, 0.0] == kept.tolist()


# --- plain loops ----------------------------------------------------------------------------


def members(group: list[int], row: int) -> list[int]:
    return [other for other, name in enumerate(group) if name == group[row]]


def loop_opo(reward: list[float], group: list[int], sizes: list[int]) -> list[float]:
    made = []
    for row, value in enumerate(reward):
        own = members(group, row)
        tokens = sum(sizes[j] for j in own)
        if len(own) == 1 or not tokens or len({reward[j] for j in own}) == 1:
            made.append(0.0)
            continue
        made.append(value - math.fsum(sizes[j] * reward[j] for j in own) / tokens)
    return made


def loop_gpg(reward: list[float], group: list[int], sizes: list[int]) -> list[float]:
    differ = [len({reward[j] for j in members(group, row)}) > 1 for row in range(len(reward))]
    alpha = len(reward) / max(sum(differ), 1)
    return [
        alpha * (value - statistics.fmean(reward[j] for j in members(group, row)))
        if differ[row]
        else 0.0
        for row, value in enumerate(reward)
    ]


def loop_pass_at_k(reward: list[float], group: list[int], sizes: list[int]) -> list[float]:
    made = [0.0] * len(reward)
    for row, value in enumerate(reward):
        others = [reward[j] for j in members(group, row) if j != row]
        if others and value > max(others):
            spread = statistics.stdev([value, *others])
            made[row] = (value - max(others)) / (spread + 1e-6)
    return made


def loop_baseline(reward: list[float], group: list[int], sizes: list[int]) -> list[float]:
    centred = [
        value - statistics.fmean(reward[j] for j in members(group, row))
        for row, value in enumerate(reward)
    ]
    tokens = [value for value, size in zip(centred, sizes, strict=True) for _ in range(size)]
    if len(tokens) < 2:
        return [0.0] * len(reward)
    mean, root = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    return [(v - mean) / root if size else 0.0 for v, size in zip(centred, sizes, strict=True)]


LOOPS = {
    "opo": (loop_opo, opo),
    "gpg": (loop_gpg, lambda r, g, m: gpg(r, g)),
    "pass@k": (loop_pass_at_k, lambda r, g, m: pass_at_k(r, g)),
    "reinforce++-baseline": (loop_baseline, reinforce_pp_baseline),
}
ROWS = st.lists(
    st.tuples(st.integers(-4, 4), st.integers(-2, 2), st.integers(0, 4)), min_size=1, max_size=16
)


@pytest.mark.parametrize("name", LOOPS)
@PROPERTY
@given(rows=ROWS)
def test_a_plain_loop_gives_the_same(name, rows):
    reward, group, sizes = map(list, zip(*rows, strict=True))
    loop, formula = LOOPS[name]
    got = formula(f64(*reward), ids(*group), masks(sizes))
    close(f64(*loop([float(r) for r in reward], group, sizes)), got, 1e-7)


@PROPERTY
@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_gdpo_is_a_loop_over_rewards(rows, seed):
    _, group, sizes = map(list, zip(*rows, strict=True))
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-2, 3, (len(rows), 3), generator=generator).double()
    weights = (1.0, -0.5, 2.0)
    total = sum(w * grpo(rewards[:, k], ids(*group)) for k, w in enumerate(weights))
    close(total, gdpo(rewards, ids(*group), weights=weights, whiten=False))
    if len(rows) > 1 and total.std() > 1e-3:
        close(
            (total - total.mean()) / (total.std() + 1e-6),
            gdpo(rewards, ids(*group), weights=weights),
            1e-9,
        )
    tokens = torch.cat([value.expand(size) for value, size in zip(total, sizes, strict=True)])
    if len(tokens) > 1:
        white = (total - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
        white = torch.where(ids(*sizes) > 0, white, 0.0)
        spread = gdpo(rewards, ids(*group), masks(sizes), weights=weights, over="tokens")
        close(white, spread, 1e-6)


# --- properties that all have ---------------------------------------------------------------

ESTIMATORS = {
    "grpo": lambda r, g, m: grpo(r, g),
    "grpo batch": lambda r, g, m: grpo(r, g, scale="batch"),
    "rloo": lambda r, g, m: rloo(r, g),
    "grpo leave one out": lambda r, g, m: grpo(r, g, leave_one_out=True),
    "dr_grpo": lambda r, g, m: dr_grpo(r, g),
    "rloo whitened": lambda r, g, m: rloo(r, g, whiten=True),
    "opo": opo,
    "gpg": lambda r, g, m: gpg(r, g),
    "gpg zero reward": lambda r, g, m: gpg(r, g, alpha="zero_reward", single="reward"),
    "gpg scaled": lambda r, g, m: gpg(r, g, scale="batch"),
    "pass@k": lambda r, g, m: pass_at_k(r, g),
    "gdpo rows": lambda r, g, m: gdpo(torch.stack([r, r.square()], -1), g, m),
    "gdpo tokens": lambda r, g, m: gdpo(
        torch.stack([r, r.square()], -1), g, m, over="tokens", single="reward"
    ),
    "reinforce++-baseline": reinforce_pp_baseline,
    "reinforce++-baseline rows": lambda r, g, m: reinforce_pp_baseline(r, g, m, over="rows"),
}
EVERY = pytest.mark.parametrize("name", ESTIMATORS)


@pytest.mark.rows(6)
@EVERY
@PROPERTY
@given(rows=ROWS, seed=st.integers(0, 10**6))
def test_order_names_of_groups_and_padding_change_nothing(name, rows, seed):
    reward, group, sizes = map(list, zip(*rows, strict=True))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    plain = ESTIMATORS[name](f64(*reward), ids(*group), masks(sizes))
    wide = masks(sizes, width=9).flip(-1)[order]
    moved = ESTIMATORS[name](f64(*reward)[order], 1000 - 17 * ids(*group)[order], wide)
    close(plain[order], moved, 1e-8)


@EVERY
@pytest.mark.parametrize("value", [0.1, 0.7, -3e7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_everywhere_give_exactly_zero(name, value, dtype):
    reward = torch.full((7,), value, dtype=dtype)
    group, mask = ids(0, 1, 0, 1, 0, 1, 1), masks([1, 2, 3, 4, 5, 6, 0])
    assert not ESTIMATORS[name](reward, group, mask).any()


@pytest.mark.parametrize(
    "name", [n for n in ESTIMATORS if n not in ("gdpo tokens", "reinforce++-baseline")]
)
@pytest.mark.parametrize("value", [0.1, 0.7])
def test_a_level_group_beside_others_gives_exactly_zero(name, value):
    """Whitened over tokens it gives what the mean of the others leaves."""
    reward = f64(value, value, 0.3, value, 1.7, -0.9)
    got = ESTIMATORS[name](reward, ids(0, 0, 1, 0, 1, 1), masks([1, 2, 3, 1, 2, 2]))
    assert not got[ids(0, 1, 3)].any()
    assert got.any()


@pytest.mark.rows(6)
@EVERY
@PROPERTY
@given(rows=ROWS)
def test_what_comes_out_is_finite_and_at_least_float32(name, rows):
    reward, group, sizes = map(list, zip(*rows, strict=True))
    for given_dtype, dtype in (
        (torch.int64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ):
        made = ESTIMATORS[name](torch.tensor(reward).to(given_dtype), ids(*group), masks(sizes))
        assert (dtype, (len(rows),)) == (made.dtype, tuple(made.shape))
        assert made.isfinite().all()


@EVERY
def test_no_rows_give_no_advantages(name):
    nothing = torch.empty(0, dtype=torch.int64)
    assert (0,) == ESTIMATORS[name](torch.empty(0), nothing, masks([], width=2)).shape


@pytest.mark.parametrize(
    "name",
    ["grpo", "grpo batch", "rloo", "dr_grpo", "opo", "gpg", "grpo leave one out", "pass@k"],
)
@PROPERTY
@given(rows=ROWS, shift=st.integers(-9, 9))
def test_a_constant_per_group_changes_nothing(name, rows, shift):
    """Under `scale="batch"` only a constant for all groups leaves the deviation alone."""
    reward, group, sizes = map(list, zip(*rows, strict=True))
    moved = f64(*reward) + shift * (1 if name == "grpo batch" else ids(*group))
    plain = ESTIMATORS[name](f64(*reward), ids(*group), masks(sizes))
    close(plain, ESTIMATORS[name](moved, ids(*group), masks(sizes)), 1e-9)


@PROPERTY
@given(rows=ROWS)
def test_what_the_advantages_of_a_group_add_up_to(rows):
    """With 0 of the rest: lengths times OPO's, and those of the others plainly."""
    reward, group, sizes = map(list, zip(*rows, strict=True))
    reward, group, mask = f64(*reward), ids(*group), masks(sizes)
    weighted = mask.sum(-1) * opo(reward, group, mask)
    for key in group.unique():
        own = group == key
        assert pytest.approx(0.0, abs=1e-9) == weighted[own].sum().item()
        for name in ("grpo", "grpo batch", "rloo", "dr_grpo", "gpg"):
            made = ESTIMATORS[name](reward, group, mask)
            assert pytest.approx(0.0, abs=1e-9) == made[own].sum().item()


@PROPERTY
@given(rows=ROWS)
def test_rows_of_equal_length_make_opo_dr_grpo(rows):
    reward, group, _ = map(list, zip(*rows, strict=True))
    reward, group = f64(*reward), ids(*group)
    close(dr_grpo(reward, group), opo(reward, group, masks([3] * len(reward))))


def test_nothing_carries_a_gradient():
    reward = f64(1, 2, 4).requires_grad_()
    for estimator in ESTIMATORS.values():
        assert not estimator(reward, ids(0, 0, 0), masks([1, 2, 3])).requires_grad


@PROPERTY
@given(rows=ROWS, factor=st.floats(0.5, 8))
def test_rloo_is_dr_grpo_stretched_and_scales_with_rewards_and_grpo_does_not(rows, factor):
    reward, group, _ = map(list, zip(*rows, strict=True))
    reward, group = f64(*reward), ids(*group)
    size = (group[:, None] == group).sum(-1)
    close(dr_grpo(reward, group) * size / (size - 1).clamp(min=1), rloo(reward, group), 1e-9)
    close(factor * rloo(reward, group), rloo(factor * reward, group), 1e-9)
    for scale in ("group", "batch"):
        plain = grpo(reward, group, scale=scale, std_eps=0.0)
        close(plain, grpo(factor * reward, group, scale=scale, std_eps=0.0), 1e-6)
