"""Weights to engines in other processes, in buckets that never leave the devices.

Each bucket is gathered by one rank of the source, another one for each, and broadcast to all ranks
of the reshard: by NCCL on GPUs, by gloo on a CPU, with the same code. Where the source is on
several hosts all of its ranks gather a bucket at the same time, over as many network cards, and
broadcast them in turns. A rank beside each rank of an
engine lends its copy (`ipc`), so that the engine opens it where it is. There are two slots: while
engines load one, the next bucket is gathered and broadcast into the other. Weights that an engine
has in float8 are gathered beside it, and quantised before they are broadcast. This file knows
neither versions nor how an engine is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.contract.progress import advance
from rlflow.contract.values import Shard
from rlflow.engines.reshard.boxes import Entry, whole_box
from rlflow.engines.reshard.bucket_layout import (
    Row,
    WeightBucket,
    scale_name,
    scratch_bytes,
    slot_bytes,
    turn_bytes,
    weight_buckets,
)
from rlflow.engines.reshard.ends import (
    Ends,
    Group,
    all_gather_values,
    dtype_name,
    dtype_of,
    naming_lost_ranks,
    rank_in,
    view,
)
from rlflow.engines.reshard.hashing import MODULUS, hash_box
from rlflow.engines.reshard.ipc import Handle, lend
from rlflow.engines.reshard.quantised import quantise_into
from rlflow.engines.reshard.resharder import Described, Moved, described
from rlflow.engines.reshard.slices import Move, plan_targets
from rlflow.engines.reshard.transports import Collective

# Of pieces that go to the ranks that gather buckets: what one gets at once, and what one sends.
PIECES = 32 << 20
# Where among the slots lie a bucket until its turn, and what is gathered before it is quantised.
HELD, SCRATCH = 2, 3


class Taker(Protocol):
    """An engine that takes weights bucket by bucket, as the rank beside its first one sees it."""

    def wanted(self) -> Mapping[str, Tensor]:
        """A tensor of the shape and dtype of each weight, by name, in the engine's order."""

    def open(self) -> None:
        """Prepare for buckets."""

    def take(self, rows: Sequence[Row], handles: Sequence[Handle]) -> Callable[[], None]:
        """Have each rank of the engine open its handle and load; what waits until all have."""

    def keep(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights to where a lost engine finds them; they are read on the current stream."""


@dataclass(frozen=True, slots=True)
class Lending:
    """The ranks of the group beside those of an engine, in its order, and the engine itself.

    `taker` is there on the first of the ranks alone.
    """

    ranks: tuple[int, ...]
    taker: Taker | None = None


class DeviceQueue:
    """A queue of work on a device beside what it computes; on a CPU work is done at once."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device) if device.type == "cuda" else None

    def work(self) -> AbstractContextManager[object]:
        """What is started within comes after all that was started before, on both."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def settle(self) -> None:
        """Wait until its work is done."""
        if self.stream is not None:
            self.stream.synchronize()


class BucketStream:
    """Brings the weights of a source to engines, as often as it is run.

    Made and run by every rank of `group` (None: this process alone). `source` is None on ranks
    that hold nothing of it. All ranks name the same engines, `lent`, all of one model. Buckets of
    at most `limit` bytes, and one weight at the least, lie on `device`, which has memory for
    them while it runs: for two, or for three of half as much where a source is on several hosts,
    each of whose ranks has one until its turn. With `check` hashes of both ends are taken.

    Raises RunError on every rank: E540 for what no rank holds, E541 for ends that do not match,
    E544 where a rank is lost.
    """

    def __init__(
        self,
        source: Mapping[str, Shard] | None,
        lent: Sequence[Lending],
        group: Group,
        *,
        device: torch.device,
        limit: int,
        check: bool = False,
    ) -> None:
        self.group, self.rank, self.device = group, rank_in(group), device
        self.source = source or {}
        self.takers = [(each.ranks, each.taker) for each in lent if each.taker is not None]
        self.lends = any(self.rank in each.ranks for each in lent)
        mine = {name: tensor for _, taker in self.takers for name, tensor in taker.wanted().items()}
        table = {name: (tuple(t.shape), dtype_name(t.dtype)) for name, t in mine.items()}
        ranks = described(Ends(self.rank, self.source, ()), group, (limit, check))
        tables = all_gather_values(group, table)
        self.table = next(found for found in tables if found)
        holders = [number for number, its in enumerate(ranks) if its.source]
        at_once = len({ranks[number].host for number in holders}) > 1
        limit = limit // 2 if at_once else limit
        self.buckets = weight_buckets(self.table, limit, holders, at_once=at_once)
        self.lengths = (*slot_bytes(self.buckets), turn_bytes(self.buckets, self.rank))
        self.scratch = scratch_bytes([b for b in self.buckets if b.source == self.rank])
        self.moves = self._moves(ranks)
        self.check_hashes = check
        self.hashes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._meet()

    def _moves(self, ranks: Sequence[Described]) -> list[list[Move]]:
        """For each bucket what its source gets of the other ranks, and copies of its own."""
        where: dict[str, int] = {}
        gathers: dict[int, dict[str, Entry]] = {}
        for number, bucket in enumerate(self.buckets):
            for name, dtype, shape, _ in bucket.gathered.rows:
                gathers.setdefault(bucket.source, {})[name] = shape, dtype, whole_box(shape)
                where[name] = number
        found: list[list[Move]] = [[] for _ in self.buckets]
        source = {number: its.source for number, its in enumerate(ranks)}
        hosts = {number: its.host for number, its in enumerate(ranks)}
        for move in plan_targets(source, [gathers], host_of=hosts, only=frozenset(where)):
            found[where[move.name]].append(move)
        return found

    def _meet(self) -> None:
        """All ranks at once, as NCCL wants of what is first asked of a group."""
        if self.group is not None and self.device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def run(self) -> Moved:
        """Bring every weight to every engine, and wait until they have it. Collective.

        Raises RunError: E506 where the source is asleep, E544 where a rank is lost.
        """
        Ends(self.rank, self.source, ()).require_awake()
        begin = time.perf_counter()
        with torch.no_grad():
            received = self._run()
        if self.device.type == "cuda":
            # Other processes of the GPU want the memory.
            cuda: Any = torch.cuda
            cuda.ipc_collect()
            cuda.empty_cache()
        mine = (b.gathered if b.source == self.rank else b for b in self.buckets)
        return Moved(
            received=received,
            copied=sum(bucket.bytes for bucket in mine) - received,
            seconds=time.perf_counter() - begin,
            buckets=len(self.buckets),
            staged=sum(self.lengths) + self.scratch,
        )

    def _run(self) -> int:
        lengths = (*self.lengths, self.scratch)
        slots = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in lengths]
        filling, keeping = DeviceQueue(self.device), DeviceQueue(self.device)
        self.hashes = ({}, {})
        for _, taker in self.takers:
            taker.open()
        received = self._fill(0, slots, filling)
        for number, bucket in enumerate(self.buckets):
            filling.settle()
            memory = slots[bucket.slot]
            told = lend(memory, bucket.bytes) if self.lends else None
            handles = all_gather_values(self.group, told)
            loads = [
                taker.take(bucket.rows, [_lent(handles[rank]) for rank in ranks])
                for ranks, taker in self.takers
            ]
            following = self.buckets[number + 1 : number + 2]
            beside = [b for b in following if b.slot != bucket.slot]
            if beside:
                # Its last bucket was loaded before its handles came to all.
                received += self._fill(number + 1, slots, filling)
            self._read(number, memory, keeping)
            for wait in loads:
                wait()
            keeping.settle()
            advance(bucket.bytes, "bytes")
            if not beside:
                all_gather_values(self.group, None)
            if following and not beside:
                received += self._fill(number + 1, slots, filling)
        return received

    def _fill(self, number: int, slots: Sequence[Tensor], lane: DeviceQueue) -> int:
        """Gather the round that begins with a bucket, and broadcast it from where its source is.

        Returns its bytes that came from others.
        """
        bucket = self.buckets[number]
        into = slots[bucket.slot][: bucket.bytes]
        together = [n for n, each in enumerate(self.buckets) if each.round == bucket.round]
        here = self.rank == bucket.source
        with lane.work():
            if number == bucket.round:
                self._gather(together, slots)
            if here and len(together) > 1:
                into.copy_(slots[HELD][: bucket.bytes])
            if self.group is not None:
                with naming_lost_ranks(f"rank {bucket.source}"):
                    dist.broadcast(into, group=self.group, group_src=bucket.source)
        if not here:
            return bucket.bytes
        return sum(move.bytes for move in self.moves[number] if move.travels)

    def _gather(self, together: Sequence[int], slots: Sequence[Tensor]) -> None:
        """Gather the buckets of a round, each where its source is; of one into its slot."""
        mine = next((b for n in together if (b := self.buckets[n]).source == self.rank), None)
        gathered: dict[str, Shard] = {}
        if mine is not None:
            into = slots[HELD if len(together) > 1 else mine.slot][: mine.bytes]
            whole = slots[SCRATCH] if mine.quantised else into
            gathered = shards_in(mine.gathered, whole)
        moves = [move for number in together for move in self.moves[number]]
        Collective(
            moves, Ends(self.rank, self.source, (gathered,)), self.group, PIECES, self.device
        ).run()
        if mine is not None and mine.quantised:
            self._quantise(gathered, shards_in(mine, into))

    def _quantise(self, gathered: Mapping[str, Shard], into: Mapping[str, Shard]) -> None:
        """Quantise what was gathered into its bucket."""
        for name, shard in gathered.items():
            quantise_into(shard.tensor, into[name].tensor, into[scale_name(name)].tensor)
        if self.check_hashes:
            before, after = self.hashes
            # Scratch is filled anew by the next bucket, so that it is hashed at once.
            after.update({plain_name(name): hash_whole(s) for name, s in gathered.items()})
            before.update({name: hash_whole(shard) for name, shard in into.items()})

    def _read(self, number: int, memory: Tensor, lane: DeviceQueue) -> None:
        """Keep what engines load, and take the hashes of both ends."""
        bucket = self.buckets[number]
        shards = shards_in(bucket, memory)
        with lane.work():
            for _, taker in self.takers:
                taker.keep({name: shard.tensor for name, shard in shards.items()})
        if not self.check_hashes:
            return
        before, after = self.hashes
        of = {name: (shape, dtype_of(dtype)) for name, dtype, shape, _ in bucket.gathered.rows}
        for move in self.moves[number]:
            if move.sender == self.rank:
                value = hash_box(view(self.source[move.name], move.box), move.box, *of[move.name])
                name = plain_name(move.name) if bucket.quantised else move.name
                before[name] = (before.get(name, 0) + value) % MODULUS
        if self.lends:
            after.update({name: hash_whole(shard) for name, shard in shards.items()})

    def check(self) -> dict[str, tuple[int, int]]:
        """Compare both ends of the last run by their hashes, taken on the device. Collective.

        For every weight that differs anywhere: the hash of the source, and of what was lent. Of
        quantised weights that is what their source has made, and what that was made of is compared
        with the shards, under a name of its own.
        """
        found = all_gather_values(self.group, self.hashes)
        totals: dict[str, int] = {}
        for before, _ in found:
            for name, value in before.items():
                totals[name] = (totals.get(name, 0) + value) % MODULUS
        return {
            name: (totals.get(name, 0), value)
            for _, after in found
            for name, value in after.items()
            if value != totals.get(name, 0)
        }

    def close(self) -> None:
        """Nothing is kept between runs."""


def plain_name(name: str) -> str:
    """What a weight is called in a comparison of what it was before it was quantised."""
    return f"{name} before it is quantised"


def hash_whole(shard: Shard) -> int:
    """The hash of a whole weight, in its own dtype."""
    return hash_box(shard.tensor, shard.box, tuple(shard.shape), shard.tensor.dtype)


def shards_in(bucket: WeightBucket, memory: Tensor) -> dict[str, Shard]:
    """The weights of a bucket, views of its memory."""
    return dict(_views(bucket, memory))


def _views(bucket: WeightBucket, memory: Tensor) -> Iterator[tuple[str, Shard]]:
    for name, dtype, shape, offset in bucket.rows:
        kind = dtype_of(dtype)
        size = torch.Size(shape).numel() * kind.itemsize
        tensor = memory[offset : offset + size].view(kind).view(shape)
        yield name, Shard(shape=shape, box=whole_box(shape), tensor=tensor)


def _lent(handle: Handle | None) -> Handle:
    """The handle of a rank that lends."""
    assert handle is not None, "a rank beside an engine lends nothing"
    return handle
