"""Pinned host memory: lent by size in whole pages, taken back, never more than was lent at once."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from rlflow.engines.hf.flat import to_host
from rlflow.engines.pinned import PinnedPool, pin
from rlflow.errors import RunError
from rlflow.modelfiles.host_memory import PAGE, pinned_bytes

pytestmark = pytest.mark.torch


class Pages:
    """What a driver does with pages, and what it refuses: others than whole, or twice the same."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        self.registered = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        twice = any(a < address + size and address < a + n for a, n in self.held.items())
        if twice or address % PAGE or flags or sum(self.held.values()) + size > self.limit:
            return 1
        self.held[address] = size
        self.registered += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


def test_memory_is_lent_by_the_page_and_used_again():
    pages = Pages()
    pool = PinnedPool(pages)
    first = pool.lend(3 * PAGE + 1)
    assert (3 * PAGE + 1, torch.uint8) == (len(first), first.dtype)
    assert 4 * PAGE == pool.lent == pool.held == sum(pages.held.values())
    where = first.data_ptr()
    del first

    second = pool.lend(3 * PAGE + 9)

    assert where == second.data_ptr()
    assert (1, 4 * PAGE, 4 * PAGE) == (pages.registered, pool.held, pool.most)


def test_it_is_lent_for_as_long_as_a_view_of_it_is_there():
    pool = PinnedPool(Pages())
    view = pool.lend(256).view(torch.float32)[3:7].view(2, 2)
    gc.collect()
    view.fill_(4.0)
    other = pool.lend(256)
    other.zero_()
    assert 2 * PAGE == pool.lent
    assert 16.0 == view.sum()
    del view
    assert PAGE == pool.lent


def test_idle_memory_goes_before_more_is_held_than_was_ever_lent():
    pages = Pages()
    pool = PinnedPool(pages)
    large, small = pool.lend(8 * PAGE), pool.lend(2 * PAGE)
    del large
    middle = pool.lend(5 * PAGE)
    assert 10 * PAGE == pool.most
    assert 7 * PAGE == pool.held == sum(pages.held.values())
    del small, middle
    assert (0, 7 * PAGE) == (pool.lent, pool.held)


def test_whatever_is_lent_and_returned_the_counts_are_those_of_the_driver():
    draw, pages = random.Random(4), Pages()
    pool, out, most = PinnedPool(pages), [], 0
    for _ in range(200):
        if out and draw.random() < 0.5:
            out.pop(draw.randrange(len(out)))
        else:
            out.append(pool.lend(draw.randint(1, 5 * PAGE)))
        lent = sum(pinned_bytes(len(each)) for each in out)
        most = max(most, lent)
        assert (lent, most) == (pool.lent, pool.most)
        assert lent <= pool.held == sum(pages.held.values()) <= most


def test_memory_that_is_refused_is_one_clear_error():
    pool = PinnedPool(Pages(limit=3 * PAGE))
    kept = pool.lend(2 * PAGE)
    with pytest.raises(RunError, match=r"E518.*pinned(.|\n)*error 1 for 8192 bytes(.|\n)*ulimit"):
        pool.lend(2 * PAGE)
    assert pinned_bytes(len(kept)) == pool.held
    with pytest.raises(RunError, match="E518"):
        pin(Pages(limit=0), kept)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float32]])
def test_copies_of_a_part_are_one_loan_side_by_side(dtypes, monkeypatch):
    """What sleeps on a CUDA device lies so; here the buffers are a CPU's, and the pool the same."""
    pool = PinnedPool(Pages())
    monkeypatch.setattr("rlflow.engines.hf.flat.memory_like", pool.lend_like)
    buffers = [torch.randn(1000 + at).to(dtype) for at, dtype in enumerate(dtypes)]

    for _ in range(3):
        copies = to_host(buffers)
        assert all(torch.equal(a, b) for a, b in zip(buffers, copies, strict=True))
        assert all(copy.data_ptr() % 64 == 0 for copy in copies)
        assert pinned_bytes(sum(b.nbytes for b in buffers) + 63) == pool.lent == pool.held
        del copies
    assert 0 == pool.lent
