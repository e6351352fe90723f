"""Shared memory between processes of one host, without a name in the file system.

A rank lays pieces into memory of its own (`memfd_create`, Linux) and its peers open that through
/proc, so nothing is left behind when processes are killed. Each piece is laid once, whoever
reads it. A word on the process group says when a segment is full and when it was read. This
file plans nothing.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.engines.reshard.buckets import payload_of, round_layout, shared_rounds
from rlflow.engines.reshard.ends import (
    Carried,
    Ends,
    Group,
    all_gather_values,
    dtype_of,
    naming_lost_ranks,
    own,
)
from rlflow.engines.reshard.slices import Move
from rlflow.engines.reshard.transports import finish
from rlflow.errors import Finding, RunError

# Two halves of this size stay in the caches of a host; larger ones only cost fresh pages.
HALF = 8 << 20
FULL, READ = 1, 2


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process's segment is found, and how it is recognised; `size` in bytes."""

    process: int
    descriptor: int
    device: int
    inode: int
    size: int


class SharedSegment:
    """Memory of this process that others can open; `memory` is flat uint8.

    Raises RunError (E543) where the system has no such memory.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise _unusable("this system has no memfd_create")
        try:
            descriptor = os.memfd_create("rlflow", os.MFD_CLOEXEC)
            self.close = weakref.finalize(self, os.close, descriptor)
            os.ftruncate(descriptor, size)
            self.memory = mapped(descriptor, size)
        except OSError as error:
            raise _unusable(f"memfd_create: {error.strerror}") from error
        found = os.fstat(descriptor)
        self.address = Address(os.getpid(), descriptor, found.st_dev, found.st_ino, size)


def mapped(descriptor: int, size: int) -> Tensor:
    """The memory behind a descriptor, flat uint8."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def opened(address: Address) -> Tensor:
    """The memory of another process's segment, flat uint8.

    Raises RunError (E543) where it is not there: another host, another PID namespace, or a
    process of another user.
    """
    path = Path(f"/proc/{address.process}/fd/{address.descriptor}")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(f"{path} of a peer: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        same = (found.st_dev, found.st_ino) == (address.device, address.inode)
        if not same or found.st_size < address.size:
            raise _unusable(f"{path} is another file here than at the peer")
        return mapped(descriptor, address.size)
    finally:
        os.close(descriptor)


def _unusable(got: str) -> RunError:
    """The error for memory that cannot be shared."""
    return RunError(
        Finding(
            code="E543",
            what="the transport `shared memory` cannot be used between these processes",
            got=got,
            expected="processes of one user on one Linux host that see each other in /proc",
            fix='transport="collective"',
        )
    )


Placed = tuple[tuple[Move, int], ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A round of this rank: pieces with their offsets, laid out for readers, taken by sender."""

    laid: Placed
    readers: tuple[int, ...]
    taken: dict[int, Placed]


class SharedMemory:
    """Rounds through two halves of a segment for each sender, of at most `bucket_bytes` each.

    While its peers read one half a sender fills the other. Raises RunError (E543) on every rank
    where one of them cannot share memory.
    """

    def __init__(self, moves: Sequence[Move], ends: Ends, group: Group, bucket_bytes: int) -> None:
        if group is not None and "cpu:gloo" not in dist.get_backend_config(group):
            raise _unusable(f"a process group of {dist.get_backend_config(group)}, without gloo")
        self.ends = ends
        self.group = group
        self.own = own(moves, ends.rank)
        rounds = shared_rounds(moves, min(bucket_bytes, HALF))
        self.half = 0
        self.turns = [self.turn_of(moved) for moved in rounds]
        self.staged = 2 * self.half
        self.segment: SharedSegment | None = None
        self.peers: dict[int, Tensor] = {}
        self.connect()

    def turn_of(self, moves: Sequence[Move]) -> _Turn:
        """The part of this rank in a round; makes the halves as large as it needs."""
        rank = self.ends.rank
        by_sender: dict[int, list[Move]] = {}
        for move in moves:
            by_sender.setdefault(move.sender, []).append(move)
        taken: dict[int, Placed] = {}
        for sender, its in by_sender.items():
            offsets, end = round_layout(its)
            mine = tuple((m, offsets[payload_of(m)]) for m in its if m.receiver == rank)
            if mine:
                taken[sender] = mine
            if sender == rank:
                self.half = max(self.half, end)
        sent = by_sender.get(rank, [])
        distinct = {payload_of(move): move for move in sent}
        offsets, _ = round_layout(sent)
        laid = tuple((move, offsets[piece]) for piece, move in distinct.items())
        return _Turn(laid, tuple(sorted({move.receiver for move in sent})), taken)

    def connect(self) -> None:
        """Make this rank's segment and open those that it reads; collective."""
        senders = sorted({sender for turn in self.turns for sender in turn.taken})
        fault: Finding | None = None
        try:
            self.segment = SharedSegment(2 * self.half) if self.half else None
        except RunError as error:
            fault = error.findings[0]
        address = None if self.segment is None else self.segment.address
        addresses = all_gather_values(self.group, address)
        try:
            sent = ((rank, addresses[rank]) for rank in senders)
            self.peers = {rank: opened(where) for rank, where in sent if where is not None}
        except RunError as error:
            fault = error.findings[0]
        faults = all_gather_values(self.group, fault)
        found = next((each for each in faults if each is not None), None)
        if found is not None:
            self.close()
            raise RunError(found)

    def run(self) -> Carried:
        """Turn after turn; on return the peers have read all of this rank's."""
        words = _Words(self.group)
        carried = Carried(buckets=sum(bool(turn.laid or turn.taken) for turn in self.turns))
        if not self.turns:
            carried.copied = self.ends.copy_own(self.own)
        for number, turn in enumerate(self.turns):
            words.await_read(number - 2)
            self.lay(turn, number % 2)
            words.tell_full(number, turn.readers)
            if number == 0:
                carried.copied = self.ends.copy_own(self.own)
            for sender, pieces in turn.taken.items():
                words.await_full(sender)
                carried.received += self.take(sender, pieces, number % 2)
                words.tell_read(sender)
        words.close()
        return carried

    def lay(self, turn: _Turn, half: int) -> None:
        """Put the pieces of a turn into a half of the segment, in the dtypes they travel in."""
        for move, offset in turn.laid:
            assert self.segment is not None
            found = self.ends.read(move)
            lane = lane_of(self.segment.memory, half, offset, move)
            lane.view(found.shape).copy_(found)

    def take(self, sender: int, pieces: Placed, half: int) -> int:
        """Copy pieces from a peer's half into their places; returns their bytes."""
        for move, offset in pieces:
            self.ends.fill(move, lane_of(self.peers[sender], half, offset, move))
        return sum(move.bytes for move, _ in pieces)

    def close(self) -> None:
        """Drop the peers' memory and give back this rank's."""
        self.peers = {}
        if self.segment is not None:
            self.segment.close()
            self.segment = None


def lane_of(memory: Tensor, half: int, offset: int, move: Move) -> Tensor:
    """A piece within a segment, flat, in the dtype it travels in."""
    start = half * (memory.numel() // 2) + offset
    return memory[start : start + move.bytes].view(dtype_of(move.dtype))


class _Words:
    """One byte from sender to reader when a half is full, and one back when it was read."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.reads: dict[int, list[tuple[int, dist.Work | None]]] = {}
        self.sent: list[tuple[int, dist.Work | None]] = []

    def tell_full(self, turn: int, readers: Sequence[int]) -> None:
        """Say that a turn can be read."""
        for rank in readers:
            self.send(rank, FULL)
        self.reads[turn] = [(rank, self.receive(rank, READ)) for rank in readers]

    def await_full(self, sender: int) -> None:
        """Wait until a peer's turn can be read."""
        finish(self.receive(sender, FULL), sender)

    def tell_read(self, sender: int) -> None:
        """Say that a peer's turn was read."""
        self.send(sender, READ)

    def await_read(self, turn: int) -> None:
        """Wait until every reader has read a turn."""
        for rank, work in self.reads.pop(turn, []):
            finish(work, rank)

    def close(self) -> None:
        """Wait for all that is under way."""
        for turn in sorted(self.reads):
            self.await_read(turn)
        for rank, work in self.sent:
            finish(work, rank)

    def send(self, rank: int, word: int) -> None:
        """Start to send a word."""
        memory = torch.zeros(1, dtype=torch.uint8)
        with naming_lost_ranks(f"rank {rank}"):
            work = dist.isend(memory, group=self.group, group_dst=rank, tag=word)
        self.sent.append((rank, work))

    def receive(self, rank: int, word: int) -> dist.Work | None:
        """Start to receive a word."""
        memory = torch.zeros(1, dtype=torch.uint8)
        with naming_lost_ranks(f"rank {rank}"):
            return dist.irecv(memory, group=self.group, group_src=rank, tag=word)
