"""The local backend: a thread a device, actions in the order submitted, errors handed on."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

from rlflow.graph.graph import Graph
from rlflow.runtime.execute.executor import Executor
from rlflow.runtime.local import LocalBackend
from rlflow.scheduler.plan.plan import Action, Dep, Plan, Reason

pytestmark = pytest.mark.torch


def action(name, *devices, after=()):
    deps = tuple(Dep(action=other, distance=0, kind="order") for other in after)
    reason = Reason(rule="test", text="a test")
    return Action(
        id=name, kind="run", node=name, reason=reason, devices=devices, pool="", after=deps
    )


def plan_of(*actions):
    return Plan(
        graph=Graph(name="made", nodes=(), models=()),
        placement="p",
        cluster="cpu:2",
        budgets={},
        backend="local",
        staleness=0,
        pools={},
        actions=tuple(actions),
    )


class Calls:
    """A worker that notes where it was called, and does what a test says."""

    def __init__(self, body=lambda action, iteration: {}):
        self.body = body
        self.log = []

    def run(self, action, iteration):
        self.log.append((action.id, iteration, threading.current_thread().name))
        return self.body(action, iteration)


@pytest.fixture
def backend():
    made = []

    def make(plan, worker, threads=1):
        made.append(LocalBackend(plan, worker, threads=threads, now=time.perf_counter))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait(done, count):
    return [done.get(timeout=10) for _ in range(count)]


def test_a_device_runs_in_the_order_submitted(backend):
    one = action("one", 0)
    worker = Calls()
    local, done = backend(plan_of(one), worker), queue.SimpleQueue()
    for iteration in range(20):
        local.submit(one, iteration, done.put)
    assert list(range(20)) == [completion.iteration for completion in wait(done, 20)]
    assert {"device 0"} == {name for _, _, name in worker.log}


def test_devices_run_side_by_side(backend):
    met = threading.Barrier(3, timeout=10)
    actions = [action("host", -1), action("left", 0), action("right", 1)]
    local = backend(plan_of(*actions), Calls(lambda *_: {"met": float(met.wait() >= 0)}))
    done = queue.SimpleQueue()
    for each in actions:
        local.submit(each, 0, done.put)
    assert [{"met": 1.0}] * 3 == [completion.metrics for completion in wait(done, 3)]


def test_an_error_is_handed_on_and_the_device_goes_on(backend):
    def body(action, iteration):
        if iteration == 0:
            raise ValueError("broken")
        return {"fine": 1.0}

    one = action("one", 0)
    local, done = backend(plan_of(one), Calls(body)), queue.SimpleQueue()
    local.submit(one, 0, done.put)
    local.submit(one, 1, done.put)
    first, second = wait(done, 2)
    assert "broken" == str(first.error)
    assert (None, {"fine": 1.0}) == (second.error, second.metrics)
    assert first.start <= first.end <= second.start <= second.end


def test_each_device_has_its_threads(backend):
    one = action("one", 0)
    body = lambda *_: {"threads": float(torch.get_num_threads())}  # noqa: E731
    local, done = backend(plan_of(one), Calls(body), threads=2), queue.SimpleQueue()
    local.submit(one, 0, done.put)
    assert {"threads": 2.0} == done.get(timeout=10).metrics


def test_close_waits_for_what_was_submitted(backend):
    one = action("one", 0)
    worker = Calls(lambda *_: time.sleep(0.01) or {})
    local, done = backend(plan_of(one), worker), queue.SimpleQueue()
    for iteration in range(5):
        local.submit(one, iteration, done.put)
    local.close()
    assert 5 == len(worker.log)


def test_an_error_in_one_thread_ends_the_run_after_the_others(backend):
    def body(action, iteration):
        if action.id == "quick":
            raise ValueError("broken")
        time.sleep(0.05)
        return {}

    plan = plan_of(action("slow", 0), action("quick", 1), action("after", -1, after=("slow",)))
    worker = Calls(body)
    local = backend(plan, worker)
    executor = Executor(plan, local, Listener(), start=0, end=3, barrier=3)
    with pytest.raises(ValueError, match="broken"):
        executor.run()
    assert {("slow", 0), ("quick", 0)} == {(name, i) for name, i, _ in worker.log}


class Listener:
    def started(self, action, iteration):
        pass

    def finished(self, action, completion):
        pass

    def iteration_done(self, iteration, metrics):
        pass
