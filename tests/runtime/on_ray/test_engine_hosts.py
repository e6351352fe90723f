"""A replica of the real engine on two nodes of a cluster: a run, and the loss of a part of it."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from rlflow.runtime.ray.cluster.clusters import marks
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import ROOT, ended, process

PYTHON = os.environ.get("RLFLOW_SGLANG_PYTHON", "")
FILE = Path(__file__).parents[1] / "engine_pipeline.py"
SCRIPTS = ROOT / "rlflow" / "engines" / "process" / "server"

pytestmark = [
    pytest.mark.ray,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON, reason="RLFLOW_SGLANG_PYTHON names no interpreter"),
]


def engines(mark: str) -> dict[int, str]:
    """The processes of engines that a cluster's workers have started, with their commands."""
    name, value = next(iter(marks(mark).items()))
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            held = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{name}={value}".encode() in held and (str(SCRIPTS) in words or "sglang" in words):
            found[int(entry.name)] = words
    return found


@pytest.mark.timeout(700)
def test_a_replica_on_two_nodes_runs_until_a_worker_of_it_is_killed(nodes, tmp_path):
    """Devices 1 and 2 are one replica, on either node; the worker of the second starts its part."""
    run = tmp_path / "run"
    words = ("--placement", "ranks", "--address", nodes.address, "--threads", 1)
    words = (*words, "--iterations", 2000, "--run-dir", run)
    with process("run", FILE, *words, cwd=tmp_path) as began:
        try:
            workers = started(began, run, nodes.mark)
            os.kill(int(workers[2][2]), signal.SIGKILL)
            result = ended(began, timeout=200)
        finally:
            began.kill()
    assert 1 == result.code
    assert 1 == result.err.count("error["), result.err
    assert re.search(r"error\[(E675|E759)\]", result.err), result.err
    until = time.monotonic() + 20
    while engines(nodes.mark) and time.monotonic() < until:
        time.sleep(0.2)
    assert {} == engines(nodes.mark)
    metrics = read_metrics(run / "metrics.jsonl")
    assert all(line.metrics["actor.update/rollout_gap_max"] < 1e-4 for line in metrics)


def started(began, run, mark):
    """Device, address and process of every worker, of a run in which each part has its engine."""
    metrics, until = run / "metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < until
        assert began.poll() is None, began.communicate()
        time.sleep(0.2)
    plan = (run / "plan.txt").read_text()
    assert "in its host's memory, on 2 hosts, and a broadcast from it" in plan
    workers = re.findall(r"^(\d) +cpu +(127\S+) +\S+ +(\d+)$", plan, re.MULTILINE)
    assert ["127.0.0.2", "127.0.0.2", "127.0.0.10"] == [address for _, address, _ in workers]
    guardians = [words for words in engines(mark).values() if "rlflow_guardian" in words]
    found = {pid for _, _, pid in workers if any(f" {pid} " in words for words in guardians)}
    assert {pid for _, _, pid in workers[1:]} == found
    return workers
