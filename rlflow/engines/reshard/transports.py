"""How the bytes of planned moves travel: within a process, or in messages of a process group.

What a rank holds itself is copied in the process under every transport. Shared memory and
device handles have files of their own. This file plans nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.engines.reshard.buckets import aligned, paired_rounds
from rlflow.engines.reshard.ends import Carried, Ends, Group, dtype_of, naming_lost_ranks, own, raw
from rlflow.engines.reshard.slices import ITEMSIZE, Move
from rlflow.errors import Finding, RunError

# Larger staging gains nothing on a host and leaves its caches.
HOST_BUCKET = 8 << 20
# From this size on a piece is a message of its own, in place where both views are contiguous.
ALONE = 256 << 10
MESSAGE = 2 << 20

Works = list[dist.Work | None]


class Transport(Protocol):
    """Carries out the moves of a plan as often as it is run; made by every rank."""

    staged: int

    def run(self) -> Carried:
        """Move everything, and count what arrives. Collective."""

    def close(self) -> None:
        """Free what is kept between runs."""


class InProcess:
    """All ends are in this process, so every move is a copy.

    Raises RunError (E543) where a move leaves the process.
    """

    staged = 0

    def __init__(self, moves: Sequence[Move], ends: Ends) -> None:
        away = next((move for move in moves if move.travels), None)
        if away is not None:
            what = f"{away.name!r} has to go from rank {away.sender} to rank {away.receiver}"
            finding = Finding(
                code="E543",
                what=f"{what}, and the transport `copy` stays in one process",
                fix='transport="shared memory" on one host, "collective" between hosts',
            )
            raise RunError(finding)
        self.own = own(moves, ends.rank)
        self.ends = ends

    def run(self) -> Carried:
        """Copy piece by piece."""
        return Carried(copied=self.ends.copy_own(self.own))

    def close(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Pieces between two ranks, one after the other; `offset` in staging, None if in place."""

    peer: int
    moves: tuple[Move, ...]
    offset: int | None

    @property
    def bytes(self) -> int:
        """Its length."""
        return sum(move.bytes for move in self.moves)


@dataclass(frozen=True, slots=True)
class Round:
    """What this rank sends and receives before it goes on."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Collective:
    """Batches of sends and receives on a process group, gloo or NCCL.

    A large piece that is contiguous at an end, in the dtype it travels in, is sent or received in
    place there; others pass through staging of at most `bucket_bytes` in each direction, on
    `device`.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        ends: Ends,
        group: Group,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self.ends = ends
        self.group = group
        self.device = device
        self.own = own(moves, ends.rank)
        on_host = self.device.type == "cpu"
        limit = min(bucket_bytes, HOST_BUCKET) if on_host else bucket_bytes
        shares = map(self.share_of, paired_rounds(moves, limit, MESSAGE if on_host else limit))
        self.rounds = [share for share in shares if share.sends or share.receives]
        self.lengths = (
            max((end_of(share.sends) for share in self.rounds), default=0),
            max((end_of(share.receives) for share in self.rounds), default=0),
        )
        self.staged = sum(self.lengths)
        self.kept: tuple[Tensor, Tensor] | None = None

    def share_of(self, moves: Sequence[Move]) -> Round:
        """The messages of this rank in a round."""
        rank = self.ends.rank
        sends = by_peer((m.receiver, m) for m in moves if m.sender == rank)
        receives = by_peer((m.sender, m) for m in moves if m.receiver == rank)
        return Round(
            tuple(_placed(sends, lambda move: self.travels_as_is(self.ends.read(move), move))),
            tuple(
                _placed(receives, lambda move: self.travels_as_is(self.ends.written(move)[0], move))
            ),
        )

    def travels_as_is(self, found: Tensor, move: Move) -> bool:
        """Whether the memory of a view is the piece, byte for byte, where the group takes it."""
        same = found.dtype == dtype_of(move.dtype) and found.device.type == self.device.type
        return same and found.is_contiguous()

    def run(self) -> Carried:
        """Round after round; on a host, packing and unpacking overlap with the network."""
        out, into = self.staging()
        carried = Carried(buckets=len(self.rounds))
        if not self.rounds:
            carried.copied = self.ends.copy_own(self.own)
        for number, share in enumerate(self.rounds):
            arriving, leaving = self.post(share, out, into)
            if number == 0:
                carried.copied = self.ends.copy_own(self.own)
            for message, work in zip(share.receives, arriving, strict=True):
                finish(work, message.peer)
                self.unpack(message, into)
                carried.received += message.bytes
            for message, work in zip(share.sends, leaving, strict=True):
                finish(work, message.peer)
        return carried

    def staging(self) -> tuple[Tensor, Tensor]:
        """Memory to send from and to receive into; kept on a host, where fresh pages cost most."""
        if self.kept is not None:
            return self.kept
        out, into = (
            torch.empty(length, dtype=torch.uint8, device=self.device) for length in self.lengths
        )
        if self.device.type == "cpu":
            self.kept = (out, into)
        return out, into

    def post(self, share: Round, out: Tensor, into: Tensor) -> tuple[Works, Works]:
        """Start every message of a round; what to wait for, by message."""
        receives = [
            self.operation(dist.irecv, message, self.landing(message, into))
            for message in share.receives
        ]
        sends = (
            self.operation(dist.isend, message, self.packed(message, out))
            for message in share.sends
        )
        if self.device.type == "cpu":
            # Receives first, then each send as soon as it is packed.
            arriving = _start(receives)
            return arriving, [work for send in sends for work in _start([send])]
        # One launch of all, or two ranks that send to each other wait for ever.
        for work in _start([*receives, *sends]):
            finish(work, None)
        return [None] * len(share.receives), [None] * len(share.sends)

    def operation(
        self, kind: Callable[..., dist.Work | None], message: Message, memory: Tensor
    ) -> dist.P2POp:
        """A send or a receive."""
        return dist.P2POp(kind, memory, group=self.group, group_peer=message.peer)

    def landing(self, message: Message, into: Tensor) -> Tensor:
        """Where a message arrives."""
        if message.offset is None:
            return raw(self.ends.written(message.moves[0])[0])
        return into[message.offset : message.offset + message.bytes]

    def packed(self, message: Message, out: Tensor) -> Tensor:
        """The bytes of a message, converted to the dtypes they travel in."""
        if message.offset is None:
            return raw(self.ends.read(message.moves[0]))
        memory = out[message.offset : message.offset + message.bytes]
        for move, lane in message_pieces(message, memory):
            found = self.ends.read(move)
            lane.view(found.shape).copy_(found)
        return memory

    def unpack(self, message: Message, into: Tensor) -> None:
        """Put the pieces of an arrived message into their places."""
        if message.offset is not None:
            memory = into[message.offset : message.offset + message.bytes]
            for move, lane in message_pieces(message, memory):
                self.ends.fill(move, lane)
            return
        first, *others = self.ends.written(message.moves[0])
        for other in others:
            other.copy_(first)

    def close(self) -> None:
        """Free the staging."""
        self.kept = None


def wire_device(group: Group, kinds: Collection[str]) -> torch.device:
    """Where messages lie: on the GPU where NCCL is there and all tensors are, else on the host.

    `kinds` are the types of device of all tensors of all ranks, so that all choose the same.
    """
    backends = "cpu:gloo" if group is None else dist.get_backend_config(group)
    if "cuda:nccl" in backends and (set(kinds) <= {"cuda"} or "cpu:gloo" not in backends):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def by_peer(moves: Iterable[tuple[int, Move]]) -> dict[int, list[Move]]:
    """Moves by the rank at the other end."""
    found: dict[int, list[Move]] = {}
    for peer, move in moves:
        found.setdefault(peer, []).append(move)
    return found


def _placed(
    moves: Mapping[int, Sequence[Move]], as_is: Callable[[Move], bool]
) -> Iterator[Message]:
    """The messages to or from every peer, and where each lies in staging.

    Both ends agree on the pieces of a message, and each for itself on staging. Small pieces
    make one message, those of the widest dtype first, so that each is aligned.
    """
    end = 0
    for peer, its in moves.items():
        large = [(move,) for move in its if move.bytes >= ALONE]
        small = [move for move in its if move.bytes < ALONE]
        small.sort(key=lambda move: -ITEMSIZE[move.dtype])
        for group in [*large, *([tuple(small)] if small else [])]:
            if len(group) == 1 and as_is(group[0]):
                yield Message(peer, group, None)
                continue
            message = Message(peer, group, end)
            yield message
            end = aligned(end + message.bytes)


def end_of(messages: Sequence[Message]) -> int:
    """Bytes of staging that messages need."""
    ends = (m.offset + m.bytes for m in messages if m.offset is not None)
    return max(ends, default=0)


def message_pieces(message: Message, memory: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Every piece of a message with its part of the memory, flat, in the dtype it travels in."""
    start = 0
    for move in message.moves:
        lane = memory[start : start + move.bytes]
        yield move, lane.view(dtype_of(move.dtype))
        start += move.bytes


def _start(operations: list[dist.P2POp]) -> Works:
    """Post sends and receives.

    Raises RunError (E544) where a peer is lost.
    """
    if not operations:
        return []
    with naming_lost_ranks("its peers"):
        return list(dist.batch_isend_irecv(operations))


def finish(work: dist.Work | None, peer: int | None) -> None:
    """Wait for a message.

    Raises RunError (E544) where the peer is lost.
    """
    if work is not None:
        with naming_lost_ranks("its peers" if peer is None else f"rank {peer}"):
            work.wait()
