"""What ranks of a gloo world are told to do of buckets that they lend, with the group for it."""

from __future__ import annotations

import socket
from unittest.mock import patch

import torch
import torch.distributed as dist

from rlflow.engines.reshard.ipc import borrow, lend
from rlflow.engines.reshard.quantised import in_blocks
from rlflow.engines.reshard.streaming import BucketStream, Lending
from tests.engines.reshard_layouts import at
from tests.engines.reshard_ranks import same_bits, shards_of, values


def exchanged(group):
    """Rank 0 lends memory, the others read it and write their number into it, each its byte."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    memory = torch.arange(100, dtype=torch.uint8)
    told = [lend(memory, 60) for _ in range(size - 1)] if rank == 0 else None
    found = [told]
    dist.broadcast_object_list(found, group_src=0, group=group)
    if rank:
        mine = borrow(found[0][rank - 1])
        assert list(range(60))[size:] == mine[size:].tolist()
        mine[rank] = 200 + rank
        del mine
    dist.barrier(group)
    assert [0, *range(201, 200 + size)] == memory[:size].tolist() or rank
    dist.barrier(group)
    return memory.is_shared()


class Engine:
    """Opens what it is lent, rank by rank, as an engine does, and copies the weights out."""

    def __init__(self, table):
        self.table = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (shape, dtype, _) in table.items()
        }
        self.loaded, self.kept, self.asked = [], {}, []

    def wanted(self):
        return self.table

    def open(self):
        self.asked.append("open")
        self.loaded = []

    def take(self, rows, handles):
        def wait():
            self.asked.append([name for name, *_ in rows])
            self.loaded = self.loaded or [{} for _ in handles]
            for held, handle in zip(self.loaded, handles, strict=True):
                memory = borrow(handle)
                for name, dtype, shape, start in rows:
                    kind = getattr(torch, dtype)
                    size = torch.Size(shape).numel() * kind.itemsize
                    held[name] = memory[start : start + size].view(kind).view(shape).clone()

        return wait

    def keep(self, weights):
        self.kept.update({name: tensor.clone() for name, tensor in weights.items()})


class Damaged(BucketStream):
    """A stream that changes a byte of what rank 3 got."""

    def _fill(self, number, slots, lane):
        received = super()._fill(number, slots, lane)
        if self.rank == 3 and number == 1:
            slots[self.buckets[number].slot][0] ^= 1
        return received


def damaged(group, source, wanted, replicas, limit):
    """Which weights of the second bucket there are, and which are found to differ."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 0)) if rank in source else None
    lent = [Lending(tuple(r), Engine(wanted) if rank == r[0] else None) for r in replicas]
    device = torch.device("cpu")
    made = Damaged(held, lent, group, device=device, limit=limit, check=True)
    made.run()
    return made.buckets[1].rows[0][0], sorted(made.check())


def streamed(group, source, wanted, replicas, limit, apart=False):
    """Bring weights to engines twice; what was moved, and the names of each bucket.

    Ranks say that each is on a host of its own where they are `apart`.
    """
    rank = dist.get_rank(group)
    name = f"host{rank}" if apart else socket.gethostname()
    with patch.object(socket, "gethostname", lambda: name):
        return _streamed(group, rank, source, wanted, replicas, limit)


def _streamed(group, rank, source, wanted, replicas, limit):
    held = shards_of(source[rank], values(source, 0)) if rank in source else None
    engines = {ranks[0]: Engine(wanted) for ranks in replicas if rank == ranks[0]}
    lent = [Lending(tuple(ranks), engines.get(ranks[0])) for ranks in replicas]
    made = BucketStream(held, lent, group, device=torch.device("cpu"), limit=limit, check=True)
    found = []
    for seed in (1, 2):
        whole = values(source, seed)
        for name, shard in (held or {}).items():
            shard.tensor.copy_(whole[name][at(shard.box)])
        found.append(made.run())
        assert {} == made.check()
        for engine in engines.values():
            for loaded in (*engine.loaded, engine.kept):
                assert set(engine.table) == set(loaded)
                for name, (_, dtype, _) in wanted.items():
                    assert same_bits(whole[name].to(getattr(torch, dtype)), loaded[name])
    return found, [engine.asked for engine in engines.values()]


class DamagedBeside(BucketStream):
    """A stream that changes a number of a quantised bucket: what was gathered, or what was got."""

    where = ""

    def _quantise(self, gathered, into):
        up = next((s for name, s in gathered.items() if "up_proj" in name), None)
        if self.where == "gathered" and up is not None:
            up.tensor[0, 0] += 1
        super()._quantise(gathered, into)

    def _fill(self, number, slots, lane):
        received = super()._fill(number, slots, lane)
        bucket = self.buckets[number]
        at = {name: begin for name, _, _, begin in bucket.rows}
        up = next((begin for name, begin in at.items() if name.endswith("up_proj.weight")), None)
        if self.where == "lent" and self.rank == 3 and up is not None:
            slots[bucket.slot][up] ^= 1
        return received


def _stream_of(kind, group, source, wanted, replicas, limit):
    """A stream of shards in float32 to engines of a table, which are told by their first ranks."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 1)) if rank in source else None
    table = {name: (*entry, ()) for name, entry in wanted.items()}
    engines = [Engine(table) for ranks in replicas if rank == ranks[0]]
    lent = [Lending(tuple(r), engines[0] if rank == r[0] else None) for r in replicas]
    device = torch.device("cpu")
    return kind(held, lent, group, device=device, limit=limit, check=True), engines


def damaged_quantised(group, source, wanted, replicas, where):
    """Which weights are found to differ where one number was changed."""
    made, _ = _stream_of(DamagedBeside, group, source, wanted, replicas, 1 << 20)
    made.where = where
    made.run()
    return sorted(made.check())


def quantised(group, source, wanted, replicas, limit):
    """Bring weights to engines in float8: their names, bytes of scratch, and what differs."""
    made, engines = _stream_of(BucketStream, group, source, wanted, replicas, limit)
    moved = made.run()
    whole = in_blocks({n: t.to(torch.bfloat16) for n, t in values(source, 1).items()})
    names = []
    for engine in engines:
        for loaded in (*engine.loaded, engine.kept):
            names = list(loaded)
            assert set(whole) == set(loaded)
            assert all(same_bits(whole[name], tensor) for name, tensor in loaded.items())
    assert moved.staged == sum(made.lengths) + made.scratch
    return names, made.scratch, sorted(made.check())
