"""The monitor sees what is broken, and the fake backend is a clock that nobody else moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlflow.runtime.execute.executor import Completion, Executor
from rlflow.runtime.execute.monitor import Monitor
from rlflow.runtime.execute.monitor_rows import givers
from rlflow.runtime.fake import FakeBackend, FakeError, random_seconds
from rlflow.scheduler.plan.plan import Chunk, Cost
from rlflow.scheduler.simulate.play import play
from tests.runtime.kernels import action, lagging, plan_of, sleeping
from tests.runtime.test_fake import run


def without(plan, name, other, distance):
    """The plan with one dependency less."""
    held = plan.action(name)
    left = tuple(dep for dep in held.after if (dep.action, dep.distance) != (other, distance))
    assert len(left) + 1 == len(held.after)
    return changed(plan, name, after=left)


def changed(plan, name, **fields):
    """The plan with one action changed."""
    actions = tuple(replace(a, **fields) if a.id == name else a for a in plan.actions)
    return replace(plan, actions=actions)


MUTANTS = {
    "a rollout does not wait for its weights": (
        without(lagging(1), "actor.rollout", "reshard", 1),
        r"reads version \d of actor@gen|starts on device 1",
    ),
    "weights are overwritten under a rollout": (
        changed(without(lagging(1), "reshard", "actor.rollout", 0), "reshard", devices=(0,)),
        "reads version",
    ),
    "a reward does not wait for its samples": (
        without(lagging(2), "reward", "actor.rollout", 0),
        "before actor.rollout@. has made its rows",
    ),
    "a rollout declares a fresher version": (
        changed(lagging(2), "actor.rollout", reads=(("actor@gen", 1),)),
        "reads version",
    ),
    "an update forgets what it writes": (
        changed(lagging(0), "actor.update", writes=()),
        "reads version",
    ),
    "two actions share a lane": (
        without(lagging(0), "prompts", "advantage", 1),
        "starts on device -1 while",
    ),
    "rows are read before they are made": (
        without(lagging(0), "advantage", "reward", 0),
        "has made its rows",
    ),
    "what is used is asleep": (without(sleeping(), "use.b", "wake.b", 0), "sleeps"),
    "what is used is put to sleep": (
        without(sleeping(), "sleep.a", "use.a", 0),
        "while it is used|which sleeps",
    ),
    "two parts are awake where one fits": (
        without(sleeping(), "wake.b", "sleep.a", 0),
        "bytes on device 0|starts on device 0",
    ),
    "a device has less memory": (replace(sleeping(), budgets={0: 9, -1: 20}), "device 0 of 9"),
    "a host has less memory": (replace(sleeping(), budgets={0: 15, -1: 5}), "on a host of 5"),
    "a peak is understated": (replace(sleeping(), peaks={0: 8}), "the peak is 8"),
    "an action holds more while it runs": (
        changed(sleeping(), "use.a", cost=Cost(seconds=1.0, transient=6)),
        "makes 16 bytes on device 0 of 15",
    ),
}


@pytest.mark.parametrize("what", MUTANTS)
def test_a_broken_plan_is_seen_in_some_interleaving(what):
    plan, said = MUTANTS[what]
    found = []
    for seed in range(40):
        try:
            run(plan, random_seconds(seed), end=4, barrier=3)
        except (AssertionError, RuntimeError) as error:
            found.append(str(error))
    assert found
    with pytest.raises(AssertionError, match=said):
        raise AssertionError("; ".join(found))


@pytest.mark.parametrize("lag", range(4))
def test_a_sound_plan_has_nothing_to_see(lag):
    for seed in range(20):
        run(lagging(lag), random_seconds(seed), end=5, barrier=3)
        run(sleeping(), random_seconds(seed), end=5, barrier=2)


def test_versions_are_those_of_the_lag_and_of_the_segment():
    monitor, _ = run(lagging(2), lambda action, i: 1.0, end=6, barrier=4)
    read = {i: versions for name, i, versions in monitor.log if name == "actor.rollout"}
    assert {0: (0,), 1: (0,), 2: (0,), 3: (1,), 4: (4,), 5: (4,)} == read


def test_a_resumed_run_fills_what_only_files_have():
    monitor, _ = run(lagging(1), lambda action, i: 1.0, start=4, end=6, barrier=2)
    assert ("reshard", 3, (4,)) == next(entry for entry in monitor.log if entry[0] == "reshard")


def test_the_monitor_wants_iterations_in_order_and_whole():
    monitor = Monitor(lagging(0), start=0, end=3, barrier=9)
    with pytest.raises(AssertionError, match="iteration 1 is told after 0"):
        monitor.iteration_done(1, {})
    with pytest.raises(AssertionError, match="before prompts is over"):
        monitor.iteration_done(0, {})
    with pytest.raises(AssertionError, match="0 of 3 iterations are done"):
        monitor.finish()


def test_the_monitor_wants_turns_bounded_and_barriers_kept():
    plan = plan_of(action("a", (0,)))
    monitor = Monitor(plan, start=0, end=9, barrier=9)
    with pytest.raises(AssertionError, match="3 iterations ahead of what is done"):
        monitor.started(plan.action("a"), 3)
    monitor = Monitor(plan, start=0, end=9, barrier=2)
    with pytest.raises(AssertionError, match="starts in iterations 0 to 1"):
        monitor.started(plan.action("a"), 2)


def test_the_first_to_end_is_heard_first_and_ties_as_submitted():
    heard = []
    backend = FakeBackend(seconds=lambda action, i: action.cost.seconds)
    for name, seconds in (("slow", 2.0), ("one", 1.0), ("other", 1.0)):
        backend.submit(action(name, (0,), seconds=seconds), 0, backend.events.put)
    assert ["one", "other", "slow"] == [name for name, _ in backend.running]
    for _ in range(3):
        event = backend.events.get()
        assert isinstance(event, Completion)
        heard.append((event.action, event.start, event.end, backend.now))
    assert [("one", 0, 1, 1), ("other", 0, 1, 1), ("slow", 0, 2, 2)] == heard
    with pytest.raises(RuntimeError, match="nothing runs"):
        backend.events.get()


def test_a_failure_is_raised_after_the_others_have_ended():
    plan = plan_of(action("a", (0,)), action("b", (1,), seconds=5.0), action("c", (0,), ("a", 0)))
    backend = FakeBackend(fails={("a", 0)})
    monitor = Monitor(plan, start=0, end=2, barrier=9)
    options = {"start": 0, "end": 2, "barrier": 9, "events": backend.events}
    with pytest.raises(FakeError, match="a of iteration 0"):
        Executor(plan, backend, monitor, **options).run()
    assert ([], 5.0) == (backend.running, backend.now)
    with pytest.raises(AssertionError, match="after a failure"):
        backend.submit(plan.action("a"), 1, backend.events.put)


def test_a_closed_backend_takes_nothing():
    backend = FakeBackend()
    backend.close()
    with pytest.raises(AssertionError, match="closed"):
        backend.submit(action("a", (0,)), 0, backend.events.put)


def test_a_seed_gives_the_same_run_again():
    logs = {str(run(lagging(2), random_seconds(5), end=6, barrier=4)[0].log) for _ in range(2)}
    assert 1 == len(logs)
    drawn = {random_seconds(seed)(action("a", (0,)), 3) for seed in range(30)}
    assert len(drawn) > 10


def test_chunks_take_the_rows_of_those_they_overlap():
    cut = [
        action(f"r{i}", (0,), node="actor.rollout", chunk=Chunk(index=i, count=4)) for i in range(4)
    ]
    half = action("half", (0,), node="reward", chunk=Chunk(index=1, count=2))
    plan = replace(lagging(0), actions=(*cut, half))
    assert ("r2", "r3") == givers(plan, half)
    whole = replace(half, chunk=None)
    assert ("r0", "r1", "r2", "r3") == givers(plan, whole)


@pytest.mark.parametrize("lag", range(4))
def test_the_simulator_and_the_executor_keep_the_same_time(lag):
    """What is played without a runtime starts and ends when the executor starts and ends it."""
    for plan in (lagging(lag), sleeping()):
        for seed in range(15):
            seconds, times = random_seconds(seed), {}
            backend = FakeBackend(seconds=seconds)
            monitor = Monitor(plan, start=0, end=7, barrier=4)
            heard = monitor.finished

            def finished(action, completion, heard=heard, times=times):
                times[action.id, completion.iteration, completion.start] = completion.end
                heard(action, completion)

            monitor.finished = finished
            options = {"start": 0, "end": 7, "barrier": 4, "events": backend.events}
            Executor(plan, backend, monitor, **options).run()
            spans = play(plan, 7, seconds=seconds, barrier=4)
            assert times == {(s.action.id, s.iteration, s.start): s.end for s in spans}
