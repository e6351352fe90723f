"""Weights of several ranks that train, in buckets that the real engine opens in place."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rlflow.contract.values import Shard
from rlflow.engines.hf.loading import load_model
from rlflow.engines.process.client.load import load_sglang
from rlflow.engines.reshard.streaming import BucketStream, Lending
from tests.engines.ranks import World
from tests.engines.reshard_layouts import at, tables
from tests.engines.sglang.conftest import TINY, needs_sglang, options

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

# Smaller than the largest weight of the model, which is a bucket alone.
LIMIT = 100_000


def weights(version):
    """Whole weights near the model's own, the same in every process."""
    source = torch.Generator().manual_seed(version)
    plain = load_model(TINY, dtype=torch.float32, device="cpu").named_tensors()
    return {n: t + 0.05 * torch.randn(t.shape, generator=source) for n, t in plain.items()}


def begun(dtype, ranks):
    """The real engine, whose weights come by the device."""
    how = {"options": options(updates="device"), "dtype": dtype, "device": "cpu"}
    return load_sglang(TINY, name="gen", devices=range(ranks), **how)[0]


def updated(rank, dtype, beside, start=begun):
    """Ranks 0 and 1 hold shards in float32, others are beside an engine's; what is found there."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights(0).items()}
    source = tables(shapes, "fsdp", [0, 1]).get(rank, {})
    held = {
        name: Shard(shape=shape, box=box, tensor=torch.empty([stop - low for low, stop in box]))
        for name, (shape, _, box) in source.items()
    }
    model = None
    if rank == 2:
        model = start(dtype, len(beside))
    # An engine may take longer to start than the world waits.
    group = dist.new_group(timeout=timedelta(seconds=500))
    dist.barrier(group)
    taker = None if model is None else model.taker()
    made = BucketStream(
        held or None,
        [Lending(beside, taker)],
        group,
        device=torch.device("cpu"),
        limit=LIMIT,
        check=True,
    )
    found = []
    for version in (1, 2):
        whole = weights(version)
        for name, shard in held.items():
            shard.tensor.copy_(whole[name][at(shard.box)])
        moved = made.run()
        wrong = made.check()
        if model is not None:
            model.loaded(version)
            kept = all(torch.equal(whole[n].to(dtype), t) for n, t in model.staging.tensors.items())
            found.append((version == model.version, model.check(), kept))
        found.append((wrong, moved.buckets > 3))
    if model is not None:
        model.close()
    return found, sorted({bucket.source for bucket in made.buckets})


@pytest.mark.parametrize(
    ("dtype", "beside"),
    [
        (torch.float32, (2,)),
        pytest.param(torch.bfloat16, (2,), marks=pytest.mark.extra),
    ],
)
def test_an_engine_holds_what_two_ranks_have_trained(dtype, beside):
    """By hashes of what the engine holds, which its staging has too; both ranks send buckets."""
    needs_sglang()
    ranks = World(2 + len(beside))
    try:
        first, second, owner, *others = ranks.run(updated, dtype, beside, timeout=200.0)
    finally:
        ranks.close()
    assert ([({}, True)] * 2, [0, 1]) == first == second
    assert ([(True, {}, True), ({}, True)] * 2, [0, 1]) == owner
    assert all(other == first for other in others)
