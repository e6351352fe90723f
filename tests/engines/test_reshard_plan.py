"""The plan of a reshard: who sends what, in whole numbers and without a tensor.

    source table of every rank --+
                                 +--> moves --> rounds
    target table of every rank --+

Moves are carried out here on numpy arrays whose elements are all different.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.engines.reshard.boxes import cut, volume
from rlflow.engines.reshard.buckets import (
    aligned,
    paired_rounds,
    payload_of,
    round_layout,
    shared_rounds,
)
from rlflow.engines.reshard.slices import minimum_bytes, plan_targets
from rlflow.errors import RunError
from tests.engines.reshard_layouts import (
    SIZE,
    carried_out,
    lacking,
    meshes,
    models,
    scattered,
    tables,
    whole_arrays,
    within,
)

DTYPES = ("float64", "float32", "float16")


def assert_is_the_source(source, targets, made):
    values = whole_arrays(source)
    for (index, rank, name), array in made.items():
        box = targets[index][rank][name][2]
        whole = tuple((0, length) for length in values[name].shape)
        expected = values[name][within(box, whole)].astype(array.dtype)
        assert expected.tobytes() == array.tobytes()


@given(models, meshes(), meshes(), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_any_layout_becomes_any_other_with_the_least_bytes(params, one, other, had, wanted):
    source, target = tables(params, *one, had), tables(params, *other, wanted)

    moves = plan_targets(source, [target])
    made, arrived = carried_out(source, [target], moves)

    assert_is_the_source(source, [target], made)
    each = min(SIZE[had], SIZE[wanted])
    for rank in target:
        masks = lacking(source, [target], rank)
        assert {n: m.tolist() for n, m in masks.items() if m.any()} == {
            name: count.tolist() for (to, name), count in arrived.items() if to == rank
        }
        received = sum(m.bytes for m in moves if m.receiver == rank and m.travels)
        least = each * sum(int(mask.sum()) for mask in masks.values())
        assert least == received == minimum_bytes(source, target)[rank]


@given(st.data(), models, meshes())
def test_a_source_of_any_overlapping_boxes_serves_as_well(data, params, mesh):
    source, target = data.draw(scattered(params)), tables(params, *mesh)

    made, arrived = carried_out(source, [target], plan_targets(source, [target]))

    assert_is_the_source(source, [target], made)
    for rank in target:
        for name, mask in lacking(source, [target], rank).items():
            count = arrived.get((rank, name), np.zeros(mask.shape, int))
            assert mask.astype(int).tolist() == count.tolist()


@given(models, meshes(), st.lists(meshes(), min_size=2, max_size=3), st.sampled_from(DTYPES))
def test_what_two_targets_need_on_a_rank_arrives_once(params, one, others, wanted):
    source = tables(params, *one, "float32")
    targets = [tables(params, *other, wanted) for other in others]

    made, arrived = carried_out(source, targets, plan_targets(source, targets))

    assert_is_the_source(source, targets, made)
    for rank in range(8):
        for name, mask in lacking(source, targets, rank).items():
            count = arrived.get((rank, name), np.zeros(mask.shape, int))
            assert mask.astype(int).tolist() == count.tolist()


def test_targets_of_two_dtypes_share_what_travels_in_the_source_s():
    source = {0: {"w": ((4,), "float32", ((0, 4),))}}
    half = {1: {"w": ((4,), "float16", ((0, 4),))}}
    full = {1: {"w": ((4,), "float32", ((1, 3),))}}

    moves = plan_targets(source, [half, full])

    assert [("float32", 8, ((1, 3),), 2)] == [
        (m.dtype, m.bytes, m.box, len(m.places)) for m in moves if len(m.places) > 1
    ]
    assert {"float16"} == {m.dtype for m in moves if len(m.places) == 1}
    assert [4, 8] == sorted(sum(m.bytes for m in moves if len(m.places) == n) for n in (1, 2))


@given(models, meshes(), meshes(), st.integers(4, 12).map(lambda power: 2**power * 4))
def test_rounds_hold_what_they_may_and_carry_everything(params, one, other, limit):
    source, target = tables(params, *one, "float64"), tables(params, *other, "float16")
    moves = plan_targets(source, [target])
    own = [move for move in moves if not move.travels]

    rounds = paired_rounds(moves, limit, limit)
    made, _ = carried_out(source, [target], [*own, *(m for each in rounds for m in each)])

    assert_is_the_source(source, [target], made)
    for each in rounds:
        load = defaultdict(int)
        for move in each:
            load["from", move.sender] += aligned(move.bytes)
            load["to", move.receiver] += aligned(move.bytes)
        assert max(load.values()) <= limit


@given(models, meshes(), meshes(), st.integers(4, 12).map(lambda power: 2**power * 4))
def test_rounds_for_many_readers_lay_each_piece_out_once(params, one, other, limit):
    source, target = tables(params, *one), tables(params, *other)
    moves = plan_targets(source, [target])
    own = [move for move in moves if not move.travels]

    rounds = shared_rounds(moves, limit)
    made, _ = carried_out(source, [target], [*own, *(m for each in rounds for m in each)])

    assert_is_the_source(source, [target], made)
    seen = set()
    for each in rounds:
        for rank in {move.sender for move in each}:
            offsets, end = round_layout([move for move in each if move.sender == rank])
            assert end <= limit
            assert not seen & {(rank, piece) for piece in offsets}
            seen |= {(rank, piece) for piece in offsets}
            spans = {
                (offsets[payload_of(m)], offsets[payload_of(m)] + m.bytes)
                for m in each
                if m.sender == rank
            }
            assert all(
                stop <= start
                for (_, stop), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False)
            )


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=3), st.integers(1, 50))
def test_a_box_is_cut_into_small_pieces_of_all_its_elements(edges, limit):
    box = tuple((start, start + length) for start, length in edges)
    count = np.zeros([12] * len(box), int)

    for piece in cut(box, limit):
        assert volume(piece) <= limit
        count[tuple(slice(*edge) for edge in piece)] += 1

    assert volume(box) == count.sum()
    assert count.max(initial=0) <= 1


def test_replicas_share_the_sending():
    params = {f"p{number}": (8,) for number in range(6)}
    source = tables(params, "whole", [0, 1, 2])
    target = tables(params, "whole", [3])

    moves = plan_targets(source, [target])

    assert [0, 1, 2, 0, 1, 2] == [move.sender for move in moves]


def test_a_holder_on_the_same_host_sends():
    source = tables({"w": (8,)}, "whole", [0, 1, 2])
    target = tables({"w": (8,)}, "whole", [3, 4])
    hosts = {0: "a", 1: "b", 2: "a", 3: "b", 4: "a"}

    moves = plan_targets(source, [target], host_of=hosts)

    assert {3: 1, 4: 0} == {move.receiver: move.sender for move in moves}


def test_fsdp_2_to_tp_2_moves_half_of_the_row_parallel_weights():
    source = tables({"up": (8, 4), "down": (4, 8)}, "fsdp", [0, 1])
    target = {
        rank: {"up": ((8, 4), "float32", ((4 * rank, 4 * rank + 4), (0, 4))),
               "down": ((4, 8), "float32", ((0, 4), (4 * rank, 4 * rank + 4)))}
        for rank in (0, 1)
    }  # fmt: skip

    moves = [move for move in plan_targets(source, [target]) if move.travels]

    assert [("down", 0, 1, ((0, 2), (4, 8)), 32), ("down", 1, 0, ((2, 4), (0, 4)), 32)] == sorted(
        (m.name, m.sender, m.receiver, m.box, m.bytes) for m in moves
    )


def test_only_the_parameters_named_are_moved():
    params = {"base": (4,), "adapter": (4,)}
    source, target = tables(params, "whole", [0]), tables(params, "whole", [1])

    moves = plan_targets(source, [target], only=frozenset({"adapter"}))

    assert ["adapter"] == [move.name for move in moves]


def test_a_target_may_have_more_than_what_is_sent():
    source = tables({"adapter": (4,)}, "whole", [0])
    target = tables({"base": (4,), "adapter": (4,)}, "whole", [1])

    moves = plan_targets(source, [target], only=frozenset({"adapter"}))

    assert ["adapter"] == [move.name for move in moves]


def refused(*arguments, only=None):
    with pytest.raises(RunError) as caught:
        plan_targets(*arguments, only=only)
    return str(caught.value)


def test_what_cannot_be_mapped_is_refused():
    source = tables({"weight": (4, 2)}, "fsdp", [0, 1])
    missing = tables({"weihgt": (4, 2)}, "whole", [0])
    wider = tables({"weight": (4, 3)}, "whole", [0])
    outside = {0: {"weight": ((4, 2), "float32", ((0, 5), (0, 2)))}}

    assert "E540" in refused(source, [missing])
    assert "did you mean 'weight'" in " ".join(refused(source, [missing]).split())
    assert "(4, 3)" in refused(source, [wider])
    assert "E541" in refused(outside, [source])
    assert "E541" in refused(source, [outside])


def test_elements_that_no_rank_holds_are_refused():
    source = tables({"weight": (4, 2)}, "fsdp", [0, 1])

    message = refused({0: source[0]}, [tables({"weight": (4, 2)}, "whole", [1])])

    assert "E540" in message
    assert "4 of 8 elements" in message


@pytest.mark.parametrize(("name", "end"), [("weihgt", "source has"), ("weight", "targets take")])
def test_a_parameter_to_be_sent_must_be_at_both_ends(name, end):
    source = tables({"weight": (4, 2)}, "fsdp", [0, 1])

    message = refused(source, [{0: {}}], only=frozenset({name}))

    assert f"the {end} no parameter {name!r}" in message


def test_ranks_that_disagree_are_refused():
    source = {
        0: {"w": ((4,), "float32", ((0, 2),))},
        1: {"w": ((4,), "float16", ((2, 4),))},
    }

    assert "disagree" in refused(source, [{0: {}}])


def test_a_dtype_nobody_knows_is_refused():
    source = {0: {"w": ((4,), "float3", ((0, 4),))}}

    assert "float3" in refused(source, [{0: {}}])
