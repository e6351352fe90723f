"""Two buckets are in flight: what is done beside what, told by events and not by clocks."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from rlflow.contract.values import Shard
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.server.rlflow_engine_process.held import HeldWeights
from rlflow.engines.process.server.rlflow_engine_process.sglang_weights import Holding
from rlflow.engines.reshard.ipc import borrow
from rlflow.engines.reshard.streaming import BucketStream, Lending, shards_in

pytestmark = pytest.mark.torch

# Longer than anything here takes: what waits for so long waits for what does not come.
SECONDS = 30.0
# Of these `large` is a bucket alone, in the slot of the one before it.
SHAPES = {"a": (8, 4), "b": (8, 4), "large": (40, 4), "c": (8, 4), "d": (8, 4)}
LIMIT = 8 * 4 * 4
WEIGHTS = {name: torch.full(shape, float(n)) for n, (name, shape) in enumerate(SHAPES.items())}


class Watched(BucketStream):
    """A stream that says when it begins to fill a bucket, and when it has."""

    def watch(self, said):
        self.said = said
        self.filled = [threading.Event() for _ in self.buckets]

    def _fill(self, number, slots, lane):
        self.said.append(f"fill {number}")
        received = super()._fill(number, slots, lane)
        self.filled[number].set()
        return received


class Late:
    """An engine that reads a bucket once the next one is filled, where that has another slot."""

    def __init__(self, said):
        self.said, self.read, self.stream = said, {}, None

    def wanted(self):
        return WEIGHTS

    def open(self):
        self.said.append("open")

    def keep(self, weights):
        pass

    def take(self, rows, handles):
        buckets = self.stream.buckets
        number = next(n for n, bucket in enumerate(buckets) if bucket.rows == rows)
        self.said.append(f"take {number}")
        follows = number + 1 < len(buckets) and buckets[number + 1].slot != buckets[number].slot
        came = []

        def load():
            came.append(not follows or self.stream.filled[number + 1].wait(SECONDS))
            memory = borrow(handles[0])
            found = shards_in(buckets[number], memory)
            self.read |= {name: shard.tensor.clone() for name, shard in found.items()}

        thread = threading.Thread(target=load)
        thread.start()

        def wait():
            thread.join()
            assert came == [True], f"bucket {number + 1} was not filled beside bucket {number}"
            self.said.append(f"loaded {number}")

        return wait


def test_a_bucket_is_gathered_while_the_one_before_is_loaded_and_over_none_that_is_not():
    """The engine reads each as late as it may: when the next one is there already."""
    said = []
    engine = Late(said)
    source = {
        name: Shard(shape=tuple(t.shape), box=tuple((0, n) for n in t.shape), tensor=t)
        for name, t in WEIGHTS.items()
    }
    made = Watched(source, [Lending((0,), engine)], None, device=torch.device("cpu"), limit=LIMIT)
    made.watch(said)
    engine.stream = made
    assert [0, 1, 0, 1, 0] == [bucket.slot for bucket in made.buckets]
    for bucket in made.buckets:
        assert bucket.bytes <= made.lengths[bucket.slot]
    assert made.run().staged == sum(made.lengths) == 40 * 4 * 4 + LIMIT
    beside = [
        each for n in range(1, 5) for each in (f"take {n - 1}", f"fill {n}", f"loaded {n - 1}")
    ]
    assert ["open", "fill 0", *beside, "take 4", "loaded 4"] == said
    assert WEIGHTS.keys() == engine.read.keys()
    assert all(torch.equal(WEIGHTS[name], engine.read[name]) for name in WEIGHTS)


def test_a_bucket_of_the_same_slot_is_gathered_when_the_one_before_was_loaded():
    """Two weights, each larger than a bucket, have one slot for both."""
    said = []
    engine = Late(said)
    large = {name: WEIGHTS["large"] + n for n, name in enumerate("xy")}
    engine.wanted = lambda: large
    source = {
        name: Shard(shape=tuple(t.shape), box=tuple((0, n) for n in t.shape), tensor=t)
        for name, t in large.items()
    }
    made = Watched(source, [Lending((0,), engine)], None, device=torch.device("cpu"), limit=LIMIT)
    made.watch(said)
    engine.stream = made
    made.run()
    assert ["open", "fill 0", "take 0", "loaded 0", "fill 1", "take 1", "loaded 1"] == said
    assert all(torch.equal(large[name], engine.read[name]) for name in large)


class Paced(Holding):
    """A server whose ranks load a bucket once the next one is laid out, and read it then."""

    def __init__(self, held):
        super().__init__(None)
        self.held, self.drafted, self.drafts, self.ranks = held, None, False, 1
        self.version, self.asleep, self.device = 1, set(), "cpu"
        self.tokenizer = None
        self.said, self.read, self.refuses = [], [], None
        self.laid = [threading.Event() for _ in held.buckets()]

    async def idle(self, *, flush):
        self.said.append("idle")

    def reported(self):
        return str(self.version)

    def shared(self, weights, turn):
        number = int(weights[0][0])
        self.said.append(f"lay {number}")
        if self.buffers[turn] is None:
            self.buffers[turn] = torch.empty(64, dtype=torch.uint8)
        flat = torch.cat([tensor for _, tensor in weights]).view(torch.uint8)
        self.buffers[turn][: len(flat)] = flat
        self.laid[number].set()
        return (number, self.buffers[turn][: len(flat)]), None

    async def load(self, piece, selector, version, *, last):
        (number, memory), _ = piece
        if not last:
            came = await asyncio.to_thread(self.laid[number + 1].wait, SECONDS)
            assert came, f"bucket {number + 1} was not laid beside bucket {number}"
        if number == self.refuses:
            raise RuntimeError("no room")
        self.said.append(f"load {number}")
        self.read += memory.clone().view(torch.float32).tolist()


@pytest.fixture
def paced(monkeypatch):
    """Four weights of a bucket each, by their numbers."""
    monkeypatch.setattr("rlflow.engines.process.server.rlflow_engine_process.held.BUCKET_BYTES", 16)
    staging = SharedWeights({str(n): torch.full((4,), float(n)) for n in range(4)})
    told = {"table": staging.table, "memory": staging.descriptor, "bytes": staging.size}
    made = Paced(HeldWeights(told))
    made.staging = staging
    return made


def test_a_bucket_of_the_staging_is_copied_while_the_one_before_is_loaded(paced):
    assert "7" == asyncio.run(paced.do_update(7))
    turns = [each for n in range(3) for each in (f"lay {n + 1}", f"load {n}")]
    assert ["idle", "lay 0", *turns, "load 3"] == paced.said
    assert [float(n) for n in range(4) for _ in range(4)] == paced.read
    assert 2 == len({buffer.data_ptr() for buffer in paced.buffers})


def test_an_update_that_is_refused_leaves_no_copy_under_way(paced):
    paced.refuses = 1
    with pytest.raises(RuntimeError, match="no room"):
        asyncio.run(paced.do_update(7))
    assert ["lay 1", "load 0", "lay 2"] == paced.said[-3:]
    assert paced.version is None
