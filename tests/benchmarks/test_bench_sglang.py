"""The figures of the comparisons with bare SGLang and with the embedded engine."""

from __future__ import annotations

import argparse

import learning_sglang
import pytest
import vs_sglang
from learning_all import Series


@pytest.mark.parametrize(
    ("ours", "target", "ratio", "met"),
    [
        ((1.0, 2.2, 3.0), 1.03, 1.0, "yes"),
        ((1.1, 2.2, 3.0), 1.03, 1.1, "NO"),
        ((9.0, 9.0, 9.0), None, 4.5, ""),
    ],
)
def test_a_ratio_is_the_median_over_the_pairs(ours, target, ratio, met):
    case = vs_sglang.Case(name="c", ours=ours, bare=(1.0, 2.0, 3.0), target=target)
    assert pytest.approx(ratio) == case.ratio
    assert met == case.row()[-1]
    assert pytest.approx(ratio) == case.as_json()["ratio"]


def test_pairs_are_split_into_sides():
    case = vs_sglang.case("c", [(1.0, 2.0), (3.0, 4.0)], None)
    assert ((1.0, 3.0), (2.0, 4.0)) == (case.ours, case.bare)


def test_no_two_turns_share_a_prompt():
    options = argparse.Namespace(requests=20, prompt_tokens=8)
    rows = [tuple(row) for turn in (0, 1, 2) for row in vs_sglang.prompts(turn, options)]
    assert 60 == len(set(rows))
    assert vs_sglang.prompts(1, options) == vs_sglang.prompts(1, options)
    assert all(0 <= token < vs_sglang.VOCABULARY for row in rows for token in row)


def test_the_difference_is_of_the_last_rewards_alone():
    """Means 0.5 and 0.7; variances 10/9 of 0.01 and of 0.04, over ten iterations each."""
    one = (9.0, *[0.4, 0.6] * 5)
    other = (0.0, *[0.5, 0.9] * 5)
    made = [
        Series(metric="reward/mean", held_out=False, iterations=tuple(range(11)), values=(row,))
        for row in (one, other)
    ]
    apart, error = learning_sglang.difference(*made)
    assert pytest.approx(0.2) == apart
    assert pytest.approx(((0.01 + 0.04) / 9) ** 0.5) == error
