"""Measures of the mismatch: by hand, against numpy, and the same for every cut of a batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlflow.ops.math.aggregate import Totals, count
from rlflow.ops.math.diagnostics import correlation, effective, finished, rollout_measures
from tests.ops.math.distributions import combine

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, False], [True, False, False]])


def case() -> tuple[Tensor, Tensor]:
    """Probabilities 0.5, 0.25 | 0.1 of the trained policy, 0.25, 0.5 | 0.2 of the sampler."""
    trained = torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.9, 0.9]], dtype=torch.float64).log()
    behaviour = torch.tensor([[0.25, 0.5, 0.1], [0.2, 0.1, 0.1]], dtype=torch.float64).log()
    return trained, behaviour


def measured(trained: Tensor, behaviour: Tensor, mask: Tensor, parts: list[list[int]]):
    totals = count(mask)
    cut = [rollout_measures(trained[p], behaviour[p], mask[p], totals) for p in parts]
    return finished({name: value.item() for name, value in combine(cut).items()})


def test_the_measures_by_hand():
    """Ratios 2, 1/2, 1/2: squares 4, 1/4, 1/4; log-ratios ln 2, -ln 2, -ln 2."""
    trained, behaviour = case()
    found = measured(trained, behaviour, MASK, [[0, 1]])
    ln2 = math.log(2)
    assert pytest.approx(ln2, rel=1e-12) == found["rollout_gap"]
    assert pytest.approx(ln2, rel=1e-12) == found["rollout_gap_max"]
    assert pytest.approx(-ln2 / 3, rel=1e-12) == found["rollout_difference"]
    assert pytest.approx(ln2 / 3, rel=1e-12) == found["rollout_k3"]  # 1 - 1 + ln 2 / 3
    assert pytest.approx(1 / (4.5 / 3), rel=1e-12) == found["rollout_ess"]
    expected = np.corrcoef([0.5, 0.25, 0.1], [0.25, 0.5, 0.2])[0, 1]
    assert pytest.approx(expected, rel=1e-12) == found["rollout_correlation"]
    assert not [name for name in found if name.startswith("_")]


@given(seed=st.integers(0, 10_000), parts=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_any_cut_has_the_measures_of_the_whole(seed, parts):
    generator = torch.Generator().manual_seed(seed)
    trained, behaviour = -3 * torch.rand(2, 6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.7
    mask[2] = False
    mask[0, 0] = True
    cut = [[row for row in range(6) if parts[row] == part] for part in range(4)]
    whole = measured(trained, behaviour, mask, [list(range(6))])
    assert pytest.approx(whole, rel=1e-10, abs=1e-12) == measured(trained, behaviour, mask, cut)
    x = (trained - behaviour)[mask].numpy()
    w = np.exp(x)
    assert pytest.approx(1 / np.mean((w / w.mean()) ** 2), rel=1e-10) == whole["rollout_ess"]
    if len(x) > 2:
        p, q = trained[mask].exp().numpy(), behaviour[mask].exp().numpy()
        assert pytest.approx(np.corrcoef(p, q)[0, 1], rel=1e-8) == whole["rollout_correlation"]
    assert pytest.approx(np.mean(w - 1 - x), rel=1e-10) == whole["rollout_k3"]


def test_the_same_policy_is_all_there_and_correlated():
    trained, _ = case()
    found = measured(trained, trained, MASK, [[0], [1]])
    assert 1.0 == found["rollout_ess"]
    assert pytest.approx(1.0, rel=1e-12) == found["rollout_correlation"]
    assert 0.0 == found["rollout_gap"] == found["rollout_k3"] == found["rollout_difference"]


def test_nearly_equal_sure_policies_keep_their_digits():
    """Probabilities near 1 - 1e-6 whose moments would cancel in p itself."""
    missed = torch.tensor([[1e-6, 2e-6, 3e-6]], dtype=torch.float64)
    trained, behaviour = torch.log1p(-missed), torch.log1p(-2 * missed)
    found = measured(trained, behaviour, torch.ones(1, 3, dtype=torch.bool), [[0]])
    assert pytest.approx(1.0, rel=1e-6) == found["rollout_correlation"]


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ((0.5, 0.5, 0.25, 0.25, 0.25), 1.0),  # both constant and equal
        ((0.5, 0.4, 0.25, 0.16, 0.2), 0.0),  # both constant, apart
        ((0.5, 0.5, 0.25, 0.3, 0.25), 0.0),  # one of them constant
        ((0.5, 0.5, 0.3, 0.3, 0.2), -1.0),
        ((0.5, 0.5, 0.3, 0.3, 0.3), 1.0),
    ],
)
def test_a_correlation_from_moments(moments, expected):
    assert pytest.approx(expected) == correlation(*moments)


def test_effective_samples():
    assert 1.0 == effective(3.0, 9.0)
    assert 0.5 == effective(0.5, 0.5)
    assert 0.0 == effective(0.0, 0.0)


def test_a_step_without_a_token_has_no_nan():
    empty = torch.zeros(2, 0)
    made = rollout_measures(
        empty, empty, torch.zeros(2, 0, dtype=torch.bool), Totals(tokens=0, rows=2)
    )
    found = finished({name: value.item() for name, value in made.items()})
    assert all(math.isfinite(value) for value in found.values())
