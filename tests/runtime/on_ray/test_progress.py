"""A rank that is slow but moves goes on; one that hangs is named with what it did last."""

from __future__ import annotations

import time

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.errors import RunError
from rlflow.runtime.execute import deadlines
from tests.runtime.whole_runs import played

pytestmark = [pytest.mark.ray, pytest.mark.torch, pytest.mark.slow]

PIPELINE = """
import time
import torch
import rlflow as rf
from rlflow import ops
from rlflow.batch import lengths
from rlflow.contract.progress import advance

@rf.op(per="batch")
def worked(prompt: rf.Row[str], *, iteration: int) -> rf.Row[float]:
    for _ in range(10):
        time.sleep(0.5)
        advance(3, "rows")
    if iteration == 1:
        time.sleep(90)
    return torch.zeros(len(lengths(prompt)))

@rf.pipeline(placements={
    "one": rf.Placement(pools={"cpus": 1}, assign={"worked": rf.on("cpus")}),
})
def slow(cfg: rf.Config) -> None:
    rows = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    ops.metrics(worked(rows), name="done")
"""


def test_slow_ranks_go_on_and_a_hung_one_is_named(tmp_path, monkeypatch):
    from rlflow.runtime.ray.machine import Options, RayMachine

    silent = {"FLOOR": 2.0, "UNKNOWN": 2.0, "FIRST": 0.0, "FACTOR": 0.1}
    file = tmp_path / "slow.py"
    file.write_text(PIPELINE)
    target = Target(pipeline=str(file), placement="one", devices="cpu:1", threads=1, backend="ray")
    plan = compile_target(target).compiled.plan
    machine = RayMachine(plan, Options(kind="cpu", threads=1, seed=0, near=file))
    for name, value in silent.items():
        monkeypatch.setattr(deadlines, name, value)
    try:
        assert 1 == len(played(plan, machine, iterations=1))
        began = time.monotonic()
        with pytest.raises(RunError) as caught:
            played(plan, machine, iterations=2)
        took = time.monotonic() - began
    finally:
        machine.close()

    assert took < 25
    assert "worked in iteration 1 showed no progress for 2 s" in str(caught.value)
    assert "before, 30 rows" in str(caught.value)
