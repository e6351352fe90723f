"""Ways of weights to an engine, and parts of an engine over hosts, without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rlflow.engines.process.client.group import KEYS, EngineGroup
from rlflow.engines.process.client.link import LostError
from rlflow.engines.process.client.load import chosen_way
from rlflow.engines.process.client.process_memory import members
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.client.updates import (
    Broadcast,
    Disk,
    InMemory,
    Update,
    beside,
    buckets,
    write_weights,
)
from rlflow.engines.process.nodes import Nodes, free_port
from rlflow.engines.process.sglang.hosts import node_arguments, node_variables
from rlflow.errors import RunError
from rlflow.graph.user.engines import VLLM, SGLang
from tests.conftest import ROOT

pytestmark = pytest.mark.torch

GIVEN = {
    "words": torch.arange(32.0).view(2, 16),
    "odd": torch.tensor([1.0, 2.0, 3.0]),
    "half": torch.tensor([[0.5], [-1.0]], dtype=torch.bfloat16),
    "last": torch.full((16,), 7.0),
}


def bytes_of(names):
    return torch.cat([GIVEN[name].reshape(-1).view(torch.uint8) for name in names]).tolist()


def test_a_piece_is_a_view_where_its_weights_lie_one_after_the_other():
    made = SharedWeights(GIVEN)
    first, odd, half, last = made.table
    piece = made.piece([first, odd])
    assert bytes_of(["words", "odd"]) == piece.tolist()
    made.tensors["words"][0, 0] = 9
    assert 9.0 == float(piece.view(torch.float32)[0])
    holes = made.piece([odd, half, last])
    assert bytes_of(["odd", "half", "last"]) == holes.tolist()


SIZES = st.lists(st.tuples(st.sampled_from(["float32", "bfloat16"]), st.integers(1, 9)), min_size=1)


@given(SIZES, st.integers(1, 40))
def test_buckets_are_the_table_in_parts_of_one_dtype(sizes, limit):
    table, end = [], 0
    for number, (dtype, size) in enumerate(sizes):
        table.append((f"w{number}", dtype, (size,), end))
        end += size
    parts = buckets(table, limit)
    assert table == [entry for part in parts for entry in part]
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        assert 1 == len({entry[1] for entry in part})
        assert all(entry[3] - part[0][3] < limit for entry in part)
        if after is not None:
            more = after[0]
            assert more[1] != part[0][1] or more[3] - part[0][3] >= limit


def test_a_file_of_weights_is_read_back(tmp_path):
    write_weights(tmp_path / "model.safetensors", SharedWeights(GIVEN))
    found = load_file(tmp_path / "model.safetensors")
    assert GIVEN.keys() == found.keys()
    for name, tensor in GIVEN.items():
        assert (tensor.dtype, tensor.tolist()) == (found[name].dtype, found[name].tolist())


class Asked:
    """An engine that answers an update by what `answer` makes of its fields."""

    def __init__(self, answer):
        self.answer = answer
        self.lost = threading.Event()
        self.reason = "it ended"
        self.patience = 5.0
        self.fields = {}

    def ask(self, do, fields):
        self.fields = fields
        return SimpleNamespace(result=lambda: self.answer(fields))

    def lose(self, reason):
        self.reason = reason
        self.lost.set()


def unasked():
    raise AssertionError("nothing is to be proven")


def test_a_file_is_there_for_as_long_as_the_update_takes(tmp_path):
    def answer(fields):
        assert bytes_of(["odd"]) == (
            load_file(Path(fields["path"]) / "model.safetensors")["odd"].view(torch.uint8).tolist()
        )
        return "3"

    link = Asked(answer)
    way = Disk(SharedWeights(GIVEN), None, ranks=1)
    assert "3" == way.bring(
        Update(link=link, version=3, facts={"directory": str(tmp_path)}, prove=unasked)
    )
    assert (3, str(tmp_path)) == (link.fields["version"], str(Path(link.fields["path"]).parent))
    assert [] == list(tmp_path.iterdir())


def test_a_file_goes_with_an_update_that_fails(tmp_path):
    def lost(fields):
        assert Path(fields["path"]).exists()
        raise LostError("gone")

    way = Disk(SharedWeights(GIVEN), str(tmp_path), ranks=2)
    with pytest.raises(LostError):
        way.bring(Update(link=Asked(lost), version=1, facts={}, prove=unasked))
    assert [] == list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match=r"E673.*none such\n.*No such file"):
        Disk(SharedWeights(GIVEN), str(tmp_path / "none such"), ranks=1)


def test_the_directory_of_an_engine_goes_with_the_engine(tmp_path):
    link, facts = Asked(None), {"directory": str(tmp_path / "gone")}
    way = Disk(SharedWeights(GIVEN), None, ranks=1)
    with pytest.raises(RunError, match="E673"):
        way.bring(Update(link=link, version=1, facts=facts, prove=unasked))
    link.lose("killed")
    with pytest.raises(LostError, match="killed"):
        way.bring(Update(link=link, version=1, facts=facts, prove=unasked))


def other_end(port, seconds=5.0):
    """Rank 1 of a group, as SGLang's torch makes it."""
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    for prefix in KEYS:
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, 1, 2, limit)


def test_a_group_needs_no_default_group_and_makes_none():
    peers = EngineGroup("127.0.0.1", 1, seconds=5)
    meeting = threading.Thread(target=peers.meet)
    meeting.start()
    other = other_end(peers.port)
    meeting.join()
    assert not dist.is_initialized()
    for tensor in (torch.arange(5, dtype=torch.uint8), torch.tensor([9], dtype=torch.uint8)):
        found = torch.zeros_like(tensor)
        work = other.broadcast(found, 0)
        peers.broadcast(tensor)
        work.wait()
        assert tensor.tolist() == found.tolist()


def test_a_group_does_not_wait_for_ever():
    peers = EngineGroup("127.0.0.1", 1, seconds=0.3)
    with pytest.raises(RuntimeError):
        peers.meet()


def test_an_engine_whose_group_fails_is_lost():
    def fail():
        raise RuntimeError("connection closed")

    link = Asked(None)
    beside(link, fail).join()
    assert link.lost.is_set()
    assert "connection closed" in link.reason


@pytest.mark.parametrize(
    ("options", "hosts", "way"),
    [
        (SGLang(), 1, InMemory),
        (SGLang(), 2, Broadcast),
        (SGLang(updates="memory"), 1, InMemory),
        (SGLang(updates="group"), 1, Broadcast),
        (SGLang(updates="disk"), 1, Disk),
        (SGLang(updates="disk", updates_dir="/tmp"), 2, Disk),
        (VLLM(), 1, InMemory),
    ],
)
def test_the_way_that_options_choose(options, hosts, way):
    nodes = Nodes(address="127.0.0.1", port=1, rank=0, count=hosts) if hosts > 1 else None
    assert isinstance(chosen_way(options, SharedWeights(GIVEN), 2, nodes), way)


def test_a_part_of_an_engine_knows_where_to_meet(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    nodes = Nodes(address="10.0.0.7", port=4321, rank=1, count=2)
    assert {
        "nnodes": 2,
        "node_rank": 1,
        "dist_init_addr": "10.0.0.7:4321",
    } == node_arguments(nodes)
    six = Nodes(address="fd00::7", port=4321, rank=0, count=2)
    assert "[fd00::7]:4321" == node_arguments(six)["dist_init_addr"]
    made = node_variables(nodes, torch.device("cpu"), (5,))
    assert ("0", "1") == (
        made["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"],
        made["SGLANG_CPU_OMP_THREADS_BIND"],
    )
    assert ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == [
        *node_variables(nodes, torch.device("cuda"), (5,))
    ]
    assert ({}, {}) == (node_arguments(None), node_variables(None, torch.device("cpu"), (5,)))


def test_a_free_port_is_of_the_address():
    assert 1024 < free_port("127.0.0.1") < 65536
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")  # of documents: no host has it


WORKER = """
import os, sys
from datetime import timedelta
from pathlib import Path
from rlflow.engines.process.client.process import Command, EngineProcess
made = EngineProcess(Command(python=sys.executable, script=Path(sys.argv[1]),
    environment=dict(os.environ), descriptors=()))
made.connection.recv()
print(made.pid, made.directory, flush=True)
sys.stdin.read()
"""
ENGINE = """
import os, socket, sys, time
from multiprocessing.connection import Connection
with open(os.path.join(os.environ["TMPDIR"], "weights"), "wb") as file:
    file.write(b"w" * 100_000)
connection = Connection(int(sys.argv[1]))
connection.send("written")
time.sleep(60)
"""


@pytest.mark.slow
def test_nothing_is_left_of_an_engine_whose_worker_is_killed(tmp_path):
    script, model, other = tmp_path / "engine.py", tmp_path / "rlflow-model-1", tmp_path / "other"
    script.write_text(ENGINE)
    for kept in (model, other):
        kept.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RLFLOW_MODEL_DIRECTORY": str(model)},
    ) as worker:
        leader, directory = worker.stdout.readline().split()
        assert {"log", "weights"} <= {file.name for file in Path(directory).iterdir()}
        worker.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    made = (Path(directory), model)
    while any((*map(Path.exists, made), members(int(leader)))) and time.monotonic() < end:
        time.sleep(0.01)
    assert [False, False, True] == [path.exists() for path in (*made, other)]
    assert not members(int(leader))
