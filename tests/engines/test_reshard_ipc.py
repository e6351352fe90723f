"""Weights read in place from another process: by the code of CUDA IPC, and on a GPU itself."""

from __future__ import annotations

import pytest
import torch

from tests.engines import reshard_ranks
from tests.engines.reshard_layouts import lacking, tables

pytestmark = pytest.mark.torch

PARAMS = {"norm": (7,), "scale": (), "empty": (0, 4), "up": (16, 12), "down": (12, 16)}
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def least(source, targets, rank, each):
    found = lacking(source, targets, rank)
    return each * sum(int(mask.sum()) for mask in found.values())


@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_targets_are_filled_from_the_memory_of_their_sources(world, wanted):
    source = tables(PARAMS, "hsdp", [0, 1, 2, 3])
    targets = [tables(PARAMS, "whole", [1, 2], wanted), tables(PARAMS, "tp rows", [3, 0], wanted)]

    found = world(4).run(reshard_ranks.in_group, 4, reshard_ranks.by_handles, source, targets, {})

    each = 4 if wanted == "float32" else 2
    received = [moved.received for moved, _ in found]
    assert [least(source, targets, rank, each) for rank in range(4)] == received
    assert {0} == {moved.staged for moved, _ in found}
    assert max(handles for _, handles in found) <= 3, "a storage is lent once to each reader"


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("transport", ["ipc", "shared memory", "collective"])
@pytest.mark.parametrize("layouts", [("whole", [0], [1]), ("tp rows", [0, 1], [1])])
def test_processes_on_one_gpu(world, transport, layouts):
    layout, ranks, others = layouts
    source, target = tables(PARAMS, layout, ranks), tables(PARAMS, "whole", others, "bfloat16")

    found = world(2).run(
        reshard_ranks.in_group, 2, reshard_ranks.on_one_gpu, transport, source, target
    )

    received = [moved.received for moved in found]
    assert [least(source, [target], rank, 2) for rank in range(2)] == received
