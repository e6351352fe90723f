"""Loops on the virtual clock: whatever the gates say, and in every interleaving, invariants hold.

A seed chooses the plan, the latencies, the barriers, what every trip reaches and what fails.
`RLFLOW_SEEDS=20000` tries more of them, `RLFLOW_SEED=17` that one alone.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlflow.runtime.execute.executor import Executor
from rlflow.runtime.execute.monitor import Monitor
from rlflow.runtime.fake import FakeBackend, FakeError, random_seconds
from rlflow.scheduler.compile import compile_plan
from tests.budget import examples
from tests.runtime.test_fake import models  # noqa: F401  a fixture of this file too
from tests.scheduler.examples import compiled_with
from tests.scheduler.looping import PLACEMENTS, counting, dapo, fitting, loops, modes, nested
from tests.scheduler.looping import nested_loops as nests
from tests.scheduler.mutants import with_action
from tests.scheduler.strategies import PLENTY, cluster

SEEDS = int(os.environ.get("RLFLOW_SEEDS", "160"))
GRAPHS = {
    "plain": lambda: dapo(at_most=3),
    "kept": lambda: dapo(at_most=3, surplus="keep", every=3),
    "many": lambda: dapo(at_most=5, reference=False, ignore_eos=True),
    "state": lambda: counting(at_most=4, model=True),
    "counts in counts": lambda: nested("counts", outer=3, inner=2, model=True),
    "counts in drawn": lambda: nested("drawn", outer=2, inner=3, surplus="keep"),
    "drawn in drawn": lambda: nested("groups", outer=2, inner=2),
}
MODES = (
    {},
    {"staleness": 1},
    {"staleness": 2, "stream": 4},
    {"staleness": 1, "pause_at": 4},
    {"staleness": 2, "stream": 2, "pause_at": 4},
)


@cache
def cases():
    """Every loop in every mode, in placements that take turns: a name, and what makes its plan."""
    found = []
    modes_of = itertools.product(GRAPHS.items(), MODES, (None, "ray"))
    names = itertools.cycle(["three", *sorted(PLACEMENTS)])
    for (title, make), said, backend in modes_of:
        name = next(names)
        label = f"{title} {name} {said} {backend}"
        found.append((label, partial(compiled, make, name, said, backend)))
    return found


def compiled(make, name, said, backend):
    """The plan of a loop in a placement, with plenty of memory."""
    graph = make()
    mode = fitting(graph, PLACEMENTS[name]).model_copy(update=said)
    devices = cluster("cpu", mode.num_devices(), PLENTY)
    return compile_plan(graph, mode, devices, backend=backend, verified=False).plan


@cache
def plan_at(index):
    """The plan of a case; each chunk of the seeds is of other ones."""
    return cases()[index][1]()


class Gated(FakeBackend):
    """A fake backend whose gates reach what `reached` says of an action and an iteration."""

    def __init__(self, reached, **options):
        super().__init__(**options)
        self._reached = reached

    def submit(self, action, iteration, done):
        def told(completion):
            if ".gate" in str(action.node) and completion.error is None:
                number = float(self._reached(action, iteration))
                completion = replace(completion, metrics={"reached": number})
            done(completion)

        super().submit(action, iteration, told)


def random_reached(seed):
    """What trips reach, which follows from a seed: nothing, all of the goal, or part of it."""

    def reached(action, iteration):
        random = Random(f"{seed} {action.id} {iteration}")
        return action.trip.goal * random.choice([0.0, 0.25, 0.5, 0.5, 1.0, 1.5])

    return reached


def run(plan, seconds, reached, *, start=0, end, barrier, fails=(), right=None):
    """The monitor and the backend of a run; what it raises is raised.

    The monitor watches for the plan `right`, where that is another one.
    """
    backend = Gated(reached, seconds=seconds, fails=fails)
    monitor = Monitor(right or plan, start=start, end=end, barrier=barrier)
    executor = Executor(
        plan, backend, monitor, start=start, end=end, barrier=barrier, events=backend.events
    )
    try:
        executor.run()
    except FakeError:
        assert [] == backend.running
        return monitor, backend
    monitor.finish()
    return monitor, backend


def outcome(plan, monitor, start=0):
    """What was computed from which weights: each run with its iteration and versions."""
    kinds = {action.id: action.kind for action in plan.actions}
    return Counter(e for e in monitor.log if kinds[e[0]] == "run" and e[1] >= start)


def due(plan, reached, iteration):
    """The runs of loops that an iteration has to make, from what its trips reach alone."""
    found = Counter()
    for action in plan.actions:
        if action.kind != "run" or action.trip is None:
            continue
        if all(takes(plan, trip, reached, iteration) for trip in action.trip.levels):
            found[action.id] += 1
    return found


def takes(plan, trip, reached, iteration):
    """Whether a loop takes a trip, from what those before it reach."""
    gates = [a for a in plan.actions if a.trip and a.trip.gate and a.trip.loop == trip.loop]
    before = [a for a in gates if a.trip.index < trip.index]
    sums = [sum(reached(a, iteration) for a in before if a.trip.index <= k)
            for k in range(trip.index)]  # fmt: skip
    return all(total < trip.goal for total in sums)


def check(index, seed):
    """What a seed tries on a plan: what runs follows from the gates, not from who was faster."""
    random = Random(seed)
    plan = plan_at(index)
    end = random.randint(1, 5)
    barrier = random.randint(1, end + 1)
    reached = random_reached(seed)
    whole, _ = run(plan, random_seconds(seed), reached, end=end, barrier=barrier)
    ran = Counter((name, i) for name, i, _ in whole.log if plan.action(name).kind == "run")
    for iteration in range(end):
        for name, count in due(plan, reached, iteration).items():
            assert count == ran.pop((name, iteration)), f"{name} of {iteration}"
    trips = {action.id for action in plan.actions if action.trip is not None}
    assert not [name for name, _ in ran if name in trips], "a trip ran that was not due"
    other, _ = run(plan, random_seconds(-seed), reached, end=end, barrier=barrier)
    assert outcome(plan, whole) == outcome(plan, other)
    if seed % 5:
        return
    victim = random.choice(whole.log)[:2]
    seconds = random_seconds(seed)
    broken, backend = run(plan, seconds, reached, end=end, barrier=barrier, fails={victim})
    assert backend.failed
    done = broken.reported
    saved = min(done if done >= end else done // barrier * barrier, end)
    resumed, _ = run(plan, random_seconds(1 - seed), reached, start=saved, end=end, barrier=barrier)
    assert outcome(plan, whole, saved) == outcome(plan, resumed, saved)


@pytest.mark.rows(1)
@pytest.mark.parametrize("chunk", range(4))
def test_every_seed_keeps_the_invariants_and_runs_what_is_due(chunk):
    alone = os.environ.get("RLFLOW_SEED")
    seeds = [int(alone)] if alone else range(chunk, SEEDS, 4)
    for seed in seeds:
        index = seed % len(cases())
        try:
            check(index, seed)
        except (AssertionError, RuntimeError) as error:
            pytest.fail(
                f"seed {seed}, plan {cases()[index][0]}: {error}\n"
                f"  again: RLFLOW_SEED={seed} pytest tests/runtime/test_fake_loops.py",
                pytrace=False,
            )


def test_seeds_try_every_number_of_trips():
    """Of a loop with at most 3 trips: iterations that make 1, 2 and 3, and ones that exhaust it."""
    plan = plan_of("plain")
    gates = [a for a in plan.actions if a.trip is not None and a.trip.gate]
    made, short = Counter(), 0
    for seed in range(40):
        reached = random_reached(seed)
        made[sum(name.startswith("prompts") for name in due(plan, reached, 0))] += 1
        short += sum(reached(a, 0) for a in gates) < gates[0].trip.goal
    assert {1, 2, 3} == set(made)
    assert min(made.values()) >= 4
    assert short >= 2
    assert len(cases()) <= SEEDS


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(data=st.data(), graph=loops() | nests(), seed=st.integers(0, 999))
def test_plans_of_drawn_loops_keep_the_invariants(data, graph, seed):
    backend = data.draw(st.sampled_from([None, "ray"]))
    plan = compiled_with(graph, data.draw(modes(graph)), backend=backend).plan
    for shift in range(3):
        reached = random_reached(seed + shift)
        run(plan, random_seconds(seed + shift), reached, end=4, barrier=3)


def plan_of(title):
    return next(plan_at(at) for at, (name, _) in enumerate(cases()) if name.startswith(title))


def watched(right, wrong, reached):
    """Run a wrong plan under a monitor that knows the right one."""
    run(wrong, random_seconds(1), reached, end=2, barrier=3, right=right)


def whole_goal(action, iteration):
    return action.trip.goal


def test_the_monitor_sees_a_trip_that_runs_though_the_loop_is_over():
    """An action that does not know its trip is not left out."""
    plan = plan_of("plain")
    name = next(a.id for a in plan.actions if a.node == "prompts#2")
    with pytest.raises(AssertionError, match=r"prompts#2@0 starts, its loop is over"):
        watched(plan, with_action(plan, name, trip=None), whole_goal)


def test_the_monitor_sees_a_gate_that_does_not_count():
    plan = plan_of("plain")
    gate = plan.action("enough.gate")
    blind = with_action(plan, gate.id, trip=replace(gate.trip, gate=False))
    with pytest.raises(AssertionError, match=r"#2.*@0 starts, its loop is over"):
        watched(plan, blind, whole_goal)


def test_the_monitor_sees_a_trip_that_starts_before_it_is_known_to_run():
    plan = plan_of("plain")
    after = tuple(dep for dep in plan.action("prompts#2").after if dep.action != "enough.gate")
    with pytest.raises(AssertionError, match=r"prompts#2@0 starts before enough\.gate@0 is over"):
        watched(plan, with_action(plan, "prompts#2", after=after), whole_goal)


def test_the_last_trip_is_whole_though_its_gate_is_passed():
    """A gate says enough before slower work of its own trip has begun."""
    plan = plan_of("plain three")
    seconds = {"ref.log_probs": 50.0, "enough.gate": 0.0}

    def slow(action, iteration):
        return seconds.get(str(action.node).partition("#")[0], 1.0)

    monitor, _ = run(plan, slow, whole_goal, end=2, barrier=3)
    ran = Counter(name for name, _, _ in monitor.log)
    assert 2 == ran["ref.log_probs"] == ran["enough.gate"] == ran["enough"]
    assert not [name for name in ran if "#2" in name]
    when = [name for name, iteration, _ in monitor.log if iteration == 0]
    assert when.index("enough.gate") < when.index("ref.log_probs") < when.index("enough")
