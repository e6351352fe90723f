"""Resharding within one process, and the hash that compares both ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.contract.values import Shard
from rlflow.engines.reshard.hashing import MODULUS, hash_box
from rlflow.engines.reshard.resharder import Resharder
from rlflow.engines.reshard.segments import SharedSegment, opened
from rlflow.errors import RunError
from tests.engines.reshard_layouts import LAYOUTS, at, boxes, models, tables
from tests.engines.reshard_ranks import same_bits, shards_of, values

pytestmark = pytest.mark.torch

DTYPES = ("float64", "float32", "bfloat16", "uint8")


def alone(source, *targets, transport="copy", **options):
    return Resharder(source, targets, None, transport=transport, **options)


def whole_box(shape):
    return tuple((0, length) for length in shape)


@pytest.mark.parametrize("transport", ["copy", "collective", "shared memory"])
def test_one_process_copies_and_sends_nothing(transport):
    params = {"a": (3, 4), "scale": (), "empty": (0,)}
    source = tables(params, "whole", [0])
    whole = values(source, 0)
    same, half = (shards_of(tables(params, "whole", [0], d)[0]) for d in ("float32", "bfloat16"))

    made = alone(shards_of(source[0], whole), same, half, transport=transport)
    moved = made.run()

    assert (0, 4 * 13, 0, 0) == (moved.received, moved.copied, moved.buckets, moved.staged)
    for name, tensor in whole.items():
        assert same_bits(tensor, same[name].tensor)
        assert same_bits(tensor.bfloat16(), half[name].tensor)
    assert {} == made.check()


def test_parameters_that_learn_are_written_without_a_gradient():
    source = Shard(shape=(3,), box=((0, 3),), tensor=torch.nn.Parameter(torch.arange(3.0)))
    target = torch.nn.Parameter(torch.zeros(3))

    alone({"w": source}, {"w": Shard(shape=(3,), box=((0, 3),), tensor=target)}).run()

    assert [0.0, 1.0, 2.0] == target.tolist()
    assert target.is_leaf
    assert target.grad_fn is None


@pytest.mark.parametrize("end", [0, 1])
def test_a_model_that_sleeps_is_refused(end):
    table = tables({"a": (4,), "empty": (0,)}, "whole", [0])
    source, target = shards_of(table[0], values(table, 0)), shards_of(table[0])
    made = alone(source, target)
    (source, target)[end]["a"].tensor.untyped_storage().resize_(0)

    with pytest.raises(RunError, match="E506"):
        made.run()


def test_a_piece_of_a_parameter_is_enough_for_a_piece():
    source = Shard(shape=(6,), box=((2, 6),), tensor=torch.arange(2.0, 6.0))
    target = Shard(shape=(6,), box=((3, 5),), tensor=torch.zeros(2))

    alone({"w": source}, {"w": target}).run()

    assert [3.0, 4.0] == target.tensor.tolist()


def test_what_changes_at_either_end_is_found():
    table = tables({"a": (4, 2), "b": (3,)}, "whole", [0])
    target = shards_of(table[0])
    made = alone(shards_of(table[0], values(table, 0)), target)
    made.run()
    target["b"].tensor[1] += 1

    ((name, (source_hash, target_hash)),) = made.check().items()

    assert "b" == name
    assert hash_box(values(table, 0)["b"], ((0, 3),), (3,), torch.float32) == source_hash
    assert hash_box(target["b"].tensor, ((0, 3),), (3,), torch.float32) == target_hash


def test_two_elements_that_change_places_are_found():
    table = tables({"a": (4,)}, "whole", [0])
    target = shards_of(table[0])
    made = alone(shards_of(table[0], values(table, 0)), target)
    made.run()
    target["a"].tensor[[0, 3]] = target["a"].tensor[[3, 0]]

    assert {"a"} == set(made.check())


def test_a_segment_is_recognised_by_more_than_its_number():
    segment = SharedSegment(64)
    segment.memory[5] = 7

    assert 7 == int(opened(segment.address)[5])
    for wrong in ({"inode": segment.address.inode + 1}, {"size": 128}):
        with pytest.raises(RunError, match="another file"):
            opened(replace(segment.address, **wrong))
    segment.close()
    with pytest.raises(RunError, match="E543"):
        opened(segment.address)


def by_hand(tensor, index):
    """SplitMix64 in whole numbers: the seed is the bits, the state moves on index + 1 times."""
    raw = tensor.contiguous().view(torch.uint8).tolist()
    bits = int.from_bytes(bytes(raw), "little", signed=True)
    z = (bits + (index + 1) * 0x9E3779B97F4A7C15) % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return z ^ (z >> 31)


def test_the_first_outputs_of_splitmix64_are_those_published():
    zero = torch.zeros(1, dtype=torch.int64)

    # The generator seeded with 0, as in the reference implementation's own check.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]

    assert expected == [hash_box(zero, ((at, at + 1),), (3,), torch.int64) for at in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_hash_is_the_sum_of_what_a_loop_over_elements_gives(dtype):
    tensor = (torch.randn(3, 5, dtype=torch.float64) * 50).to(getattr(torch, dtype))

    expected = sum(by_hand(value[None], at) for at, value in enumerate(tensor.reshape(-1)))

    assert expected % MODULUS == hash_box(tensor, whole_box((3, 5)), (3, 5), tensor.dtype)


@given(models, st.sampled_from(sorted(LAYOUTS)), st.sampled_from(DTYPES))
def test_hashes_of_disjoint_pieces_add_up_to_that_of_the_whole(params, layout, dtype):
    for shape in params.values():
        count = math.prod(shape)
        whole = torch.arange(count, dtype=torch.float64).mul(0.37).to(getattr(torch, dtype))
        whole = whole.reshape(shape)
        parts = set(boxes(shape, LAYOUTS[layout](4)))
        pieces = [
            (box, whole[at(box)]) for box in parts if all(start < stop for start, stop in box)
        ]

        total = sum(hash_box(piece, box, shape, whole.dtype) for box, piece in pieces)

        assert hash_box(whole, whole_box(shape), shape, whole.dtype) == total % MODULUS


def test_a_large_parameter_is_hashed_in_chunks_of_the_same_sum():
    tensor = torch.randn(3, 200_000)

    rows = [
        hash_box(tensor[at : at + 1], ((at, at + 1), (0, 200_000)), (3, 200_000), torch.float32)
        for at in range(3)
    ]

    assert sum(rows) % MODULUS == hash_box(
        tensor, whole_box((3, 200_000)), (3, 200_000), torch.float32
    )
