"""Transfers: each row arrives once where it is wanted, whole parts unread, bytes untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import flat, is_ragged, lengths, ragged, select_field, text
from rlflow.runtime.ray.exchange import exchange
from rlflow.runtime.ray.packing import joined_pieces, packed_rows, unpacked_rows
from rlflow.scheduler.plan.plan import HOST, Spread
from tests.budget import examples

pytestmark = pytest.mark.torch


def fields_of(rows):
    """One field of every form, whose content says which row it is."""
    index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    size = index % 4
    values = torch.repeat_interleave(index, size)
    return {
        "number": index.clone(),
        "half": index.to(torch.bfloat16),
        "flag": index % 2 == 0,
        "wide": torch.stack([index, -index], 1).float(),
        "tokens": ragged(values, size),
        "text": text([str(row) for row in index.tolist()]),
    }


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, one in left.items():
        other = right[name]
        assert one.dtype == other.dtype, name
        if is_ragged(one):
            assert torch.equal(lengths(one), lengths(other)), name
            assert torch.equal(flat(one), flat(other)), name
        else:
            assert torch.equal(one, other), name


def carried(source, held, target, wanted):
    """Play a transfer in this process: the fields each receiver ends with."""
    moves = exchange(source, held, target, wanted)
    parts = {
        device: fields_of(held[part])
        for part, holders in enumerate(source.parts)
        for device in holders
    }
    sent = {
        device: [packed_rows(parts[device], rows) for rows in asked]
        for device, asked in moves.sends.items()
    }
    found = {}
    for part, receivers in enumerate(target.parts):
        for device in receivers:
            pieces = []
            for piece in moves.takes[device]:
                if piece.sender is None:
                    entries = packed_rows(parts[device], piece.source)
                else:
                    entries = sent[piece.sender][piece.index]
                pieces.append((unpacked_rows(entries), piece.target))
            found[device] = joined_pieces(pieces, len(wanted[part]))
    return moves, found


@st.composite
def spreads(draw):
    """A partition of rows over parts with one or two holders each, devices anywhere."""
    rows = draw(st.integers(1, 24))

    def one():
        parts = draw(st.integers(1, min(3, rows)))
        holders = draw(st.integers(1, 2))
        devices = draw(st.permutations(range(HOST, 5)))[: parts * holders]
        of = draw(st.lists(st.integers(0, parts - 1), min_size=rows, max_size=rows))
        order = draw(st.permutations(range(rows)))
        held = [np.array([r for r in order if of[r] == p], dtype=np.int64) for p in range(parts)]
        groups = tuple(tuple(devices[p * holders : (p + 1) * holders]) for p in range(parts))
        return Spread(parts=groups, rule="balanced"), held

    return (*one(), *one())


@settings(max_examples=examples(60), deadline=None)
@given(spreads())
def test_every_receiver_ends_with_its_rows_in_order(case):
    source, held, target, wanted = case

    moves, found = carried(source, held, target, wanted)

    for part, receivers in enumerate(target.parts):
        for device in receivers:
            assert_same(fields_of(wanted[part]), found[device])
    for device, pieces in moves.takes.items():
        own = [p for p, holders in enumerate(source.parts) if device in holders]
        for piece in pieces:
            assert piece.sender != device
            if piece.sender is None:
                assert own


def test_a_part_that_stays_whole_is_sent_unread_once_for_all_that_share_it():
    source = Spread(parts=((HOST,),))
    target = Spread(parts=((0, 1),))
    everything = [np.arange(5)]

    moves = exchange(source, everything, target, everything)

    assert {HOST: (None,)} == dict(moves.sends)
    assert {(0, None), (1, None)} == {(d, p[0].target) for d, p in moves.takes.items()}


def test_rows_that_are_there_are_not_sent():
    source = Spread(parts=((0,), (1,)), rule="generated")
    target = Spread(parts=((0,), (1,)), rule="balanced")
    held = [np.array([0, 1]), np.array([2, 3])]
    wanted = [np.array([0, 2]), np.array([1, 3])]

    moves = exchange(source, held, target, wanted)

    sent = {device: [rows.tolist() for rows in asked] for device, asked in moves.sends.items()}
    assert {0: [[1]], 1: [[0]]} == sent


def test_unpacked_fields_are_views_of_the_arrays():
    field = torch.arange(6, dtype=torch.float32)
    entries = packed_rows({"x": field}, None)

    found = unpacked_rows(entries)["x"]

    assert found.data_ptr() == entries["x"][2].ctypes.data
    assert field.data_ptr() == found.data_ptr()


def test_selecting_rows_of_the_test_fields_is_what_the_test_says():
    whole = fields_of([3, 1, 2])
    picked = {name: select_field(field, torch.tensor([2, 0])) for name, field in whole.items()}

    assert_same(fields_of([2, 3]), picked)
