"""A run that loses a node of two, goes on with the other, and grows when the node is back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.runtime.on_ray.conftest import cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.extra]

PLACEMENT = """
import rlflow as rf

placement = rf.Placement(pools={"all": "*"}, assign={"*": rf.on("all")})
"""


def command(tmp_path, devices, run, iterations, *more):
    words = ["run", "pipelines/grpo_arithmetic.py", "--placement", str(tmp_path / "whole.py")]
    words += ["--devices", devices, "--iterations", str(iterations), "--save-every", "2"]
    return [sys.executable, "-m", "rlflow.cli.main", *words, *more, "--no-color"]


def metrics(run):
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def wait_for(process, holds):
    end = time.monotonic() + 240
    while not holds():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.2)


def resumed(run):
    return json.loads((run / "run.json").read_text()).get("resumed", [])


def elastic(tmp_path, address, ask, run):
    """An elastic run that loses a node and gets it back; stopped once it has grown."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    words = ["--run-dir", str(run), "--address", address, "--elastic"]
    process = subprocess.Popen(
        command(tmp_path, "cpu:4", run, 4000, *words),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )
    wait_for(process, lambda: len(metrics(run)) >= 3)
    ask("kill 127.0.0.2")
    wait_for(process, lambda: len(resumed(run)) == 1)
    wait_for(process, lambda: len(metrics(run)) > resumed(run)[0]["iteration"] + 2)
    ask("start 127.0.0.2")
    wait_for(process, lambda: len(resumed(run)) == 2)
    wait_for(process, lambda: len(metrics(run)) > resumed(run)[1]["iteration"] + 2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert 130 == process.returncode, said
    return said


@pytest.mark.timeout(900)
def test_the_numbers_are_those_of_a_run_that_was_stopped_and_resumed_on_what_was_left(tmp_path):
    (tmp_path / "whole.py").write_text(PLACEMENT)
    run = tmp_path / "elastic"
    with cluster("127.0.0.10", "127.0.0.2") as made:
        said = elastic(tmp_path, made.address, made.ask, run)

    assert "on 2 of 4 cpu devices where it had 4 (all: 2)" in said
    assert "elastic: 4 of 4 cpu devices where it had 2 (all: 4): going on with them" in said
    first, second = (each["iteration"] for each in resumed(run))
    done = len(metrics(run))
    by_hand = tmp_path / "by hand"
    ends = (("cpu:4", first), ("cpu:2", second), ("cpu:4", done))
    for turn, (devices, end) in enumerate(ends):
        where = ["--resume" if turn else "--run-dir", str(by_hand)]
        words = command(tmp_path, devices, by_hand, end, *where, "--threads", "1")
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    assert metrics(run) == metrics(by_hand)[:done]
