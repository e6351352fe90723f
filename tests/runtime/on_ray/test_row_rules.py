"""Rows reach the ranks as every rule says, and come back in their order, with nothing kept."""

from __future__ import annotations

import time

import pytest
import ray

from rlflow.cli.commands import Target, compile_target
from rlflow.runtime.execute.executor import Executor

pytestmark = [pytest.mark.ray, pytest.mark.torch]

PIPELINE = """
import os
import torch
import rlflow as rf
from rlflow import ops
from rlflow.batch import lengths

def mirrored(tokens, groups, parts):
    rows = list(range(len(tokens)))
    return [rows] * (parts - 1) + [rows[::-1]]

def alternating(parts):
    return [[r for r in part if r % len(parts) == n] for n, part in enumerate(parts)]

MIRRORED = rf.register_dispatch("mirrored", mirrored, alternating)

@rf.op(per="row")
def length(prompt: rf.Row[str]) -> rf.Row[float]:
    return lengths(prompt).float()

@rf.op(per="row")
def process(prompt: rf.Row[str]) -> rf.Row[float]:
    return torch.full((len(lengths(prompt)),), float(os.getpid()))

@rf.op(per="row", dispatch=MIRRORED)
def mirror(row_id: rf.Row[int], length: rf.Row[float]) -> rf.Row[float]:
    return (row_id * 100 + length).float() / 7

@rf.op(per="row", dispatch="parts")
def stays(length: rf.Row[float]) -> rf.Row[float]:
    return length + 0.5

@rf.op(per="batch", dispatch="all")
def centred(stays: rf.Row[float], mirror: rf.Row[float]) -> rf.Row[float]:
    return stays + mirror - mirror.mean()

@rf.op(per="batch")
def ranked(centred: rf.Row[float], row_id: rf.Row[int]) -> rf.Row[float]:
    return centred.argsort().argsort().float() * 100 + row_id

def on(devices):
    nodes = ("length", "process", "mirror", "stays", "centred", "ranked")
    return rf.Placement(
        pools={"cpus": devices}, assign={name: rf.on("cpus") for name in nodes}
    )

@rf.pipeline(placements={"one": on(1), "two": on(2), "three": on(3)})
def spread(cfg: rf.Config) -> None:
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=7)
    sizes = length(prompts)
    mirrors = mirror(prompts, sizes)
    moved = stays(sizes)
    middle = centred(moved, mirrors)
    ops.metrics(ranked(middle, prompts), name="ranks")
    ops.metrics(moved, name="moved")
    ops.metrics(process(prompts), name="workers")
"""


class Notes:
    """Keeps the metrics of every iteration."""

    def __init__(self):
        self.found = []

    def started(self, action, iteration):
        """Not needed here."""

    def finished(self, action, completion):
        """Not needed here."""

    def iteration_done(self, iteration, metrics):
        self.found.append(dict(metrics))


def played(plan, machine, iterations=3):
    """The metrics of every iteration."""
    notes = Notes()
    backend = machine.backend(time.perf_counter)
    try:
        Executor(plan, backend, notes, start=0, end=iterations, barrier=iterations).run()
    finally:
        backend.close()
    return notes.found


def object_store_bytes():
    """Bytes of the cluster's object store that are taken."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return total["object_store_memory"] - free["object_store_memory"]


@pytest.fixture
def compiled(tmp_path):
    file = tmp_path / "spread.py"
    file.write_text(PIPELINE)

    def call(placement, backend, *settings):
        target = Target(
            pipeline=str(file),
            placement=placement,
            devices=f"cpu:{['one', 'two', 'three'].index(placement) + 1}",
            threads=1,
            backend=backend,
            settings=settings,
        )
        return compile_target(target).compiled.plan, file

    return call


@pytest.fixture
def local(compiled):
    from rlflow.runtime.local import LocalMachine
    from rlflow.runtime.worker.worker import Worker

    plan, file = compiled("one", "local")
    return played(plan, LocalMachine(plan, Worker(plan, seed=0, near=file), threads=1))


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("two", marks=pytest.mark.slow),
        pytest.param("three", marks=[pytest.mark.slow, pytest.mark.extra]),
    ],
)
def test_every_rule_gives_each_row_its_own_result(compiled, local, placement):
    from rlflow.runtime.ray.machine import Options, RayMachine

    plan, file = compiled(placement, "ray")
    options = Options(kind="cpu", threads=1, seed=0, near=file, deadline=60)
    machine = RayMachine(plan, options)
    try:
        found = played(plan, machine)
        left = machine.held()
        until = time.monotonic() + 20
        while (kept := object_store_bytes()) and time.monotonic() < until:
            time.sleep(0.5)
    finally:
        machine.close()

    assert len(found) == len(local) == 3
    for ours, others in zip(local, found, strict=True):
        assert others["workers/process_min"] < others["workers/process_max"]
        assert ours.keys() == others.keys()
        same = {name for name, value in ours.items() if others[name] == value}
        assert {name for name in ours if "workers" not in name} <= same
    assert set(left.values()) == {0}
    assert 0 == kept
    rules = {a.takes.rule for a in plan.actions if a.takes is not None}
    assert {"whole", "balanced", "mirrored"} <= rules
