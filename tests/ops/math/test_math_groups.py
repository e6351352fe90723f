"""Statistics of groups, degenerate groups, weighted whitening, and shaping by length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.ops.math.groups import GroupStatistics, degenerate, whiten_rows
from rlflow.ops.math.masked import masked_whiten
from rlflow.ops.math.shaping import overlong_penalty
from tests.budget import examples

pytestmark = pytest.mark.torch

PROPERTY = settings(deadline=None, max_examples=examples(40), derandomize=True)


def test_statistics_stand_at_the_rows_of_their_group():
    stats = GroupStatistics(torch.tensor([1.0, 7, 3, 2]), torch.tensor([5, -2, 5, 5]))
    assert [3, 1, 3, 3] == stats.size.tolist()
    assert [2, 7, 2, 2] == stats.mean.tolist()
    assert [1, 1, 1, 1] == stats.deviation().tolist()
    assert [False, True, False, False] == stats.level.tolist()
    assert [7, 6] == stats.each(torch.tensor([6, 7, 6, 6])).tolist()


@pytest.mark.parametrize("value", [0.1, 0.7, 1e-9])
def test_equal_rewards_are_degenerate_whatever_their_deviation(value):
    """The computed deviation of three times 0.1 is not 0."""
    reward = torch.tensor([value, value, 1.0, value, 2.0, value], dtype=torch.float64)
    group = torch.tensor([0, 0, 1, 0, 1, 2])
    assert [True, True, False, True, False, False] == degenerate(reward, group).tolist()


def test_a_group_of_one_or_with_nan_is_not_degenerate():
    reward = torch.tensor([1.0, math.nan, math.nan])
    assert not degenerate(reward, torch.tensor([0, 1, 1])).any()
    assert (0,) == degenerate(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape


def test_several_rewards_are_degenerate_together():
    rewards = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 0.0], [1.0, 1.0]])
    group = torch.tensor([0, 0, 1, 1])
    assert [True, True, False, False] == degenerate(rewards, group).tolist()


@PROPERTY
@given(st.lists(st.tuples(st.floats(-9, 9, width=32), st.integers(0, 5)), min_size=1, max_size=9))
def test_whitened_rows_are_whitened_tokens(rows):
    x, sizes = zip(*rows, strict=True)
    x, sizes = torch.tensor(x, dtype=torch.float64), torch.tensor(sizes)
    mask = torch.arange(6) < sizes.unsqueeze(-1)
    spread = masked_whiten(x.unsqueeze(-1).expand(-1, 6), mask)
    got = whiten_rows(x, sizes).unsqueeze(-1).expand(-1, 6)
    torch.testing.assert_close(torch.where(mask, got, 0.0), spread, rtol=1e-9, atol=1e-9)
    assert not whiten_rows(x, sizes)[sizes == 0].any()


def test_whitened_rows_of_weight_zero_may_hold_anything():
    x = torch.tensor([1.0, math.nan, 3.0, math.inf])
    weight = torch.tensor([1, 0, 1, 0])
    got = whiten_rows(x, weight)
    assert pytest.approx([-math.sqrt(0.5), 0, math.sqrt(0.5), 0], abs=1e-7) == got.tolist()


@pytest.mark.parametrize(
    ("floor", "beyond"), [(True, [-2.0, -2.0]), (False, [-2.5, -4.0])], ids=["floor", "none"]
)
def test_overlong_rows_pay_by_length(floor, beyond):
    """Room for 20, the last 8 of it a buffer: free up to 12, all of the factor at 20."""
    length = torch.tensor([0, 12, 13, 16, 20, 22, 28])
    penalty = overlong_penalty(length, max_length=20, buffer=8, factor=2.0, floor=floor)
    assert [0.0, 0.0, -0.25, -1.0, -2.0, *beyond] == penalty.tolist()
    assert torch.float32 == penalty.dtype
    assert not penalty[:2].signbit().any()


def test_overlong_defaults_are_those_of_the_paper():
    length = torch.tensor([16384, 18432, 20480, 30000])
    got = overlong_penalty(length, max_length=20480, buffer=4096)
    assert [0.0, -0.5, -1.0, -1.0] == got.tolist()
