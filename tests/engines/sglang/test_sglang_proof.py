"""What an engine's ranks hold is compared where one answers for all, and what is left at an end."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rlflow.engines.hf import loading
from rlflow.engines.process.client import load, process
from rlflow.engines.process.client import process_memory as held
from rlflow.engines.process.client.group import KEYS
from rlflow.engines.process.client.link import LostError, RefusedError
from rlflow.engines.process.client.model import EngineModel, key_value_heads
from rlflow.engines.process.client.process import Command, EngineProcess
from rlflow.engines.process.client.replica import PORT_TRIES, Launch, Replica
from rlflow.engines.process.client.shared_weights import SharedWeights
from rlflow.engines.process.client.updates import Broadcast, Disk, Update
from rlflow.engines.process.client.weight_check import hash_differences
from rlflow.engines.process.sglang.checksums import hashed, hashes, weight_layout
from rlflow.errors import RunError
from rlflow.graph.user.engines import SGLang
from tests.engines.sglang.conftest import TINY

pytestmark = pytest.mark.torch

EMBED, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"
GATE, UP = (f"model.layers.0.mlp.{half}_proj.weight" for half in ("gate", "up"))
STAGED = {
    name: torch.arange(rows * 6, dtype=torch.float32).view(rows, 6) + rows
    for name, rows in {EMBED: 70, DOWN: 4, GATE: 8, UP: 12}.items()
}
HELD = [EMBED, DOWN, "model.layers.0.mlp.gate_up_proj.weight"]


def holds(staged, ranks):
    """What an engine of so many ranks answers that has `staged`."""
    told = [hashes(HELD, staged, rank, ranks) for rank in range(ranks)]

    def ask(do, fields):
        assert fields == {"of": "model"} if do == "checksums" else set(fields) == {"layout", "of"}
        if do == "checksums":
            return told
        wanted = {rank: weight_layout(HELD, STAGED, rank, ranks) for rank in range(ranks)}
        (rank,) = (rank for rank in wanted if wanted[rank] == fields["layout"])
        return told[rank]

    return ask


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cuda", [False, True])
def test_equal_weights_are_no_difference(ranks, cuda):
    assert {} == hash_differences(holds(STAGED, ranks), STAGED, {"of": "model"}, cuda=cuda)


def test_a_rank_that_has_kept_older_weights_is_named():
    """Rank 1 of 2 has the second half of what leads in, and of what leads out its last columns."""
    older = {**STAGED, DOWN: STAGED[DOWN].clone()}
    older[DOWN][3, 5] += 1
    found = hash_differences(holds(older, 2), STAGED, {"of": "model"}, cuda=False)
    mine, other = (hashes([DOWN], each, 1, 2)[DOWN] for each in (STAGED, older))
    assert {f"{DOWN} of rank 1": (mine, other)} == found


@pytest.mark.parametrize("cuda", [False, True])
def test_staged_weights_that_the_engine_has_no_place_for_are_a_difference(cuda):
    """Such as a head of its own where the engine's is tied to the embeddings."""
    head = STAGED[EMBED] + 1
    staged = {**STAGED, "lm_head.weight": head, "model.layers.0.mlp.up_proj.lora_A": head}
    found = hash_differences(holds(STAGED, 1), staged, {"of": "model"}, cuda=cuda)
    assert {"lm_head.weight": (hashed([head]), "")} == found


HEADS = {"q": 8, "k": 4, "v": 4, "o": 3}
ATTENTION = {
    f"layers.0.{name}_proj.weight": torch.arange(rows * 8.0).view(rows, 8) + 100 * rows
    for name, rows in HEADS.items()
}
QKV, OUT = "layers.0.qkv_proj.weight", "layers.0.o_proj.weight"


def repeats(staged):
    """What four ranks hold of two key-value heads of two rows: each head lies on two of them."""
    q, k, v, o = staged.values()
    first, second = ([each[rows] for each in (k, v)] for rows in (slice(2), slice(2, 4)))
    return [
        {QKV: [q[at : at + 2], *keys], OUT: [o[:, at : at + 2]]}
        for at, keys in zip((0, 2, 4, 6), (first, first, second, second), strict=True)
    ]


def told(staged):
    return [{name: hashed(of) for name, of in rank.items()} for rank in repeats(staged)]


def test_ranks_beyond_the_key_value_heads_hold_a_head_each():
    assert told(ATTENTION) == [hashes([QKV, OUT], ATTENTION, rank, 4, 2) for rank in range(4)]
    halves = [hashes([QKV, OUT], ATTENTION, rank, 2) for rank in range(2)]
    assert halves == [hashes([QKV, OUT], ATTENTION, rank, 2, 2) for rank in range(2)]
    pieces = weight_layout([QKV], ATTENTION, 3, 4, 2)[QKV]
    q, k, v, _ = ATTENTION
    assert ([(q, 0, 6, 8), (k, 0, 2, 4), (v, 0, 2, 4)], 0, 0.0) == pieces


@pytest.mark.parametrize("cuda", [False, True])
def test_a_model_knows_its_heads_and_names_the_ranks_that_have_an_older_one(cuda):
    """By its config; the second head lies on ranks 2 and 3."""
    older = {**ATTENTION, "layers.0.k_proj.weight": ATTENTION["layers.0.k_proj.weight"].clone()}
    older["layers.0.k_proj.weight"][3, 5] += 1

    def model(held, heads):
        text = SimpleNamespace(num_key_value_heads=heads, num_attention_heads=4)
        made = object.__new__(EngineModel)
        made.state, made.staging = "ready", SimpleNamespace(stored=ATTENTION)
        made.config = SimpleNamespace(get_text_config=lambda: text)
        made.replica = SimpleNamespace(launch=SimpleNamespace(cuda=cuda))
        made._asked = lambda do, fields: answer(held, do, fields)
        return made

    def answer(held, do, fields):
        if do == "checksums":
            return told(held)
        (rank,) = (
            n for n in range(4) if weight_layout([QKV, OUT], ATTENTION, n, 4, 2) == fields["layout"]
        )
        return told(ATTENTION)[rank]

    assert {} == model(ATTENTION, 2).check()
    wrong = model(older, 2).check()
    assert {f"{QKV} of rank {rank}" for rank in (2, 3)} == set(wrong)
    texts = SimpleNamespace(num_attention_heads=4), SimpleNamespace()
    configs = [SimpleNamespace(get_text_config=lambda text=text: text) for text in texts]
    assert [4, None] == [key_value_heads(config) for config in configs]


class Receives:
    """An engine of two ranks in threads, which note what they are asked and take broadcasts."""

    def __init__(self):
        self.lost, self.reason, self.patience = threading.Event(), "", 20.0
        self.asked, self.groups, self.taken = [], [], []

    def ask(self, do, fields):
        self.asked.append(do)
        work = getattr(self, do)
        threads = [threading.Thread(target=work, args=(r,), kwargs=fields) for r in (1, 2)]
        for thread in threads:
            thread.start()

        def result():
            for thread in threads:
                thread.join()
            return str(fields.get("version"))

        return SimpleNamespace(result=result)

    def join(self, rank, address, port):
        limit = timedelta(seconds=20)
        store = dist.TCPStore(address, port, is_master=False, timeout=limit)
        for prefix in KEYS:
            store = dist.PrefixStore(prefix, store)
        self.groups.append(dist.ProcessGroupGloo(store, rank, 3, limit))

    def drain(self, rank):
        assert [] == self.taken[len(self.asked) :]

    def update(self, rank, version, buckets):
        for bucket in buckets:
            size = sum(torch.Size(shape).numel() * 4 for _, _, shape, _ in bucket)
            got = torch.zeros(size, dtype=torch.uint8)
            self.groups[rank - 1].broadcast(got, 0).wait()
            self.taken.append((version, float(got.view(torch.float32).sum())))

    def lose(self, reason):
        self.reason = reason
        self.lost.set()


def test_a_group_waits_for_rows_in_flight_and_is_proven_once():
    staging, link, proofs = SharedWeights(STAGED), Receives(), []
    way = Broadcast(staging, ranks=2, address="127.0.0.1")
    for version in (1, 2):
        more = {"prove": lambda: proofs.append(link.asked[-1])}
        assert str(version) == way.bring(Update(link=link, version=version, facts={}, **more))
    assert ["join", "drain", "update", "drain", "update"] == link.asked
    assert ["update"] == proofs
    total = float(sum(tensor.sum() for tensor in STAGED.values()))
    assert [(version, total) for version in (1, 1, 2, 2)] == link.taken


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_is_there_until_all_ranks_have_proven_what_they_read(ranks, tmp_path):
    files = []

    def prove():
        files.extend(tmp_path.glob("*/model.safetensors"))
        raise RefusedError("other weights are there: rank 1")

    link = SimpleNamespace(ask=lambda do, fields: SimpleNamespace(result=lambda: "4"))
    way = Disk(SharedWeights(STAGED), str(tmp_path), ranks=ranks)
    if ranks == 1:
        assert "4" == way.bring(Update(link=link, version=4, facts={}, prove=prove))
    else:
        with pytest.raises(RefusedError, match="rank 1"):
            way.bring(Update(link=link, version=4, facts={}, prove=prove))
    assert ranks - 1 == len(files)
    assert [] == list(tmp_path.iterdir())


def test_models_are_read_one_at_a_time(monkeypatch):
    """transformers unties all models of the process while it reads one."""
    seen = []

    def read(path, action):
        seen.append(loading._loading.locked())
        return action()

    monkeypatch.setattr(load, "read", read)
    made = load.StagedModel.of(TINY, "weights", torch.float32, 0)
    assert [True, True, True] == seen
    assert not loading._loading.locked()
    assert "lm_head.weight" not in dict(made.module.named_parameters())


def test_nothing_is_left_of_an_engine_that_is_never_started(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    wrong = SGLang(updates="disk", updates_dir="/nowhere/to/be/found")
    with pytest.raises(RunError, match="E673"):
        load.load_sglang(
            TINY, options=wrong, name="gen", dtype=torch.float32, device="cpu", init="random"
        )
    assert [] == list(tmp_path.iterdir())


def test_who_ends_a_group_a_second_time_waits_until_it_is_gone(monkeypatch):
    alive = [[7, 8], [8], []]
    monkeypatch.setattr(process, "members", lambda _: alive.pop(0))
    ending = object.__new__(EngineProcess)
    ending.pid, ending._process = 2**22 + 1, SimpleNamespace(returncode=-9, stdin=None)
    ending.kill()
    assert [] == alive


def test_a_driver_that_does_not_answer_tells_nothing(monkeypatch):
    def late(words, **more):
        raise subprocess.TimeoutExpired(words, more["timeout"])

    monkeypatch.setattr(held.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(held.subprocess, "run", late)
    assert {} == held.device_bytes()
    assert held.held_bytes(1, cuda=True) is None


DIES = """
import os, sys
from multiprocessing.connection import Connection
line = Connection(int(sys.argv[1]))
line.recv()
line.send({"ready": {}})
asked = line.recv()
line.send({"id": asked["id"], "value": "1"})
os._exit(1)
"""


def launched(folder, script, message):
    """How a script is started that behaves like an engine's."""
    return Launch(
        name="gen",
        command=Command(python=sys.executable, script=script, environment={}, descriptors=()),
        message=message,
        directory=str(folder / "model"),
        cuda=False,
        options=SGLang(),
        patience=20.0,
    )


@pytest.mark.slow
def test_an_engine_that_dies_after_each_restoring_is_not_started_for_ever(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    launch = launched(tmp_path, script, message=lambda first: {"first": first})

    def restored(link):
        link.ask("update", {}).result()

    replica = Replica(launch, restored=restored, wanted=lambda: True)
    try:
        replica.link().ask("generate", {}).result()
        with pytest.raises(RunError, match="E584"):
            ask_for_ever(replica)
        assert replica.starts <= 2
    finally:
        replica.close()


BINDS = """
import socket, sys, traceback
from multiprocessing.connection import Connection
line = Connection(int(sys.argv[1]))
try:
    found = socket.create_server(("127.0.0.1", line.recv()["port"]))
except OSError as error:
    traceback.print_exc()
    line.send({"failed": "rank 0 has ended"})
    raise SystemExit(1)
line.send({"ready": {}})
line.recv()
"""


@pytest.mark.parametrize("frees", [2, None])
def test_a_start_whose_port_was_taken_is_made_anew_a_few_times(tmp_path, caplog, frees):
    """Somebody has the port that was found, at the first two starts or for ever."""
    (tmp_path / "binds.py").write_text(BINDS)
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as other:

        def message(first):
            asked.append(first)
            return {"port": 0 if len(asked) - 1 == frees else other.getsockname()[1]}

        launch = launched(tmp_path, tmp_path / "binds.py", message=message)
        replica = Replica(launch, restored=lambda link: None, wanted=lambda: True)
        try:
            if frees is None:
                with pytest.raises(RunError, match=r"(?s)E580.*ddress already in use"):
                    replica.link()
            else:
                assert replica.link() is replica.present()
            tries = PORT_TRIES if frees is None else frees + 1
            assert [True] * tries == asked
            assert tries - 1 == replica.taken == len(caplog.records)
            assert "its port was taken" in caplog.text
        finally:
            replica.close()


def ask_for_ever(replica):
    while True:
        try:
            replica.link().ask("generate", {}).result()
        except LostError:
            continue
