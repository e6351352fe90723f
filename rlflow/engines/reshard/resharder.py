"""Weights from one layout to another: the plan of both ends' tables, carried out and checked.

Every rank computes the same plan from the same tables, so nobody directs. This file knows no
models and no versions: it moves what shards hold.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlflow.contract.values import Box, Shard
from rlflow.engines.reshard.boxes import Entry, contains
from rlflow.engines.reshard.buckets import SMALLEST
from rlflow.engines.reshard.ends import (
    Ends,
    Group,
    all_gather_values,
    dtype_of,
    entries,
    rank_in,
    view,
)
from rlflow.engines.reshard.hashing import MODULUS, hash_box
from rlflow.engines.reshard.segments import SharedMemory
from rlflow.engines.reshard.slices import Move, Names, plan_targets
from rlflow.engines.reshard.transports import Collective, InProcess, Transport, wire_device
from rlflow.errors import Finding, RunError, near_names

TRANSPORTS = ("copy", "shared memory", "collective")

# A piece whose content is compared: parameter of the source, box, dtype that it is compared in.
Region = tuple[str, Box, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a run did on this rank.

    `received` are bytes from other ranks, `copied` bytes that it held itself, both in the dtypes
    they move in; `buckets` the rounds it took part in, `staged` the bytes of memory it took for
    them beside the weights.
    """

    received: int
    copied: int
    seconds: float
    buckets: int
    staged: int


@dataclass(frozen=True, slots=True)
class Described:
    """One rank's ends, without the tensors."""

    host: str
    kinds: frozenset[str]
    source: dict[str, Entry]
    targets: tuple[dict[str, Entry], ...]
    options: tuple[object, ...] = ()
    only: Names = None


class Resharder:
    """Brings the weights of a source to one or several targets, as often as it is run.

    Made and run by every rank of `group` (None: this process alone). `source` is None on ranks
    that hold nothing of it, a target's mapping empty on ranks without a part of it; all ranks
    give the same number of targets and the same options. Shards are kept: their tensors must stay
    the live storage. `only` limits to those parameters of the source, and what the ranks of the
    source say holds.

    Raises RunError on every rank: E540 for what no rank holds, E541 for ends that do not match,
    E543 for a transport that cannot be used, E544 where a rank is lost.
    """

    def __init__(
        self,
        source: Mapping[str, Shard] | None,
        targets: Sequence[Mapping[str, Shard]],
        group: Group,
        *,
        transport: str,
        bucket_bytes: int = 64 << 20,
        only: Names = None,
    ) -> None:
        require_known(transport, bucket_bytes)
        self.group = group
        self.ends = Ends(rank_in(group), source or {}, tuple(targets))
        ranks = described(self.ends, group, (transport, bucket_bytes), only)
        self.moves = plan_targets(
            {rank: its.source for rank, its in enumerate(ranks)},
            [
                {rank: its.targets[index] for rank, its in enumerate(ranks)}
                for index in range(len(targets))
            ],
            host_of={rank: its.host for rank, its in enumerate(ranks)},
            only=_limited(ranks),
        )
        self.shapes = {name: e[0] for its in ranks for name, e in its.source.items()}
        kinds = frozenset[str]().union(*(its.kinds for its in ranks))
        self.device = wire_device(group, kinds)
        self.on_gpu = "cuda" in kinds
        self.transport = self.made(transport, bucket_bytes)

    def made(self, transport: str, bucket_bytes: int) -> Transport:
        """The transport of that name."""
        if transport == "copy":
            return InProcess(self.moves, self.ends)
        if transport == "shared memory":
            return SharedMemory(self.moves, self.ends, self.group, bucket_bytes)
        return Collective(self.moves, self.ends, self.group, bucket_bytes, self.device)

    def run(self) -> Moved:
        """Make every target equal to the source. Collective.

        On return the targets of this rank are whole and its source may change. Raises RunError:
        E506 where a model of this rank is asleep, E544 where a rank is lost; targets are then
        half written.
        """
        self.ends.require_awake()
        begin = time.perf_counter()
        with torch.no_grad():
            carried = self.transport.run()
        if self.on_gpu and torch.cuda.is_available():
            torch.cuda.synchronize()
        return Moved(
            received=carried.received,
            copied=carried.copied,
            seconds=time.perf_counter() - begin,
            buckets=carried.buckets,
            staged=self.transport.staged,
        )

    def check(self) -> dict[str, tuple[int, int]]:
        """Compare both ends, replicas too. Collective; the same answer on every rank.

        For every parameter of the source whose copies differ: its hash, and the one it has with
        the pieces of the first copy that differs. Empty where all are equal. A target of another
        dtype is compared with the converted source.
        """
        found = all_gather_values(self.group, (self.source_hashes(), self.target_hashes()))
        copies: dict[Region, list[int]] = {}
        for hashes, _ in found:
            for region, value in hashes.items():
                copies.setdefault(region, []).append(value)
        for _, pairs in found:
            for region, value in pairs:
                copies[region].append(value)
        totals: dict[str, tuple[int, int]] = {}
        for (name, _, _), values in copies.items():
            other = next((value for value in values if value != values[0]), values[0])
            first, second = totals.get(name, (0, 0))
            totals[name] = ((first + values[0]) % MODULUS, (second + other) % MODULUS)
        return {name: pair for name, pair in totals.items() if pair[0] != pair[1]}

    def source_hashes(self) -> dict[Region, int]:
        """The hash of every piece that is moved and that this rank holds, in the order planned."""
        found: dict[Region, int] = {}
        for region in (region for move in self.moves for region in regions(move)):
            name, box, dtype = region
            shard = self.ends.source.get(name)
            if region not in found and shard is not None and contains(shard.box, box):
                piece = view(shard, box)
                found[region] = hash_box(piece, box, self.shapes[name], dtype_of(dtype))
        return found

    def target_hashes(self) -> list[tuple[Region, int]]:
        """The hash of every place that this rank fills, at its index in the source's parameter."""
        return [
            (region, hash_box(place, region[1], self.shapes[region[0]], place.dtype))
            for move in self.moves
            if move.receiver == self.ends.rank
            for region, place in zip(regions(move), self.ends.written(move), strict=True)
        ]

    def close(self) -> None:
        """Free what is kept between runs; the resharder is not to be run again."""
        self.transport.close()


def regions(move: Move) -> list[Region]:
    """What is to be compared of a move, by place."""
    return [(move.name, move.box, place.dtype) for place in move.places]


def described(
    ends: Ends, group: Group, options: tuple[object, ...] = (), only: Names = None
) -> list[Described]:
    """What every rank has, by rank. Collective.

    Raises RunError (E541) on all of them where one has a shard that is not its box, or where
    they disagree on the options or the number of targets.
    """
    mine: Described | Finding
    try:
        tables = [entries(shards) for shards in (ends.source, *ends.targets)]
        shards = [shard for table in (ends.source, *ends.targets) for shard in table.values()]
        kinds = frozenset(shard.tensor.device.type for shard in shards)
        host = socket.gethostname()
        mine = Described(host, kinds, tables[0], tuple(tables[1:]), options, only)
    except RunError as error:
        mine = error.findings[0]
    found = []
    for each in all_gather_values(group, mine):
        if isinstance(each, Finding):
            raise RunError(each)
        found.append(each)
    require_one("the number of targets", [len(each.targets) for each in found])
    require_one("the options", [each.options for each in found])
    return found


def _limited(ranks: Sequence[Described]) -> Names:
    """Which parameters the source sends: what any of its ranks says, of those that it holds.

    Raises RunError (E541) where ranks disagree on one that they hold, or whether all are sent.
    """
    said = [its.only for its in ranks if its.source]
    known = [only for only in said if only is not None]
    require_one("what is to be sent", [only is None for only in said])
    if not known:
        return None
    sent = frozenset[str]().union(*known)
    for its in (each for each in ranks if each.source and each.only is not None):
        own = sorted(its.source.keys() & sent)
        require_one("what is to be sent", [sorted(its.source.keys() & (its.only or own)), own])
    return sent


def require_one(what: str, said: Sequence[object]) -> None:
    """Raise RunError (E541) unless all say the same."""
    for other in said:
        if other != said[0]:
            message = f"the ranks of a reshard disagree on {what}"
            got, expected = str(other), str(said[0])
            raise RunError(Finding(code="E541", what=message, got=got, expected=expected))


def require_known(transport: str, bucket_bytes: int) -> None:
    """Raise RunError (E543) for a transport that does not exist or a bucket that holds nothing."""
    if transport not in TRANSPORTS:
        near = near_names(transport, TRANSPORTS)
        what = f"there is no transport {transport!r}"
        expected = ", ".join(TRANSPORTS)
        raise RunError(Finding(code="E543", what=what, expected=expected, near=near))
    if bucket_bytes < SMALLEST:
        what = f"a bucket of {bucket_bytes} bytes holds nothing"
        raise RunError(Finding(code="E543", what=what, expected=f"at least {SMALLEST}"))
