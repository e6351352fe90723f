"""pass@k and maj@k by hand, by all subsets one after the other, and in any order.

answers      right    k    maj@k
a a b        a        3    1: two votes to one
a b          a        2    1/2: a tie, each taken in half of the cases
a b b        a        2    subsets ab ab bb: (1/2 + 1/2 + 0) / 3
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations
from math import comb
from operator import mul
from statistics import fmean

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rlflow.ops.math.passing import bootstrap_interval, majority_at, majority_chances, pass_at
from tests.budget import examples

pytestmark = pytest.mark.torch

SAMPLE = st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans())


def passes(n, right, k):
    return pass_at(n, torch.tensor(right), k).tolist()


def majority(answers, right, k):
    return majority_at(answers, right, [k]).item()


def voted(answers, right):
    """The share of the right that a subset's vote makes, ties in equal parts; 0 without a vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    best = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(float(right[answer]) for answer in best) if best else 0.0


def test_pass_at_k_by_hand():
    assert [0.0, 0.25, 1.0] == passes(4, [0, 1, 4], 1)
    # Of the 6 pairs of 4 samples, 3 have the one that is right, and 5 one of two.
    assert [0.0, 0.5, 5 / 6, 1.0, 1.0] == passes(4, [0, 1, 2, 3, 4], 2)
    assert [0.0, 1.0, 1.0] == passes(4, [0, 1, 4], 4)


@settings(max_examples=examples(40))
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_all_subsets_with_one_that_is_right(right, data):
    k = data.draw(st.integers(1, len(right)))
    expected = fmean(float(any(subset)) for subset in combinations(right, k))
    assert passes(len(right), [sum(right)], k) == pytest.approx([expected], abs=1e-15)


def test_pass_at_k_is_unbiased_and_rises_with_k_and_with_what_is_right():
    # Of 12 fresh samples that are right with p = 0.3, weighted by how likely each count is.
    n, p = 12, 0.3
    right = torch.arange(n + 1)
    likely = [comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        mean = sum(map(mul, likely, pass_at(n, right, k).tolist()))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    table = torch.stack([pass_at(n, right, k) for k in range(1, n + 1)])
    assert (table.diff(dim=0) >= 0).all()
    assert (table.diff(dim=1) >= 0).all()
    assert 1.0 == pass_at(1000, torch.tensor([501]), 500).item()


def test_majorities_by_hand():
    one = [True, False]
    assert 1.0 == majority("aab", [True, True, False], 3)
    assert 0.5 == majority("ab", one, 2)
    assert majority("abb", [True, False, False], 2) == pytest.approx(1 / 3)
    assert 0.0 == majority([None, None], one, 2)
    assert 1.0 == majority(["a", None], one, 2)
    assert 0.5 == majority(["a", None], one, 1)
    # An answer with one right sample of two counts by half.
    assert 0.5 == majority("aa", one, 2)


@settings(max_examples=examples(40))
@given(st.lists(SAMPLE, min_size=1, max_size=8), st.data())
def test_majorities_are_the_mean_over_all_subsets_with_ties_in_equal_parts(samples, data):
    answers, right = zip(*samples, strict=True)
    k = data.draw(st.integers(1, len(answers)))
    share = {a: fmean(r for b, r in samples if b == a) for a in answers if a is not None}
    expected = fmean(voted(subset, share) for subset in combinations(answers, k))
    assert majority(answers, right, k) == pytest.approx(expected, abs=1e-12)


def test_majorities_do_not_depend_on_the_order_or_the_names_of_answers():
    answers, right = [*"aabcccdd", None, None], [i % 3 == 0 for i in range(10)]
    known, names = majority_at(answers, right, range(1, 11)), dict(zip("abcd", "zayb", strict=True))
    order = random.Random(0).sample(range(10), 10)
    mixed = [names.get(answers[i]) for i in order], [right[i] for i in order]
    torch.testing.assert_close(majority_at(*mixed, range(1, 11)), known)


def test_the_chances_of_all_answers_add_up_to_those_of_a_vote():
    votes, silent, n = (1, 1, 3, 5, 40, 50), 20, 120
    chances = majority_chances(votes, silent)
    some = torch.stack([chances[size] for size in votes]).sum(0)
    none = torch.tensor([pass_at(n, torch.tensor([n - silent]), k).item() for k in range(1, n + 1)])
    torch.testing.assert_close(some[1:], none.double())
    assert chances[50][n].item() == pytest.approx(1)


def test_intervals_are_of_the_seed_and_get_narrower_with_more_prompts():
    values = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64).repeat(50, 1)
    low, high = bootstrap_interval(values)
    assert (1.0, 1.0) == (low[1].item(), high[1].item())
    # The mean of 100 coins has a deviation of 0.05, and 95 % of draws lie within 1.96 of these.
    assert low[0].item() == pytest.approx(0.5 - 0.098, abs=0.02)
    assert high[0].item() == pytest.approx(0.5 + 0.098, abs=0.02)
    assert torch.equal(torch.stack([low, high]), bootstrap_interval(values))
    uneven = torch.arange(60.0)[:, None]
    assert not torch.equal(bootstrap_interval(uneven), bootstrap_interval(uneven, seed=1))
    more = bootstrap_interval(values.repeat(4, 1))
    assert (more[1] - more[0])[0] < (high - low)[0]
    point = bootstrap_interval(torch.tensor([[0.25]]))
    assert [[0.25], [0.25]] == point.tolist()
