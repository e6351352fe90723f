"""Whole parameters of a sharded model, one at a time, on one rank: for files without a layout.

This file knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlflow.contract.values import Shard
from rlflow.engines.reshard.boxes import Entry, whole_box
from rlflow.engines.reshard.ends import Ends, Group, dtype_of, rank_in
from rlflow.engines.reshard.resharder import described
from rlflow.engines.reshard.slices import Move, plan_targets
from rlflow.engines.reshard.transports import Collective, wire_device

BUCKET = 64 << 20


def stream_whole(
    shards: Mapping[str, Shard], group: Group, *, to: int
) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter in the mapping's order, whole on rank `to` of the group, None elsewhere.

    Made and run to its end by every rank, all with the same names in the same order (the lowest
    rank's counts); each element is sent once. Rank `to` takes memory for one parameter and a
    bucket; where it holds a parameter whole it gives the live storage, not to be written. The
    tensor is on the device of the rank's shards and is the caller's until the next one is asked
    for. Raises RunError: E540 where no rank holds a piece, E541 for shards that do not match,
    E544 where a rank is lost.
    """
    rank = rank_in(group)
    ranks = described(Ends(rank, shards, ()), group)
    source = {number: its.source for number, its in enumerate(ranks)}
    table: dict[str, Entry] = {}
    for its in ranks:
        for name, (shape, dtype, _) in its.source.items():
            table.setdefault(name, (shape, dtype, whole_box(shape)))
    by_name: dict[str, list[Move]] = {name: [] for name in table}
    hosts = {number: its.host for number, its in enumerate(ranks)}
    for move in plan_targets(source, [{to: table}], host_of=hosts):
        by_name[move.name].append(move)
    device = wire_device(group, frozenset[str]().union(*(its.kinds for its in ranks)))
    for name, moves in by_name.items():
        shape, dtype, box = table[name]
        if source[to].get(name) == table[name]:
            yield name, shards[name].tensor.detach() if rank == to else None
            continue
        made: dict[str, Shard] = {}
        if rank == to:
            memory = torch.empty(shape, dtype=dtype_of(dtype), device=home(shards))
            made = {name: Shard(shape=shape, box=box, tensor=memory)}
        with torch.no_grad():
            Collective(moves, Ends(rank, shards, (made,)), group, BUCKET, device).run()
        yield name, made[name].tensor if rank == to else None


def home(shards: Mapping[str, Shard]) -> torch.device:
    """Where a rank's shards live; the host for a rank that has none."""
    return next((shard.tensor.device for shard in shards.values()), torch.device("cpu"))
