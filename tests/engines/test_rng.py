from __future__ import annotations

import numpy as np
import pytest

from rlflow.engines.hf.generate.rng import permutation, philox, uniforms

pytestmark = pytest.mark.torch  # numpy comes with it


@pytest.mark.parametrize(
    ("expected", "counter", "key"),
    [
        ("6627e8d5 e169c58d bc57ac4c 9b00dbd8", [0] * 4, [0] * 2),
        ("408f276d 41c83b0e a20bc7c6 6d5451fd", [0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2),
        (
            "d16cfe09 94fdcceb 5001e420 24126ea1",
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(expected, counter, key):
    words = philox(tuple(np.array([word], dtype=np.uint64) for word in counter), tuple(key))
    assert expected == " ".join(f"{int(word[0]):08x}" for word in words)


def test_a_number_depends_on_its_sample_and_position_only():
    whole = uniforms(3, 7, "rollout", np.arange(10), 20)
    assert (10, 20) == whole.shape
    alone = uniforms(3, 7, "rollout", np.array([8, 2]), 5, first=11)
    assert np.array_equal(whole[[8, 2], 11:16], alone)


def test_every_part_of_the_key_matters():
    base = uniforms(0, 0, "a", np.array([1]), 4)
    others = [
        uniforms(1, 0, "a", np.array([1]), 4),
        uniforms(0, 1, "a", np.array([1]), 4),
        uniforms(0, 0, "b", np.array([1]), 4),
        uniforms(0, 0, "a", np.array([2]), 4),
        uniforms(0, 0, "a", np.array([1 + 2**32]), 4),
        uniforms(0, 0, "a", np.array([1]), 4, first=1),
    ]
    assert not any(np.intersect1d(base[0, :1], other).size for other in others)


def test_uniforms_are_uniform_and_never_at_the_ends():
    drawn = uniforms(0, 0, "u", np.arange(1000), 100).ravel()
    assert 0 < drawn.min()
    assert drawn.max() < 1
    counts = np.histogram(drawn, bins=10, range=(0, 1))[0]
    # Chi-square with 9 degrees of freedom passes 27.9 once in a thousand.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 27.9


def test_permutation_is_pure_and_complete():
    assert list(range(50)) == sorted(permutation(50, 1, "epoch", 2).tolist())
    assert permutation(50, 1, "epoch", 2).tolist() == permutation(50, 1, "epoch", 2).tolist()
    assert permutation(50, 1, "epoch", 2).tolist() != permutation(50, 1, "epoch", 3).tolist()
    assert [] == permutation(0, 1).tolist()
