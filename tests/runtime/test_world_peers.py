"""The ranks that hold the other parts of a batch: what each says, all hear in the same order."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlflow.runtime.worker import world
from rlflow.runtime.worker.world import GroupPeers
from tests.ops.parts import Meeting

pytestmark = pytest.mark.torch


@pytest.fixture
def together(monkeypatch):
    """Call a function as each of several ranks at once; what each was answered."""

    def all_gather(everyone, mine, group):
        meeting, part = group
        for slot, said in zip(everyone, meeting.all_of(part, mine), strict=True):
            assert slot.shape == said.shape
            slot.copy_(said)

    monkeypatch.setattr(world.dist, "all_gather", all_gather)

    def call(function, given):
        meeting = Meeting(len(given))

        def one(part):
            return function(GroupPeers((meeting, part), part, len(given)), given[part])

        with ThreadPoolExecutor(len(given)) as pool:
            return list(pool.map(one, range(len(given))))

    return call


def test_rows_of_all_parts_stand_in_part_order(together):
    parts = [torch.tensor([[1.5, 2.0]]), torch.zeros(0, 2), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    parts = [part.double() for part in parts]
    for answer in together(GroupPeers.gather, parts):
        assert torch.equal(torch.cat(parts), answer)
        assert torch.float64 == answer.dtype


def test_the_union_is_of_distinct_values_in_order(together):
    parts = [torch.tensor([7, 3]), torch.tensor([3, 3, 1]), torch.zeros(0, dtype=torch.int64)]
    for answer in together(GroupPeers.union, parts):
        assert [1, 3, 7] == answer.tolist()


def test_sums_are_rounded_once(together):
    for answer in together(GroupPeers.sum, [[1e16, 1.0], [1.0, 2.0], [-1e16, 3.0]]):
        assert [1.0, 6.0] == answer
