"""Averages of shards: by hand, and which shards lie alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from rlflow.contract.values import Shard

pytestmark = pytest.mark.torch

FINITE = st.floats(-1e3, 1e3, width=32)


def shards(**rows: list[float]) -> dict[str, Shard]:
    import torch

    from rlflow.engines.hf.flat import whole_shards

    return whole_shards({name: torch.tensor(row) for name, row in rows.items()})


def test_by_hand_over_three_moves():
    from rlflow.engines.hf.average import move

    average = shards(w=[1.0, -2.0], b=[0.0])
    for theta, expected in (
        ([3.0, -2.0], [1.5, -2.0]),
        ([1.5, 2.0], [1.5, -1.0]),
        ([-0.5, 0.0], [1.0, -0.75]),
    ):
        move(average, shards(w=theta, b=[4.0]), 0.75)
        assert expected == average["w"].tensor.tolist()
    assert [4 * (1 - 0.75**3)] == average["b"].tensor.tolist()


@given(w=st.lists(FINITE, min_size=1, max_size=9), decay=st.floats(0, 1), data=st.data())
def test_it_lies_between_the_two_and_is_the_formula(w, decay, data):
    from rlflow.engines.hf.average import move

    theta = data.draw(st.lists(FINITE, min_size=len(w), max_size=len(w)))
    average = shards(w=w)
    move(average, shards(w=theta), decay)
    for before, towards, found in zip(w, theta, average["w"].tensor.tolist(), strict=True):
        room = 1e-6 * (abs(before) + abs(towards)) + 1e-38
        assert abs(decay * before + (1 - decay) * towards - found) <= room
        assert min(before, towards) - room <= found <= max(before, towards) + room


@pytest.mark.parametrize(("decay", "expected"), [(0, [-0.0, 5.0]), (1, [0.0, -0.0])])
def test_the_ends_keep_the_bits_of_zeros(decay, expected):
    import torch

    from rlflow.engines.hf.average import move

    average = shards(w=[0.0, -0.0])
    move(average, shards(w=[-0.0, 5.0]), decay)
    bits = torch.tensor(expected).view(torch.int32)
    assert bits.tolist() == average["w"].tensor.view(torch.int32).tolist()


def test_lower_weights_are_averaged_in_float32():
    import torch

    from rlflow.engines.hf.average import move
    from rlflow.engines.hf.flat import whole_shards

    average, theta = shards(w=[1.0]), torch.tensor([1.0078125], dtype=torch.bfloat16)
    for _ in range(2):
        move(average, whole_shards({"w": theta}), 0.5)
    assert [1 + 0.75 * 0.0078125] == average["w"].tensor.tolist()


def test_what_does_not_lie_alike_is_named():
    from dataclasses import replace

    from rlflow.engines.hf.average import difference

    one = shards(w=[1.0, 2.0], b=[3.0])
    assert "" == difference(one, shards(w=[0.0, 0.0], b=[0.0]))
    assert "b is a weight of one of them only" == difference(one, shards(w=[1.0, 2.0]))
    assert "w is [2] and [3]" == difference(one, shards(w=[1.0, 2.0, 3.0], b=[3.0]))
    half = one | {"w": replace(one["w"], box=((0, 1),), tensor=one["w"].tensor[:1])}
    assert "w lies as [(0, 2)] and as [(0, 1)]" == difference(one, half)
