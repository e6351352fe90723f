"""Memory that goes back to other processes, and starts that fit; doubles of device and engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlflow.runtime.worker.device_memory import CudaMemory, device_memory, leaving_memory
from rlflow.runtime.worker.starting import LOADED, start_steps
from rlflow.runtime.worker.worker import Worker
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster
from tests.runtime.engine_pipeline import Config, colocated, grpo, hybrid, split
from tests.runtime.test_engine_runs import TIGHT, log

pytestmark = pytest.mark.torch
__all__ = ["log"]


class Counted:
    """A device's memory whose caching allocator keeps all that was freed since the last gift.

    `told` has every gift, among what the engine was asked.
    """

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def allocated(self) -> int:
        return 0

    def reserved(self) -> int:
        return 0

    def free(self) -> int:
        return 0

    def wait(self) -> None:
        pass

    def give_back(self) -> None:
        self.told.append("give back")


def asks_memory(plan: Any, action: Any) -> bool:
    """Whether an engine's process takes memory in an action."""
    engines = {engine.name for engine in plan.engines}
    if action.kind == "wake":
        return plan.part(action.part).instance in engines
    return action.instance in engines and action.kind == "run"


def frees(plan: Any, action: Any) -> bool:
    """Whether a model of the worker's own process computes or sleeps in an action."""
    engines = {engine.name for engine in plan.engines}
    if action.kind == "sleep":
        return plan.part(action.part).instance not in engines
    return action.kind in ("run", "reshard") and action.instance not in {None, *engines}


def test_all_that_is_freed_is_given_back_before_an_engine_takes_memory(log: list[str]) -> None:
    """Of a run in the plan's order: between what frees and what an engine takes lies a gift."""
    plan = planned(colocated("sglang"), TIGHT)
    worker = Worker(plan, seed=0, memory=Counted(log))
    assert log.index("give back") < log.index("load actor@all/sglang saver=True on []")
    assert "give back" == log[-1]
    kept: list[str] = []
    asked = []
    for iteration in (0, 1):
        for action in plan.actions:
            before = len(log)
            if asks_memory(plan, action):
                assert not kept, f"{action.id} starts while {kept} are still in the cache"
                asked.append(action.id)
            worker.run(action, iteration)
            if frees(plan, action):
                kept.append(action.id)
            if "give back" in log[before:]:
                kept.clear()
    assert len(asked) == 6, asked
    worker.close()


def test_every_sleep_and_every_computation_beside_an_engine_leaves_memory() -> None:
    plan = planned(colocated("sglang"), TIGHT)
    own = [action for action in plan.actions if frees(plan, action)]
    assert {action.id for action in own} == leaving_memory(plan)
    assert {"run", "reshard", "sleep"} == {action.kind for action in own}


def test_nothing_is_given_back_where_no_engine_waits() -> None:
    """A reshard may stage weights in the process beside the engine."""
    assert {"reshard:actor@train->actor@gen/sglang"} == leaving_memory(planned(split("sglang")))
    assert not leaving_memory(planned(colocated("torch")))


def test_a_device_is_asked_by_its_kind() -> None:
    assert isinstance(device_memory("cuda:0"), CudaMemory)
    device_memory("cpu").give_back()


def test_a_cuda_device_is_awaited_before_its_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch is asked on a device, in order; there is none here."""
    asked: list[str] = []

    class Chosen:
        def __init__(self, device: torch.device) -> None:
            asked.append(str(device))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "device", Chosen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    CudaMemory("cuda:1").give_back()
    assert ["cuda:1", "synchronize", "empty_cache"] == asked


def planned(placement: Any, memory: float | None = None) -> Any:
    cluster = cpu_cluster(placement.num_devices(), threads=1, memory=memory)
    return compile_plan(grpo.trace(Config()), placement, cluster, name="p").plan


@pytest.mark.parametrize(
    ("placement", "memory"),
    [
        (colocated("sglang"), TIGHT),
        (colocated("torch"), TIGHT),
        (hybrid("sglang"), TIGHT),
        (split("sglang"), None),
    ],
    ids=["colocated", "one process", "hybrid", "split"],
)
def test_no_device_is_over_its_budget_at_any_step_of_a_start(placement: Any, memory: Any) -> None:
    plan = planned(placement, memory)
    held: Counter[int] = Counter()
    awake: dict[str, int] = {}
    for step in start_steps(plan):
        if step.kind == "load":
            for part in (p for p in plan.parts if p.instance == step.name and p.kind in LOADED):
                awake[part.name] = part.size or 0
                held.update(dict.fromkeys(part.devices, part.size or 0))
        else:
            part = plan.part(step.name)
            freed = (part.size or 0) - part.residual if step.name in awake else 0
            sign = 1 if step.kind == "wake" else -1
            held.update(dict.fromkeys(part.leaves, sign * freed))
        for device, size in held.items():
            assert size <= plan.budget(device), (step, device)
    order = [step.name for step in start_steps(plan) if step.kind == "load"]
    assert sorted(order) == sorted(i.name for i in plan.instances)
    own = [plan.instance(name).engine_plan.own_process for name in order]
    assert own == sorted(own)


def test_what_is_awake_leaves_while_another_instance_needs_its_room() -> None:
    """One model fills the device and begins awake; its optimizer leaves for the others."""
    plan = planned(colocated("torch"), TIGHT)
    own = ("actor@all/weights", "actor@all/optimizer")
    most = sum(plan.part(name).size or 0 for name in own)
    tight = replace(plan, budgets={0: most}, awake_at_start=own)
    steps = [(step.kind, step.name) for step in start_steps(tight)]
    loads = [n for n, (kind, _) in enumerate(steps) if kind == "load"]
    assert ("load", "actor@all") == steps[loads[0]]
    assert [("sleep", own[1])] == [s for s in steps[: loads[1]] if s[1] in own]
    assert ("wake", own[1]) == steps[-1]
    assert own[0] not in [name for _, name in steps]
