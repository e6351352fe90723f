"""Rejection and the interpolated proximal policy: statistics by hand, bounds, garbage."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.losses.rejection import divergence, kept
from rlflow.ops.math.proximal import loglinear

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
RATIO = [[2.0, 0.5, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]]
BAD = (math.nan, math.inf, -math.inf)


def f64(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def policies() -> tuple[Tensor, Tensor]:
    """Ratios pi_prox / pi_behave of 2, 1/2 | 4 | none."""
    behaviour = f64([-3.0, -2.0, 0.0], [-4.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    return behaviour + f64(*RATIO).log(), behaviour


LN2 = math.log(2)
K3 = {ratio: ratio - 1 - math.log(ratio) for ratio in (2.0, 0.5, 4.0)}


@pytest.mark.parametrize(
    ("statistic", "over", "expected"),
    [
        ("k1", "token", [[LN2, -LN2, 0], [2 * LN2, 0, 0]]),
        ("k2", "token", [[LN2**2 / 2, LN2**2 / 2, 0], [2 * LN2**2, 0, 0]]),
        ("k3", "token", [[K3[2.0], K3[0.5], 0], [K3[4.0], 0, 0]]),
        ("k1", "row-sum", [[0, 0, 0], [2 * LN2, 0, 0]]),
        ("k2", "row-sum", [[LN2**2, LN2**2, 0], [2 * LN2**2, 0, 0]]),
        ("k3", "row-mean", [[(K3[2.0] + K3[0.5]) / 2] * 2 + [0], [K3[4.0], 0, 0]]),
        ("k3", "row-max", [[K3[2.0], K3[2.0], 0], [K3[4.0], 0, 0]]),
        ("k2", "row-max", [[LN2**2 / 2, LN2**2 / 2, 0], [2 * LN2**2, 0, 0]]),
    ],
)
def test_statistics_by_hand(statistic, over, expected):
    found = divergence(*policies(), MASK, statistic=statistic, over=over)
    torch.testing.assert_close(found, f64(*expected, [0, 0, 0]), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"statistic": "k1", "high": 3.0}, [[1, 1, 0], [0, 0, 0]]),
        ({"statistic": "k1", "high": 5.0, "low": 0.6}, [[1, 0, 0], [1, 0, 0]]),
        ({"statistic": "k1", "high": 5.0, "low": 0.4}, [[1, 1, 0], [1, 0, 0]]),
        ({"statistic": "k1", "high": 1.9}, [[0, 0, 0], [0, 0, 0]]),
        ({"statistic": "k1", "high": 1.9, "over": "row-mean"}, [[1, 1, 0], [0, 0, 0]]),
        ({"statistic": "k2", "high": 0.5}, [[1, 1, 0], [0, 0, 0]]),
        ({"statistic": "k3", "high": 0.2}, [[0, 1, 0], [0, 0, 0]]),
        ({"statistic": "k3", "high": 0.2, "over": "row-max"}, [[0, 0, 0], [0, 0, 0]]),
        ({"statistic": "k3", "high": 0.26, "over": "row-mean"}, [[1, 1, 0], [0, 0, 0]]),
        ({"statistic": "k3", "high": 2.0, "over": "row-sum"}, [[1, 1, 0], [1, 0, 0]]),
    ],
)
def test_what_is_kept_by_hand(options, expected):
    """k1 bounds the ratio pi_prox / pi_behave; k3 of 2, 1/2, 4 is 0.307, 0.193, 1.614."""
    found = kept(*policies(), MASK, **options)
    assert [*expected, [0, 0, 0]] == found.long().tolist()


def test_one_bound_holds_both_sides_and_is_itself_kept():
    behaviour = f64([0.0, 0.0, 0.0, 0.0])
    proximal = f64([math.log(2), -math.log(2), math.log(2) + 1e-9, -math.log(2) - 1e-9])
    everything = torch.ones(1, 4, dtype=torch.bool)
    found = kept(proximal, behaviour, everything, statistic="k1", high=2.0)
    assert [[True, True, False, False]] == found.tolist()


def test_a_bound_of_a_divergence_is_itself_kept():
    everything = torch.ones(1, 2, dtype=torch.bool)
    proximal = f64([1.0, 1.0 + 1e-9])
    found = kept(proximal, torch.zeros(1, 2), everything, statistic="k2", high=0.5)
    assert [[True, False]] == found.tolist()


@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
@pytest.mark.parametrize("over", ["token", "row-sum", "row-mean", "row-max"])
@pytest.mark.parametrize("bad", BAD)
def test_garbage_under_the_mask_changes_nothing(statistic, over, bad):
    proximal, behaviour = policies()
    clean = divergence(proximal, behaviour, MASK, statistic=statistic, over=over)
    dirty = divergence(
        proximal.masked_fill(~MASK, bad),
        behaviour.masked_fill(~MASK, -bad),
        MASK,
        statistic=statistic,
        over=over,
    )
    assert torch.equal(clean, dirty)


@pytest.mark.parametrize("statistic", ["k1", "k2", "k3"])
@given(seed=st.integers(0, 1000))
def test_the_same_policy_is_kept_whatever_the_bound(statistic, seed):
    log_probs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed + 1)) < 0.7
    for over in ("token", "row-sum", "row-mean", "row-max")[: 4 if statistic != "k1" else 3]:
        high = 1.0 + 1e-6 if statistic == "k1" else 1e-6
        found = kept(log_probs, log_probs, mask, statistic=statistic, over=over, high=high)
        assert torch.equal(mask, found)


@given(seed=st.integers(0, 1000), width=st.integers(0, 3))
def test_padding_and_row_order_change_nothing(seed, width):
    generator = torch.Generator().manual_seed(seed)
    proximal, behaviour = -torch.rand(2, 4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.6
    order = torch.randperm(4, generator=generator)
    for statistic, over in (("k1", "row-sum"), ("k3", "row-mean"), ("k2", "row-max")):
        found = divergence(proximal, behaviour, mask, statistic=statistic, over=over)
        wide = [torch.nn.functional.pad(x, (width, 0)) for x in (proximal, behaviour, mask)]
        padded = divergence(*wide, statistic=statistic, over=over)
        torch.testing.assert_close(padded[:, width:], found)
        shuffled = divergence(
            proximal[order], behaviour[order], mask[order], statistic=statistic, over=over
        )
        torch.testing.assert_close(shuffled, found[order])


def test_a_log_ratio_is_held_within_20():
    found = divergence(f64([100.0]), f64([0.0]), torch.ones(1, 1).bool(), statistic="k1")
    assert [[20.0]] == found.tolist()


def test_unknown_words_are_errors():
    with pytest.raises(ValueError, match="k4"):
        divergence(*policies(), MASK, statistic="k4")
    with pytest.raises(ValueError, match="row-min"):
        divergence(*policies(), MASK, statistic="k2", over="row-min")


def test_the_proximal_policy_by_hand():
    """alpha is 0 at age 0, 1/2 at 1, 3/4 at 3; in versions with v = 5: (4 - v_b) / (5 - v_b)."""
    current, behaviour = f64([-1.0, -1.0, -1.0, -1.0]), f64([-3.0, -3.0, -3.0, -3.0])
    age = torch.tensor([[0, 1, 3, -2]])
    mask = torch.tensor([[True, True, True, True]])
    found = loglinear(current, behaviour, age, mask)
    torch.testing.assert_close(found, f64([-3.0, -2.0, -1.5, -3.0]), rtol=1e-12, atol=0)
    v, versions = 5, torch.tensor([[4, 3, 1]])
    alpha = (v - 1 - versions) / (v - versions)
    other = behaviour[:, :3] + alpha * (current - behaviour)[:, :3]
    torch.testing.assert_close(found[:, :3], other)


@pytest.mark.parametrize("bad", BAD)
def test_the_proximal_policy_has_no_gradient_and_no_garbage(bad):
    current = f64([-1.0, bad]).requires_grad_()
    mask = torch.tensor([[True, False]])
    found = loglinear(current, f64([-2.0, bad]), torch.tensor([[1, 2**40]]), mask)
    assert [[-1.5, 0.0]] == found.tolist()
    assert not found.requires_grad
