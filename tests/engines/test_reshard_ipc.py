"""Weights that engines open where they lie: buckets, handles, and ranks that lend them.

Handles are of shared memory of the host, which travel as those of a GPU do.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.contract.values import Shard
from rlflow.engines.reshard.bucket_layout import slot_bytes, weight_buckets
from rlflow.engines.reshard.slices import ITEMSIZE
from rlflow.engines.reshard.streaming import BucketStream, Lending, shards_in
from tests.engines import reshard_ranks, stream_ranks
from tests.engines.reshard_layouts import lacking, tables

pytestmark = pytest.mark.torch

PARAMS = {"norm": (7,), "scale": (), "up": (16, 12), "down": (12, 16), "words": (64, 12)}
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    min_size=1,
)


@given(ROWS, st.integers(4, 200), st.integers(1, 3), st.booleans())
def test_buckets_hold_every_weight_once_in_order_and_bounded(rows, limit, sources, at_once):
    table = {f"w{number}": (shape, dtype) for number, (dtype, shape) in enumerate(rows)}
    buckets = weight_buckets(table, limit, range(sources), at_once=at_once)

    kept = [name for name, (shape, _) in table.items() if math.prod(shape)]
    assert kept == [name for bucket in buckets for name, *_ in bucket.rows]
    for number, bucket in enumerate(buckets):
        ends = [begin + math.prod(s) * ITEMSIZE[d] for _, d, s, begin in bucket.rows]
        assert [0, *ends] == [begin for *_, begin in bucket.rows] + [bucket.bytes]
        assert 1 == len({dtype for _, dtype, *_ in bucket.rows})
        assert bucket.bytes <= limit or (1, 0) == (len(bucket.rows), bucket.slot)
        assert number % sources == bucket.source
    for before, after in itertools.pairwise(buckets):
        assert before.slot != after.slot or after.bytes > limit
        joins = at_once and after.source > 0 and max(before.bytes, after.bytes) <= limit
        assert joins == (before.round == after.round)
    for number, bucket in enumerate(buckets):
        assert buckets[bucket.round].round == bucket.round <= number
    largest = max((b.bytes for b in buckets), default=0)
    first, second = slot_bytes(buckets)
    assert second <= limit
    assert largest == max(first, second)


def model(names):
    """Weights of a model with tied embeddings, half in bfloat16, and adapters beside."""
    made = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=made).to(dtype) for name, (shape, dtype) in names.items()
    }


NAMES = {
    "model.embed_tokens.weight": ((40, 8), torch.bfloat16),
    "model.layers.0.self_attn.q_proj.weight": ((8, 8), torch.bfloat16),
    "model.layers.0.self_attn.q_proj.lora_A.weight": ((2, 8), torch.float32),
    "model.layers.0.self_attn.q_proj.lora_B.weight": ((8, 2), torch.float32),
    "model.norm.weight": ((8,), torch.bfloat16),
}


@pytest.mark.parametrize("limit", [64, 300, 1 << 20])
def test_weights_are_read_back_from_flat_buckets(limit):
    weights = model(NAMES)
    table = {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()
    }
    found = {}
    for bucket in weight_buckets(table, limit, [0]):
        memory = torch.empty(bucket.bytes, dtype=torch.uint8)
        for name, shard in shards_in(bucket, memory).items():
            shard.tensor.copy_(weights[name])
        # What SGLang does with a flat bucket: a slice of bytes, seen in a dtype and a shape.
        for name, dtype, shape, begin in bucket.rows:
            end = begin + weights[name].nbytes
            found[name] = memory[begin:end].view(getattr(torch, dtype)).reshape(shape)
    assert list(weights) == list(found)
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_lent_memory_is_one_memory_in_several_processes(world):
    """By handles of the host: names of shared memory, opened once each."""
    shared = world(4).run(reshard_ranks.in_group, 3, stream_ranks.exchanged)
    assert [True, False, False] == shared[:3]


SPREAD = [
    ("fsdp", [0, 1], [[0, 1]]),
    ("fsdp", [0, 1], [[0], [1]]),
    ("fsdp", [0, 1], [[2, 3]]),
    ("tp rows", [1, 2], [[0], [3]]),
    ("whole", [0], [[1, 2, 3]]),
]


@pytest.mark.rows(3)
@pytest.mark.parametrize("limit", [128, 1 << 20])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layout", "ranks", "replicas"), SPREAD)
def test_every_rank_of_an_engine_opens_every_weight(world, layout, ranks, replicas, wanted, limit):
    source = tables(PARAMS, layout, ranks)
    (table,) = tables(PARAMS, "whole", [0], wanted).values()

    found = world(4).run(
        reshard_ranks.in_group, 4, stream_ranks.streamed, source, table, replicas, limit
    )

    total = sum(math.prod(shape) for shape in PARAMS.values()) * (4 if wanted == "float32" else 2)
    for moved, asked in found:
        for each in moved:
            assert each.staged <= limit + 64 * 12 * 4
            assert total == each.received + each.copied
            assert each.buckets == (1 if limit > 128 else each.buckets)
        for words in asked:
            assert 2 == words.count("open")
            names = [name for part in words if part != "open" for name in part]
            assert [*PARAMS, *PARAMS] == names


@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [("fsdp", [0, 1], [[0, 1]]), ("fsdp", [0, 1, 2], [[3]]), ("tp rows", [1, 2], [[0], [3]])],
)
def test_sources_on_several_hosts_gather_a_bucket_each_at_the_same_time(
    world, layout, ranks, replicas
):
    """In as much memory as two buckets of one host: a slot, another one, and what waits."""
    limit, source = 1536, tables(PARAMS, layout, ranks)
    (table,) = tables(PARAMS, "whole", [0]).values()
    args = stream_ranks.streamed, source, table, replicas, limit
    found = world(4).run(reshard_ranks.in_group, 4, *args, True)

    total = sum(math.prod(shape) for shape in PARAMS.values()) * 4
    held = [rank for rank, (moved, _) in enumerate(found) if moved[0].staged > limit // 2 + 3072]
    assert ranks == held
    for moved, _ in found:
        for each in moved:
            assert each.staged <= limit + 64 * 12 * 4
            assert total == each.received + each.copied


def test_a_difference_is_found_by_every_rank(world):
    source = tables(PARAMS, "fsdp", [0, 1])
    (table,) = tables(PARAMS, "whole", [0]).values()
    found = world(4).run(
        reshard_ranks.in_group, 4, stream_ranks.damaged, source, table, [[2, 3]], 128
    )
    name = found[0][0]
    assert [(name, [name])] * 4 == found


def test_one_process_lends_what_it_trains():
    weights = model(NAMES)
    table = {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch."), ())
        for name, t in weights.items()
    }
    engine = stream_ranks.Engine(table)
    source = {
        name: Shard(shape=tuple(t.shape), box=tuple((0, n) for n in t.shape), tensor=t)
        for name, t in weights.items()
    }
    made = BucketStream(
        source, [Lending((0,), engine)], None, device=torch.device("cpu"), limit=256, check=True
    )
    moved = made.run()
    assert (0, {}) == (moved.received, made.check())
    (loaded,) = engine.loaded
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("transport", ["shared memory", "collective"])
@pytest.mark.parametrize("layouts", [("whole", [0], [1]), ("tp rows", [0, 1], [1])])
def test_processes_on_one_gpu(world, transport, layouts):
    layout, ranks, others = layouts
    source, target = tables(PARAMS, layout, ranks), tables(PARAMS, "whole", others, "bfloat16")

    found = world(2).run(
        reshard_ranks.in_group, 2, reshard_ranks.on_one_gpu, transport, source, target
    )

    lacked = [lacking(source, [target], rank) for rank in range(2)]
    expected = [2 * sum(int(mask.sum()) for mask in each.values()) for each in lacked]
    assert expected == [moved.received for moved in found]
