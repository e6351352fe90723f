"""Moves in rounds of bounded size, and where each lies in the memory of a round.

Every rank computes the same rounds from the same moves, so both ends of a message know its
length and order without a word. This file imports no torch; it knows no transport.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlflow.contract.values import Box
from rlflow.engines.reshard.boxes import cut, volume
from rlflow.engines.reshard.slices import ITEMSIZE, Move

ALIGNMENT = 16
# The least that a bucket may hold: any element, aligned.
SMALLEST = 64

Rounds = tuple[tuple[Move, ...], ...]
# What a sender lays into shared memory once, whoever reads it: parameter, box, dtype.
Piece = tuple[str, Box, str]


def aligned(count: int) -> int:
    """Bytes that `count` bytes take where each piece starts aligned."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pieces(moves: Sequence[Move], limit: int) -> Iterator[Move]:
    """The moves that leave their process, cut to at most `limit` bytes each."""
    limit -= limit % ALIGNMENT
    for move in moves:
        if not move.travels:
            continue
        if aligned(move.bytes) <= limit:
            yield move
            continue
        size = ITEMSIZE[move.dtype]
        for box in cut(move.box, limit // size):
            yield replace(move, box=box, bytes=volume(box) * size)


def paired_rounds(moves: Sequence[Move], limit: int, piece: int) -> Rounds:
    """Rounds in which every rank sends at most `limit` bytes and receives at most as many.

    Pieces have at most `piece` bytes. Each goes to the first round, from the last that its
    sender and its receiver have begun, in which both have room.
    """
    limit -= limit % ALIGNMENT
    rounds: defaultdict[int, list[Move]] = defaultdict(list)
    begun: defaultdict[tuple[str, int], int] = defaultdict(int)
    used: defaultdict[tuple[str, int, int], int] = defaultdict(int)
    for move in _pieces(moves, min(limit, piece)):
        size = aligned(move.bytes)
        ends = (("from", move.sender), ("to", move.receiver))
        number = max(begun[end] for end in ends)
        while full := [end for end in ends if used[*end, number] + size > limit]:
            number += 1
            for end in full:
                begun[end] = number
        for end in ends:
            used[*end, number] += size
        rounds[number].append(move)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def shared_rounds(moves: Sequence[Move], limit: int) -> Rounds:
    """Rounds in which every rank lays out at most `limit` bytes, for any number of readers."""
    limit -= limit % ALIGNMENT
    rounds: defaultdict[int, list[Move]] = defaultdict(list)
    begun: defaultdict[int, int] = defaultdict(int)
    used: defaultdict[int, int] = defaultdict(int)
    laid: dict[tuple[int, Piece], int] = {}
    for move in _pieces(moves, limit):
        key = (move.sender, payload_of(move))
        if key not in laid:
            size = aligned(move.bytes)
            if used[move.sender] + size > limit:
                begun[move.sender] += 1
                used[move.sender] = 0
            used[move.sender] += size
            laid[key] = begun[move.sender]
        rounds[laid[key]].append(move)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def payload_of(move: Move) -> Piece:
    """What two moves of one sender share if they carry the same bytes."""
    return (move.name, move.box, move.dtype)


def round_layout(moves: Sequence[Move]) -> tuple[dict[Piece, int], int]:
    """The offset of every distinct piece of a sender's round, and the bytes of all."""
    offsets: dict[Piece, int] = {}
    end = 0
    for move in moves:
        if payload_of(move) not in offsets:
            offsets[payload_of(move)] = end
            end += aligned(move.bytes)
    return offsets, end
