"""Runs whose parts sleep and wake beside the compute give the bytes of runs where all fits."""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import replace

import pytest

from rlflow.runtime.local import LocalBackend
from tests.conftest import PIPELINES, QUICK, SMALL
from tests.runtime.whole_runs import tensors
from tests.scheduler.paged import action, part, plan_of

pytestmark = pytest.mark.torch


@pytest.fixture
def train(rlflow, tmp_path, monkeypatch):
    """Run a pipeline for a few iterations; returns its directory and its plan."""
    monkeypatch.chdir(tmp_path)

    def call(name, pipeline, *words):
        where = tmp_path / name
        options = ("--iterations", 3, "--run-dir", where, "-q")
        result = rlflow("run", pipeline, *QUICK, *SMALL, *words, *options)
        assert 0 == result.code, result.err
        return where, json.loads((where / "plan.json").read_text())

    return call


def tightest(plan: dict) -> int:
    """Bytes that the largest action needs by itself, and an eighth of what else there is."""
    sizes = {part["name"]: part["size"] for part in plan["parts"]}
    alone = max(
        sum(sizes[name] for name in action["needs"]) + action["cost"]["transient"]
        for action in plan["actions"]
    )
    return alone + (max(plan["peaks"].values()) - alone) // 8


@pytest.mark.slow
def test_memory_pressure_does_not_change_a_bit(train):
    name = "ppo_arithmetic.py"
    wide, plan = train("wide", PIPELINES / name, "--devices", "cpu:1")
    tight, pressed = train(
        "tight", PIPELINES / name, "--devices", f"cpu:1@{tightest(plan) / 1e6:.3f}MB"
    )
    assert not {"sleep", "wake"} & {action["kind"] for action in plan["actions"]}
    assert {"sleep", "wake"} <= {action["kind"] for action in pressed["actions"]}
    assert (wide / "metrics.jsonl").read_bytes() == (tight / "metrics.jsonl").read_bytes()
    assert tensors(wide) == tensors(tight)


@pytest.mark.slow
def test_weights_of_their_own_are_emptied_and_filled_in_every_segment(train, tmp_path):
    """Rollout weights that every reshard fills are discarded; checkpoints lie in between."""
    text = (PIPELINES / "grpo_arithmetic.py").read_text()
    own = 'rf.Placement(pools={"all": 1}, assign={"*": rf.on("all"), ' \
        '"actor.rollout": rf.on("all", weights="own")})'  # fmt: skip
    text = text.replace('"fsdp": rf', f'"own": {own},\n        "fsdp": rf', 1)
    text = text.replace("pipelines/assets", str(PIPELINES / "assets"))
    pipeline = tmp_path / "own.py"
    pipeline.write_text(text[: text.index("    held_out")])
    words = ("--placement", "own", "--set", "kl_coef=0.05", "--save-every", 2)
    wide, plan = train("wide", pipeline, *words, "--devices", "cpu:1")
    memory = f"cpu:1@{tightest(plan) / 1e6:.3f}MB"
    tight, pressed = train("tight", pipeline, *words, "--devices", memory)
    assert "discard" in {
        a["mode"] for a in pressed["actions"] if str(a["part"]).endswith("rollout/weights")
    }
    assert (wide / "metrics.jsonl").read_bytes() == (tight / "metrics.jsonl").read_bytes()
    assert tensors(wide) == tensors(tight)


def test_copies_run_beside_what_computes_on_a_device():
    """Both have to be under way at once to pass the barrier."""
    met = threading.Barrier(2, timeout=10)

    class Meeting:
        def run(self, action, iteration):
            return {"met": float(met.wait() >= 0)}

    compute = action("compute", 0)
    copy = replace(compute, id="copy", kind="sleep", part="m", mode="offload")
    backend = LocalBackend(
        plan_of(1, [part("m", 1, 0)], [compute, copy]), Meeting(), threads=1, now=time.perf_counter
    )
    done = queue.SimpleQueue()
    for each in (compute, copy):
        backend.submit(each, 0, done.put)
    found = [done.get(timeout=10) for _ in range(2)]
    backend.close()
    assert [None, None] == [completion.error for completion in found]
