"""Choices among all tokens of a step: covariances, quotas, quantiles, responses that drifted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.math.aggregate import count
from rlflow.ops.math.losses.covariance import clip_cov_chosen, covariance, kl_cov_chosen, quota
from rlflow.ops.math.losses.objective import policy_objective
from rlflow.ops.math.losses.off_policy import near_policy, top_entropy

pytestmark = pytest.mark.torch

MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
NAN = math.nan


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


LOG_PROBS = f64([-1.0, -3.0, -2.0, NAN], [-4.0, -5.0, NAN, NAN])
ADVANTAGES = f64(2.0, -3.0)
COVARIANCE = f64([4.0, 0.0, 2.0, 0.0], [3.0, 6.0, 0.0, 0.0])
"""Mean advantage (3 * 2 - 2 * 3) / 5 = 0, mean log-prob -3."""


def test_covariance_by_hand():
    torch.testing.assert_close(covariance(LOG_PROBS, ADVANTAGES, MASK), COVARIANCE)
    shifted = covariance(LOG_PROBS - 7, ADVANTAGES + 5, MASK)
    torch.testing.assert_close(shifted, COVARIANCE)


def test_covariance_is_of_all_tokens_and_not_of_rows():
    one = covariance(LOG_PROBS[:1], ADVANTAGES[:1], MASK[:1])
    assert not one.any()


@pytest.mark.parametrize(
    ("share", "n", "expected"),
    [(2e-4, 9999, 1), (2e-4, 10000, 2), (0.3, 10, 3), (0.3, 0, 0), (1e-9, 1, 1), (0.99, 3, 2)],
)
def test_a_quota_is_rounded_down_and_at_least_one(share, n, expected):
    assert expected == quota(share, n)


def clip_cov(old=LOG_PROBS, *, share=0.5, low=1.0, high=5.0, order=torch.arange, clip=(0.2, 0.2)):
    options = {"cov_share": share, "cov_range": (low, high), "order": order, "clip": clip}
    return clip_cov_chosen(LOG_PROBS, old, ADVANTAGES, MASK, **options).int().tolist()


def test_clip_cov_draws_from_the_range_in_the_given_order():
    """Candidates between 1 and 5: three tokens, of covariance 4, 2 and 3; of 5, half is 2."""
    assert [[1, 0, 1, 0], [0, 0, 0, 0]] == clip_cov()
    backwards = clip_cov(order=lambda n: torch.arange(n - 1, -1, -1))
    assert [[0, 0, 1, 0], [1, 0, 0, 0]] == backwards
    assert [[1, 0, 0, 0], [0, 0, 0, 0]] == clip_cov(share=1e-4)
    assert [[1, 0, 1, 0], [1, 0, 0, 0]] == clip_cov(share=0.99)
    assert [[0, 0, 0, 0], [0, 1, 0, 0]] == clip_cov(low=4.0, high=6.5)
    assert [[0, 0, 0, 0], [0, 0, 0, 0]] == clip_cov(low=10.0, high=11.0)


def test_clip_cov_leaves_out_what_is_clipped_already():
    """The first token's ratio is e^.5 with A > 0: clipped."""
    old = LOG_PROBS - f64([0.5, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0])
    assert [[0, 0, 1, 0], [1, 0, 0, 0]] == clip_cov(old)
    assert [[1, 0, 1, 0], [0, 0, 0, 0]] == clip_cov(old, clip=(0.2, 0.7))


def test_kl_cov_takes_the_highest_and_of_equals_the_first():
    def chosen(share, log_probs=LOG_PROBS):
        return kl_cov_chosen(log_probs, ADVANTAGES, MASK, cov_share=share).int().tolist()

    assert [[0, 0, 0, 0], [0, 1, 0, 0]] == chosen(1e-4)
    assert [[1, 0, 0, 0], [0, 1, 0, 0]] == chosen(0.4)
    assert [[1, 0, 0, 0], [1, 1, 0, 0]] == chosen(0.6)
    assert [[1, 1, 0, 0], [0, 0, 0, 0]] == chosen(0.4, torch.zeros_like(LOG_PROBS))


def test_of_many_equals_the_first_are_taken():
    level = torch.zeros(1, 500, dtype=torch.float64)
    chosen = kl_cov_chosen(level, f64(1.0).view(1), torch.ones_like(level).bool(), cov_share=0.1)
    assert list(range(50)) == chosen.flatten().nonzero().flatten().tolist()


def test_a_step_without_tokens_chooses_nothing():
    none = torch.zeros_like(MASK)
    assert not kl_cov_chosen(LOG_PROBS, ADVANTAGES, none, cov_share=0.5).any()
    options = {"clip": (0.2, 0.2), "cov_share": 0.5, "cov_range": (1.0, 5.0)}
    given_rows = (LOG_PROBS, LOG_PROBS, ADVANTAGES, none)
    assert not clip_cov_chosen(*given_rows, **options, order=torch.arange).any()
    assert not top_entropy(LOG_PROBS, none, share=0.5).any()


@given(
    values=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    share=st.floats(0.01, 0.99),
)
def test_the_quantile_is_the_interpolated_one(values, share):
    entropy = torch.tensor([[*values, NAN]], dtype=torch.float64)
    mask = torch.tensor([[*(True for _ in values), False]])
    kept = top_entropy(entropy, mask, share=share)[0, :-1]
    limit = np.quantile(np.array(values), 1 - share)
    for value, is_kept in zip(values, kept.tolist(), strict=True):
        if abs(value - limit) > 2e-5:
            assert bool(value > limit) is is_kept
    assert kept.any()


def test_the_share_of_highest_entropy_by_hand():
    """Of ten tokens a fifth: the quantile .8 of 0..9 is 7.2."""
    entropy = torch.arange(10.0).view(2, 5)
    kept = top_entropy(entropy, torch.ones(2, 5, dtype=torch.bool), share=0.2)
    assert [8, 9] == kept.flatten().nonzero().flatten().tolist()


def test_equal_entropies_are_all_kept():
    rounded = torch.tensor([[2.0, 1.0 + 1e-7, 1.0, 1.0 - 1e-7, 0.5]])
    kept = top_entropy(rounded, torch.ones(1, 5, dtype=torch.bool), share=0.5)
    assert [[True, True, True, True, False]] == kept.tolist()
    assert top_entropy(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool), share=0.1).all()


def test_responses_that_drifted_are_dropped_where_the_advantage_is_negative():
    """Means of the old minus current log-prob: .2 and .4."""
    sampled = LOG_PROBS + f64([0.1, 0.2, 0.3, NAN], [0.3, 0.5, NAN, NAN])
    rows = [
        ((1.0, 1.0), 0.1, [3, 2]),
        ((-1.0, -1.0), 0.1, [0, 0]),
        ((-1.0, -1.0), 0.3, [3, 0]),
        ((-1.0, 0.0), 0.3, [3, 2]),
        ((-1.0, -1.0), 0.5, [3, 2]),
    ]
    for gains, limit, expected in rows:
        kept = near_policy(LOG_PROBS, sampled, f64(*gains), MASK, limit=limit)
        assert expected == kept.sum(-1).tolist()
        assert not (kept & ~MASK).any()


def test_more_likely_responses_are_never_too_far():
    kept = near_policy(LOG_PROBS, LOG_PROBS - 3, f64(-1.0, -1.0), MASK, limit=0.0)
    assert torch.equal(MASK, kept)


def test_what_is_left_out_counts_in_the_average_and_keeps_its_kl():
    """Row 2 is dropped and of row 1 one token kept: its loss over all five tokens."""
    leaf = torch.where(MASK, LOG_PROBS, 0.0).requires_grad_()
    batch = {
        "response_mask": MASK,
        "advantages": ADVANTAGES,
        "old_log_probs": leaf.detach(),
        "rollout_log_probs": leaf.detach() + f64([0.0], [1.0]),
        "ref_log_probs": leaf.detach() - 1.0,
        "uncertain": torch.tensor([[True, False, False, True], [True, True, True, True]]),
    }
    spec = PolicyLoss(kl_coef=0.5, kl="k2", off_policy_limit=0.5, top_entropy=0.4)
    loss, metrics = policy_objective(spec, {"log_probs": leaf}, batch, count(MASK))
    loss.backward()
    assert pytest.approx(-2 / 5 + 0.5 * 0.5) == loss.item()
    expected = f64([-2 + 0.5, 0.5, 0.5, 0.0], [0.5, 0.5, 0.0, 0.0]) / 5
    torch.testing.assert_close(leaf.grad, expected)
    assert pytest.approx(2 / 5) == metrics["off_policy_dropped"].item()
    assert pytest.approx(3 / 5) == metrics["entropy_kept"].item()


def test_drift_is_measured_from_the_old_policy_where_asked():
    leaf = torch.where(MASK, LOG_PROBS, 0.0)
    batch = {
        "response_mask": MASK,
        "advantages": ADVANTAGES,
        "old_log_probs": leaf + f64([0.0], [1.0]),
        "rollout_log_probs": leaf,
    }
    for start, dropped in (("rollout", 0.0), ("old", 2 / 5)):
        spec = PolicyLoss(off_policy_limit=0.5, off_policy_from=start, old="recomputed")
        _, metrics = policy_objective(spec, {"log_probs": leaf}, batch, count(MASK))
        assert pytest.approx(dropped) == metrics["off_policy_dropped"].item()


def test_choices_are_logged():
    leaf = torch.where(MASK, LOG_PROBS, 0.0)
    chosen = torch.tensor([[True, False, False, True], [False, True, True, True]])
    batch = {"response_mask": MASK, "advantages": ADVANTAGES, "chosen": chosen}
    batch["covariance"] = COVARIANCE
    spec = PolicyLoss("clip_cov", old="current")
    _, metrics = policy_objective(spec, {"log_probs": leaf}, batch, count(MASK))
    assert pytest.approx(3.0) == metrics["covariance"].item()
    assert pytest.approx(2 / 5) == metrics["chosen_fraction"].item()
    assert pytest.approx(2 / 5) == metrics["clip_fraction"].item()
