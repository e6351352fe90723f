"""Weights that another process opens in the memory of the device, bucket by bucket.

On a CPU by the names of shared memory, on a GPU by CUDA IPC handles; the code is the same.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlflow.contract.values import Shard
from rlflow.engines.reshard.hashing import hash_box
from rlflow.engines.reshard.ipc import borrow
from rlflow.engines.reshard.streaming import BucketStream, Lending

pytestmark = pytest.mark.torch


def reader(pipe: Any) -> None:
    """Another process: opens what it is told of and answers with hashes, taken on the device."""
    while (told := pipe.recv()) is not None:
        rows, handle = told
        memory = borrow(handle)
        found = {}
        for name, dtype, shape, start in rows:
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            tensor = memory[start : start + size].view(kind).view(shape)
            box = tuple((0, length) for length in shape)
            found[name] = hash_box(tensor, box, shape, kind)
            del tensor
        del memory
        pipe.send((os.getpid(), found))


class Elsewhere:
    """What takes buckets for a process of its own; `kept` has copies on the host."""

    def __init__(self, pipe: Any, wanted: dict[str, Any]) -> None:
        self.pipe, self.table = pipe, wanted
        self.found: dict[str, int] = {}
        self.kept: dict[str, Any] = {}
        self.pids: set[int] = set()

    def wanted(self) -> dict[str, Any]:
        return self.table

    def open(self) -> None:
        self.found = {}

    def take(self, rows: Any, handles: Any) -> Any:
        self.pipe.send((rows, handles[0]))

        def wait() -> None:
            pid, hashes = self.pipe.recv()
            self.found.update(hashes)
            self.pids.add(pid)

        return wait

    def keep(self, weights: Any) -> None:
        self.kept.update({name: tensor.to("cpu", copy=True) for name, tensor in weights.items()})


@pytest.fixture
def pipe() -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=reader, args=(theirs,), daemon=True)
    process.start()
    yield ours
    ours.send(None)
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.slow
def test_another_process_reads_what_is_trained_here(pipe: Any, device: Any, big: bool) -> None:
    """Twice, with other weights; bfloat16 and float32, a weight larger than a bucket among them."""
    rows, width = (60_000, 4096) if big else (600, 64)
    limit = (256 << 20) if big else 40_000
    shapes = {"words": (rows, width), "norm": (width,), "q": (width, width), "k": (width, 8)}
    kinds = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    weights = {
        name: torch.randn(shape, device=device).to(kind)
        for (name, shape), kind in zip(shapes.items(), kinds, strict=True)
    }
    boxes = {name: tuple((0, length) for length in shape) for name, shape in shapes.items()}
    source = {n: Shard(shape=shapes[n], box=boxes[n], tensor=t) for n, t in weights.items()}
    taker = Elsewhere(pipe, weights)
    made = BucketStream(
        source, [Lending((0,), taker)], None, device=torch.device(device), limit=limit, check=True
    )
    for _ in range(2):
        for tensor in weights.values():
            tensor.mul_(1.5)
        moved = made.run()
        expected = {n: hash_box(t, boxes[n], shapes[n], t.dtype) for n, t in weights.items()}
        assert expected == taker.found
        assert {} == made.check()
        assert all(torch.equal(weights[n].cpu(), taker.kept[n]) for n in weights)
        assert (3, 0) == (moved.buckets, moved.received)
    assert {os.getpid()}.isdisjoint(taker.pids)
