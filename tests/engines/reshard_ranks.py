"""What ranks of a gloo world are told to do, with the group that they do it in.

Each case is built in every rank from the same seed, so a rank knows what it has to end up with.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlflow.contract.values import Shard
from rlflow.engines.reshard.hashing import hash_box
from rlflow.engines.reshard.resharder import Resharder
from rlflow.errors import RunError
from tests.engines.reshard_layouts import at

GROUPS = {}


def in_group(rank, ranks, function, *arguments):
    """Call a function in the first ranks of the world, with their group."""
    if ranks not in GROUPS:
        GROUPS[ranks] = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=30))
    return function(GROUPS[ranks], *arguments) if rank < ranks else None


def wait_no_longer_than(rank, ranks, seconds):
    """Set how long the group of the first ranks waits for what a peer sends."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), GROUPS[ranks])


def values(tables, seed):
    """Whole parameters of all tables, the same in every process; bits of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for rank in sorted(tables):
        for name, (shape, dtype, _) in tables[rank].items():
            if name not in found:
                whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
                found[name] = whole.to(getattr(torch, dtype))
    return found


def shards_of(table, whole=None):
    """Shards of a rank; -1 everywhere unless the whole parameters are given."""
    found = {}
    for name, (shape, dtype, box) in table.items():
        if whole is None:
            lengths = [stop - start for start, stop in box]
            tensor = torch.full(lengths, -1, dtype=getattr(torch, dtype))
        else:
            tensor = whole[name][at(box)].clone()
        found[name] = Shard(shape=shape, box=box, tensor=tensor)
    return found


def same_bits(a, b):
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))


def reshard(group, transport, source, targets, options):
    """Reshard twice, with other weights the second time; what was moved, after comparing all."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 0)) if rank in source else None
    taken = [shards_of(target.get(rank, {})) for target in targets]
    if "only" in options and held is None:
        # Only the source knows what training changes.
        options = {**options, "only": frozenset({"else"})}
    made = Resharder(held, taken, group, transport=transport, **options)
    moved = []
    for seed in (1, 2):
        whole = values(source, seed)
        for name, shard in (held or {}).items():
            shard.tensor.copy_(whole[name][at(shard.box)])
        moved.append(made.run())
        assert_filled(rank, taken, whole)
        assert {} == made.check()
    made.close()
    return moved


def errors(group, transport, source, targets, options):
    """The message of the error that making a resharder raises here."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 0)) if rank in source else None
    taken = [shards_of(target.get(rank, {})) for target in targets]
    try:
        Resharder(held, taken, group, transport=transport, **options)
    except RunError as error:
        return str(error)
    return ""


def errors_as(group, number, *words):
    """The same where rank 0 gives its peers another number than that of its process."""
    real = os.getpid
    if dist.get_rank(group) == 0:
        os.getpid = lambda: number
    try:
        return errors(group, *words)
    finally:
        os.getpid = real


def errors_of_own_options(group, source, target, options):
    """The same where every rank has options of its own."""
    return errors(group, "collective", source, [target], options[dist.get_rank(group)])


def errors_of_a_wrong_shard(group, source, target):
    """The same where a tensor of rank 1 is larger than its box."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 0))
    if rank == 1:
        held["norm"] = replace(held["norm"], tensor=torch.zeros(99))
    try:
        Resharder(held, [shards_of(target.get(rank, {}))], group, transport="collective")
    except RunError as error:
        return str(error)
    return ""


def only(group, transport, source, target, names):
    """What was moved, and whether all other parameters were left alone."""
    rank = dist.get_rank(group)
    held, taken = shards_of(source[rank], values(source, 0)), shards_of(target[rank])
    made = Resharder(held, [taken], group, transport=transport, only=names)
    moved = made.run()
    assert {} == made.check()
    for name in names:
        assert same_bits(values(source, 0)[name], taken[name].tensor)
    return moved, all(
        bool((shard.tensor == -1).all()) for name, shard in taken.items() if name not in names
    )


def damaged(group, source, target, where):
    """What the check finds where one element of one rank's `where` is changed."""
    rank = dist.get_rank(group)
    held, taken = shards_of(source[rank], values(source, 0)), shards_of(target[rank])
    made = Resharder(held, [taken], group, transport="collective")
    made.run()
    side, number, name = where
    if rank == number:
        tensor = (held if side == "source" else taken)[name].tensor
        tensor.view(-1)[-1] += 1
    whole = values(source, 0)
    box = tuple((0, length) for length in whole[name].shape)
    dtype = taken[name].tensor.dtype
    return made.check(), hash_box(whole[name], box, tuple(whole[name].shape), dtype)


def peak_of_a_run(group, transport, source, target):
    """Megabytes that resident memory grew by at the highest during a first run."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 0)) if rank in source else None
    made = Resharder(held, [shards_of(target.get(rank, {}))], group, transport=transport)
    # What the test itself has freed must not serve.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    made.run()
    grown = resident("VmHWM") - before
    made.close()
    return grown


def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def make(group, transport, source, target):
    """Make a resharder for `run_made`, and run it once."""
    rank = dist.get_rank(group)
    held = shards_of(source[rank], values(source, 0)) if rank in source else None
    MADE[:] = [Resharder(held, [shards_of(target.get(rank, {}))], group, transport=transport)]
    MADE[0].run()


def run_made(rank):
    """The message of the error that running it raises."""
    try:
        MADE[0].run()
    except RunError as error:
        return str(error)
    return ""


def mappings(group):
    """Which files the process has in its memory."""
    return Path("/proc/self/maps").read_text()


def drop_made(group):
    MADE[0].close()
    MADE.clear()


def assert_filled(rank, taken, whole):
    for target in taken:
        for name, shard in target.items():
            expected = whole[name][at(shard.box)].to(shard.tensor.dtype)
            assert same_bits(expected, shard.tensor.cpu()), (rank, name)


def on_one_gpu(group, transport, source, target):
    """Reshard twice between processes that share a GPU; what was moved."""
    rank = dist.get_rank(group)
    held, taken = (
        {name: replace(s, tensor=s.tensor.cuda()) for name, s in shards.items()}
        for shards in (
            shards_of(source.get(rank, {}), values(source, 0)),
            shards_of(target.get(rank, {})),
        )
    )
    made = Resharder(held, [taken], group, transport=transport)
    for seed in (1, 2):
        whole = values(source, seed)
        for name, shard in held.items():
            shard.tensor.copy_(whole[name][at(shard.box)])
        moved = made.run()
        assert_filled(rank, [taken], whole)
        assert {} == made.check()
    return moved


MADE: list[Resharder] = []
