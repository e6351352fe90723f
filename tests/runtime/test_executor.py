"""The executor alone: random plans on a backend that ends instances in any order it likes."""

from __future__ import annotations

import queue
from collections import Counter
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlflow.graph.graph import Graph
from rlflow.runtime.execute.executor import Completion, Executor
from rlflow.runtime.execute.segments import AHEAD, closing_actions
from rlflow.scheduler.plan.plan import Action, Dep, Plan, Reason
from tests.budget import examples

REASON = Reason(rule="test", text="a test")
AHEADS = [0, 0, 0, 1, 2, 3]


def action(name, *after, **options):
    """A host action; `after` are (name, distance)."""
    deps = tuple(Dep(action=other, distance=distance, kind="order") for other, distance in after)
    shape = {"kind": "run", "node": name, "devices": (-1,), "pool": "host"} | options
    return Action(id=name, reason=REASON, after=deps, **shape)


def plan_of(*actions):
    graph = Graph(name="made", nodes=(), models=())
    return Plan(
        graph=graph,
        placement="p",
        cluster="cpu:1",
        budgets={},
        backend="local",
        staleness=0,
        pools={},
        actions=tuple(actions),
    )


@st.composite
def plans(draw):
    """Up to seven actions: distance 0 to earlier ones, distance 1 and 2 to any, some ahead."""
    count = draw(st.integers(1, 7))
    names = [f"a{index}" for index in range(count)]
    actions = []
    for index, name in enumerate(names):
        after = {(other, 0) for other in draw(st.sets(st.sampled_from(names[:index] or [name])))}
        after -= {(name, 0)}
        after |= draw(st.sets(st.tuples(st.sampled_from(names), st.integers(1, 2)), max_size=3))
        period = draw(st.sampled_from([1, 1, 1, 2, 3]))
        shape = {"phase": draw(st.integers(0, period - 1)), "ahead": draw(st.sampled_from(AHEADS))}
        closing = draw(st.integers(0, 4)) == 0
        actions.append(action(name, *sorted(after), every=period, closing=closing, **shape))
    return plan_of(*actions)


class Machine:
    """A backend and a listener in one thread: whoever waits for an event ends an instance.

    It stands in for the executor's event queue too, so that nothing happens at random
    that hypothesis did not draw.
    """

    def __init__(self, seed, *, broken=(), stop_at=None):
        self.random = Random(seed)
        self.running = []
        self.waiting = []
        self.log = []
        self.reported = []
        self.broken, self.stop_at = set(broken), stop_at
        self.executor = None

    def submit(self, action, iteration, done):
        self.running.append((action.id, iteration))
        self.log.append(("start", action.id, iteration))

    def close(self):
        pass

    def put(self, event):
        self.waiting.append(event)

    def get(self, timeout):
        if self.stop_at is not None and len(self.log) >= self.stop_at:
            self.stop_at = None
            self.log.append(("stop",))
            self.executor.stop()
        if self.waiting:
            return self.waiting.pop(0)
        name, iteration = self.running.pop(self.random.randrange(len(self.running)))
        self.log.append(("end", name, iteration))
        broken = (name, iteration) in self.broken
        return Completion(
            action=name,
            iteration=iteration,
            start=0.0,
            end=1.0,
            metrics={"n": float(iteration)},
            error=ValueError(f"{name}@{iteration}") if broken else None,
        )

    def started(self, action, iteration):
        pass

    def finished(self, action, completion):
        pass

    def iteration_done(self, iteration, metrics):
        self.log.append(("done", iteration))
        self.reported.append((iteration, dict(metrics)))

    def starts(self):
        return [entry[1:] for entry in self.log if entry[0] == "start"]


def prepared(plan, seed, *, start=0, end=5, barrier=100, **faults):
    machine = Machine(seed, **faults)
    executor = Executor(plan, machine, machine, start=start, end=end, barrier=barrier)
    executor.events = machine
    machine.executor = executor
    return machine, executor


def execute(plan, seed, **options):
    machine, executor = prepared(plan, seed, **options)
    return executor.run(), machine


def due(action, iteration, end):
    return action.closing if iteration == end else action.due(iteration)


def bounds(iteration, start, end, barrier):
    """The segment that an iteration is in."""
    if iteration == end:
        return end, end + 1
    low = max(start, iteration // barrier * barrier)
    return low, min(end, (iteration // barrier + 1) * barrier)


def over(plan, log, low, high, end):
    """Whether (action, turn) of a segment is over after a log: ended, or a phantom held by none."""
    ended = {entry[1:] for entry in log if entry[0] == "end"}
    first = low - max(item.ahead for item in plan.actions)
    known = set()

    def is_over(name, turn):
        if turn < first or (name, turn) in known:
            return True
        item = plan.action(name)
        iteration = turn + item.ahead
        if low <= iteration < high and due(item, iteration, end):
            return (name, iteration) in ended
        deps = [(dep.action, turn - dep.distance) for dep in item.after]
        deps.append((name, turn - 1))
        return all(is_over(*dep) for dep in deps) and not known.add((name, turn))

    return is_over


@settings(max_examples=examples(100), deadline=None)
@given(plans(), st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 8), st.integers(1, 9))
def test_a_run_honours_its_plan_its_window_and_its_barriers(plan, seed, start, count, barrier):
    end = start + count
    done, machine = execute(plan, seed, start=start, end=end, barrier=barrier)
    assert end == done
    expected = [
        (item.id, iteration)
        for item in plan.actions
        for iteration in range(start, end + 1)
        if due(item, iteration, end)
    ]
    assert Counter(expected) == Counter(machine.starts())
    every_dependency_is_over(plan, machine.log, start, end, barrier)
    nothing_is_ahead_of_the_window_or_a_barrier(plan, machine.log, start, end, barrier)
    closing = any(item.closing for item in plan.actions)
    told = [
        (i, {f"{item.node}/n": float(i) for item in plan.actions if due(item, i, end)})
        for i in range(start, end + closing)
    ]
    assert told == machine.reported


def every_dependency_is_over(plan, log, start, end, barrier):
    for place, entry in enumerate(log):
        if entry[0] == "start":
            _, name, iteration = entry
            low, high = bounds(iteration, start, end, barrier)
            is_over = over(plan, log[:place], low, high, end)
            turn = iteration - plan.action(name).ahead
            for dep in plan.action(name).after:
                assert is_over(dep.action, turn - dep.distance), (entry, dep)


def nothing_is_ahead_of_the_window_or_a_barrier(plan, log, start, end, barrier):
    """A barrier holds until its listener has returned."""
    most = max(item.ahead for item in plan.actions)
    whole, running = start, 0
    for entry in log:
        running += {"start": 1, "end": -1}.get(entry[0], 0)
        if entry[0] == "done":
            whole = entry[1] + 1
            assert not running or (whole % barrier and whole < end)
        if entry[0] == "start":
            assert entry[2] < whole + AHEAD + most
            assert entry[2] < (whole // barrier + 1) * barrier or whole >= end
            assert entry[2] < end or whole >= end


@settings(max_examples=examples(80), deadline=None)
@given(plans(), st.integers(0, 2**32), st.integers(0, 40), st.integers(1, 4))
def test_a_stop_ends_after_the_iterations_begun(plan, seed, stop_at, barrier):
    end = 6
    done, machine = execute(plan, seed, end=end, barrier=barrier, stop_at=stop_at)
    if ("stop",) not in machine.log:
        return
    place = machine.log.index(("stop",))
    begun = max([entry[2] for entry in machine.log[:place] if entry[0] == "start"], default=0)
    later = [entry[2] for entry in machine.log[place:] if entry[0] == "start"]
    assert min(begun + 1, end) == done
    assert all(iteration <= begun for iteration in later)
    for iteration in range(done):
        for item in plan.actions:
            if item.due(iteration):
                assert ("end", item.id, iteration) in machine.log


def test_a_stop_lets_nothing_of_a_later_iteration_start():
    plan = plan_of(action("early"), action("late", ("early", 0), ("late", 1)))
    for seed in range(20):
        done, machine = execute(plan, seed, end=50, stop_at=5)
        place = machine.log.index(("stop",))
        begun = max(entry[2] for entry in machine.log[:place] if entry[0] == "start")
        assert begun + 1 == done
        assert begun == max(iteration for _, iteration in machine.starts())


def test_no_closing_action_runs_after_a_stop():
    plan = plan_of(action("train"), action("eval", ("train", 1), every=100, closing=True))
    done, machine = execute(plan, 0, end=50, stop_at=6)
    assert done < 50
    assert [("eval", 0)] == [entry for entry in machine.starts() if entry[0] == "eval"]


def test_a_stop_during_the_closing_actions_does_not_drop_them():
    plan = plan_of(
        action("train"),
        action("eval", ("train", 1), every=100, phase=99, closing=True),
        action("more", ("eval", 0), every=100, phase=99, closing=True),
    )
    done, machine = execute(plan, 0, end=1, stop_at=3)
    assert machine.log.index(("stop",)) < machine.log.index(("start", "more", 1))
    assert 1 == done


@settings(max_examples=examples(60), deadline=None)
@given(plans(), st.integers(0, 2**32), st.data())
def test_an_error_is_raised_after_the_others_have_drained(plan, seed, data):
    failing = data.draw(st.sampled_from(plan.actions))
    done, machine = execute(plan, seed, end=4)
    instances = [item for item in machine.starts() if item[0] == failing.id]
    if not instances:
        return
    fail = instances[-1]
    machine, executor = prepared(plan, seed, end=4, broken=[fail])
    with pytest.raises(ValueError, match=f"^{fail[0]}@{fail[1]}$"):
        executor.run()
    assert [] == machine.running
    broke = machine.log.index(("end", *fail))
    assert [] == [entry for entry in machine.log[broke:] if entry[0] in ("start", "done")]


def test_the_first_error_wins_over_later_ones():
    plan = plan_of(action("a"), action("b"), action("c"))
    everything = [("a", 0), ("b", 0), ("c", 0)]
    for seed in range(5):
        machine, executor = prepared(plan, seed, end=3, broken=everything)
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
            executor.run()
        ends = [entry[1:] for entry in machine.log if entry[0] == "end"]
        assert 3 == len(ends)
        assert "{}@{}".format(*ends[0]) == str(caught.value)


def test_an_interrupt_that_nobody_saw_raised_ends_a_run_whose_actions_go_on():
    plan = plan_of(action("a"))
    machine, executor = prepared(plan, 0, end=3)

    class Silent:
        looks = 0

        def put(self, event):
            pass

        def get(self, *, timeout):
            self.looks += 1
            if self.looks == 3:
                executor.interrupt()
            raise queue.Empty

    executor.events = Silent()
    with pytest.raises(KeyboardInterrupt):
        executor.run()
    assert executor.events.looks == 3
    assert machine.log == [("start", "a", 0)]


def test_a_resumed_run_starts_where_it_ended_and_evaluates_once():
    plan = plan_of(
        action("train", ("eval", 0)),
        action("eval", ("train", 1), every=2, closing=True),
    )
    done, machine = execute(plan, 0, start=3, end=5)
    assert 5 == done
    assert [("train", 3), ("eval", 4), ("train", 4), ("eval", 5)] == machine.starts()
    assert [3, 4, 5] == [iteration for iteration, _ in machine.reported]


def test_a_finished_run_does_its_closing_actions_again_and_nothing_else():
    plan = plan_of(action("train"), action("eval", ("train", 1), every=9, closing=True))
    done, machine = execute(plan, 0, start=5, end=5)
    assert (5, [("eval", 5)]) == (done, machine.starts())


def reshard(name, target, *after, **options):
    return action(name, *after, kind="reshard", targets=(target,), node=None, **options)


def test_closing_actions_bring_the_weights_they_read():
    plan = plan_of(
        reshard("reshard:a", "a@gen"),
        reshard("reshard:b", "b@gen"),
        action("eval", reads=(("a@gen", 0),), closing=True),
        action("update"),
    )
    assert {"reshard:a", "eval"} == closing_actions(plan)
    assert frozenset() == closing_actions(plan_of(action("update")))


def periodic():
    """An update, and an evaluation every 4 iterations on weights that a reshard brings."""
    return plan_of(
        action("eval", ("sync", 1), every=4, reads=(("a@gen", 0),), closing=True),
        action("update", ("sync", 1)),
        reshard("sync", "a@gen", ("update", 0), ("eval", 0), every=4, phase=3),
    )


@pytest.mark.parametrize(
    ("start", "end", "synced"),
    [
        (0, 4, [3]),  # the one that was due fills what the closing evaluation reads
        (0, 6, [3, 5]),  # the closing evaluation needs one more
        (4, 6, [3, 5]),  # resumed at an evaluation, whose weights nobody has brought
        (5, 7, [6]),  # resumed between two: nobody reads before the end
        (6, 6, [5]),  # resumed when all is done
    ],
)
def test_a_reshard_is_made_up_for_where_its_target_lacks_the_weights(start, end, synced):
    _, machine = execute(periodic(), 3, start=start, end=end)
    starts = machine.starts()
    assert synced == [iteration for name, iteration in starts if name == "sync"]
    for iteration in [iteration for name, iteration in starts if name == "eval" and iteration]:
        assert starts.index(("sync", iteration - 1)) < starts.index(("eval", iteration))


def test_moves_act_in_every_turn_and_have_iterations_of_the_segment():
    move = {"node": None, "part": "a/weights"}
    plan = plan_of(
        action("sleep", ("work", 0), kind="sleep", **move),
        action("wake", ("sleep", 0), kind="wake", **move),
        action("work", ahead=1),
    )
    _, machine = execute(plan, 0, end=4, barrier=2)
    assert [0, 0, 1, 2, 2, 3] == [i for name, i in machine.starts() if name == "sleep"]
    assert [0, 1, 2, 3] == [i for name, i in machine.starts() if name == "work"]
    assert [0, 1, 2, 3] == [iteration for iteration, _ in machine.reported]


def test_moves_say_the_iteration_that_they_work_for_while_the_pipeline_fills():
    rollout, update = {"node": None, "part": "r/weights"}, {"node": None, "part": "u/weights"}
    plan = plan_of(
        action("sleep u", ("update", 1), kind="sleep", **update),
        action("wake r", ("sleep u", 0), kind="wake", **rollout),
        action("rollout", ("wake r", 0), ahead=1, needs=("r/weights",)),
        action("sleep r", ("rollout", 0), kind="sleep", **rollout),
        action("wake u", ("sleep r", 0), kind="wake", **update),
        action("update", ("wake u", 0), ("rollout", 1), needs=("u/weights",)),
    )
    _, machine = execute(plan, 0, end=3)
    found = {
        name: [i for other, i in machine.starts() if other == name] for name, _ in machine.starts()
    }

    assert [0, 1, 2] == found["rollout"] == found["update"]
    assert [0, 1, 2, 2] == found["wake r"] == found["sleep r"]
    assert [0, 0, 1, 2] == found["wake u"]
    assert [0, 0, 0, 1] == found["sleep u"]
