"""Sleeps and wakes of plans: what waits for what, what runs beside them, what they say."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlflow.errors import PlanError
from rlflow.scheduler.passes.order import chain, timing
from rlflow.scheduler.passes.residency import residency
from rlflow.scheduler.plan.plan import HOST, Action, Cost, Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.memory import memory_fits
from rlflow.scheduler.verify.sleep_wake import moves_are_needed
from rlflow.scheduler.verify.time import devices_take_turns, list_is_an_order, time_adds_up
from tests.budget import examples
from tests.scheduler.examples import EXAMPLES
from tests.scheduler.mutants import asleep_everywhere
from tests.scheduler.paged import (
    CONTEXT,
    action,
    dep,
    line,
    most_held,
    part,
    plan_of,
    planned,
    random_plan,
)

RULES = (list_is_an_order, memory_fits, moves_are_needed, devices_take_turns)
seeds = st.integers(0, 10**6)


def broken(plan: Plan) -> list[str]:
    facts = Facts(plan=plan)
    return [text for rule in RULES for text in rule(facts)]


def moves(plan: Plan) -> list[str]:
    return [a.id for a in plan.actions if a.part is not None]


def waits(a: Action) -> set[tuple[str, int]]:
    return {(d.action, d.distance) for d in a.after if d.kind == "order"}


def test_a_part_stays_where_another_one_makes_the_room() -> None:
    """Both devices are short of memory: `a` makes room on 0, and on 1 nothing but `b` can."""
    actions = [
        action("one", 0, 1, needs=("a",)),
        action("two", 0, after=(dep("one"),), cost=Cost(seconds=1.0, transient=25)),
        action("three", 1, after=(dep("one"),), cost=Cost(seconds=1.0, transient=20)),
        action("four", 1, needs=("b",), after=(dep("three"),)),
    ]
    plan = planned(plan_of({0: 30, 1: 35}, [part("a", 10, 0, 1), part("b", 20, 1)], actions))
    assert ((0,), (1,)) == (plan.part("a").leaves, plan.part("a").stays)
    assert {"a": {(0,)}, "b": {(1,)}} == {
        name: {a.devices for a in plan.actions if a.part == name} for name in ("a", "b")
    }
    assert {HOST: 20 + 10, 0: 25, 1: 30} == plan.peaks
    assert [] == broken(plan)
    wrong = asleep_everywhere(plan, plan.part("a"))
    assert "a sleeps on [1], where it would have fitted" in broken(wrong)


def test_what_fits_does_not_sleep() -> None:
    plan = planned(line(50))
    assert [] == moves(plan)
    assert ("a", "b") == plan.awake_at_start
    assert {HOST: 0, 0: 50} == plan.peaks
    assert [40, 40, 50, 40] == [a.peak for a in plan.actions]


def test_copies_run_beside_the_actions_that_leave_room() -> None:
    """49 bytes hold all but `three` beside `a`: `a` leaves during `two`, returns during `four`."""
    plan = planned(line(49))
    assert ["sleep:a", "wake:a"] == moves(plan)
    sleep, wake = plan.action("sleep:a"), plan.action("wake:a")
    assert {("one", 0)} == waits(sleep)
    assert {("three", 0)} == waits(wake)
    assert {("two", 0), ("sleep:a", 0)} == waits(plan.action("three"))
    assert ("wake:a", 1) in waits(plan.action("one"))
    assert "makes room for three; farthest next use; leaves while two runs" == sleep.reason.text
    assert "needed by one; returns while four runs" == wake.reason.text
    assert {HOST: 20, 0: 40} == plan.peaks
    assert 40 == wake.peak
    timed = timing(plan, CONTEXT)
    assert timed.timing is not None
    assert pytest.approx(5.0) == timed.timing.period
    assert [] == [*broken(plan), *time_adds_up(Facts(plan=timed))]


def test_copies_that_have_nothing_to_run_beside_are_waited_for() -> None:
    """With 39 bytes `a` and `b` never meet: one leaves before the other may come."""
    plan = timing(planned(line(39)), CONTEXT)
    assert {"sleep:a", "wake:a", "sleep:b", "wake:b"} == set(moves(plan))
    assert plan.timing is not None
    assert plan.timing.period > 5.5
    assert [] == broken(plan)


def test_a_copy_lane_is_a_device_of_its_own() -> None:
    plan = planned(line(49))
    beside = [d.action for d in plan.action("two").after if d.kind == "device"]
    assert [] == [name for name in beside if name.startswith(("sleep", "wake"))]
    assert [] == list(devices_take_turns(Facts(plan=plan)))


def test_what_stays_of_a_sleeping_part_takes_room() -> None:
    """Of `a` 5 bytes stay: `three` holds 35 while it sleeps, and 15 bytes are in the host."""
    plan = line(49)
    left = planned(replace(plan, parts=(part("a", 20, 0, residual=5), part("b", 20, 0))))
    assert 35 == left.action("three").peak
    assert 15 == left.peaks[HOST]
    assert [] == broken(left)


def test_a_host_without_room_for_what_sleeps_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        planned(line(49, host=19))
    (finding,) = refused.value.findings
    assert "E405" == finding.code
    what = "what sleeps or is kept does not fit in the memory of a host, during 'sleep:a'"
    assert what == finding.what
    assert "20 B at once:\n20 B a" == finding.got


def test_hosts_are_counted_apart() -> None:
    """Two devices of two hosts: each holds the 20 bytes of its own device; one host both."""
    actions = [
        action("one", 0, 1, needs=("a",)),
        action("two", 0, 1, cost=Cost(seconds=1.0, transient=30), after=(dep("one"),)),
    ]
    for hosts, held in ((1, 40), (2, 20)):
        plan = planned(plan_of(40, [part("a", 20, 0, 1)], actions, hosts=hosts))
        assert held == plan.peaks[HOST]
        assert [] == broken(plan)


def test_devices_have_budgets_of_their_own() -> None:
    actions = [action("one", 0, 1, needs=("a",)), action("two", 0, 1, after=(dep("one"),))]
    actions[1] = replace(actions[1], cost=Cost(seconds=1.0, transient=30))
    roomy = planned(plan_of({0: 60, 1: 60}, [part("a", 20, 0, 1)], actions))
    mixed = planned(plan_of({0: 60, 1: 40}, [part("a", 20, 0, 1)], actions))
    assert [] == moves(roomy)
    assert ["sleep:a", "wake:a"] == moves(mixed)


def test_too_large_an_action_is_refused_with_what_it_holds() -> None:
    plan = line(29)
    pieces = (("activations", 3), ("logits", 6))
    actions = list(plan.actions)
    actions[2] = replace(actions[2], cost=Cost(seconds=1.0, transient=10, holds=pieces))
    with pytest.raises(PlanError) as refused:
        planned(replace(plan, actions=tuple(actions)))
    (finding,) = refused.value.findings
    assert ("E401", "action 'three' does not fit on p[0]") == (finding.code, finding.what)
    assert (
        "30 B at once while three runs:\n20 B b\n6 B logits\n3 B activations\n1 B otherwise"
        == finding.got
    )


def test_gradients_are_discarded_and_optimizers_are_not() -> None:
    plan = line(39)
    parts = (part("a", 20, 0, kind="gradients"), part("b", 20, 0, kind="optimizer"))
    modes = {a.part: a.mode for a in planned(replace(plan, parts=parts)).actions if a.part}
    assert {"a": "discard", "b": "offload"} == modes
    assert 20 == planned(replace(plan, parts=parts)).peaks[HOST]


def test_a_part_that_nobody_uses_is_never_awake() -> None:
    plan = line(50)
    more = planned(replace(plan, parts=(*plan.parts[:1], part("b", 20, 0))))
    idle = plan_of(50, [part("a", 20, 0), part("idle", 20, 0)], [action("one", 0, needs=("a",))])
    assert ("a", "b") == more.awake_at_start
    found = planned(idle)
    assert (("a",), {HOST: 20, 0: 20}) == (found.awake_at_start, found.peaks)
    assert [] == broken(found)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(seed=seeds)
def test_a_plan_is_the_same_each_time_and_holds_in_every_interleaving(seed: int) -> None:
    """Rules are silent, and no device holds more than its peak says in any order tried."""
    plan = planned(random_plan(seed))
    assert plan == planned(random_plan(seed))
    assert [] == broken(plan)
    for turn in range(3):
        most, wrong = most_held(plan, turn)
        assert [] == wrong
        assert all(size <= min(plan.peaks[d], plan.budget(d)) for d, size in most.items())


def test_nothing_sleeps_for_room_that_a_copy_has_left_already() -> None:
    """Copies take turns: one is over earlier than its own place says, and gradients fit there."""
    held = [
        part("m0", 15, 0, kind="gradients"),
        part("m2", 6, 0, kind="gradients", residual=1),
        part("m3", 15, 0),
        part("m4", 6, 0),
    ]
    actions = [
        action("a0", 0, cost=Cost(seconds=1.0, transient=5)),
        action("a1", 0, needs=("m0",), cost=Cost(seconds=0.1)),
        action("a2", 0, cost=Cost(seconds=1.0, transient=9)),
        action("a4", 0, needs=("m3", "m2")),
        action("a5", 0, needs=("m0", "m4"), cost=Cost(seconds=1.0, transient=9)),
    ]
    assert [] == broken(planned(plan_of(41, held, actions)))


@settings(max_examples=examples(40))
@given(seed=seeds)
def test_moves_take_no_time_where_copies_take_none(seed: int) -> None:
    """Dependencies and lanes of moves alone do not slow a plan down on one device."""
    plan = random_plan(seed, devices=1)
    bare = timing(chain(plan, CONTEXT), CONTEXT)
    moved = residency(plan, CONTEXT)
    free = [replace(a, cost=Cost(seconds=0.0)) if a.part else a for a in moved.actions]
    timed = timing(chain(replace(moved, actions=tuple(free)), CONTEXT), CONTEXT)
    assert timed.timing is not None
    assert bare.timing is not None
    assert pytest.approx(bare.timing.period) == timed.timing.period


@pytest.mark.parametrize("name", ["grpo_pressure", "ppo_pressure"])
def test_examples_say_why_parts_move(name: str) -> None:
    plan = EXAMPLES[name]().plan
    texts = [a.reason.text for a in plan.actions if a.part is not None]
    assert texts
    assert all(text.startswith(("makes room for ", "needed by ")) for text in texts)
    assert any("sleeps and wakes move " in note.text for note in plan.notes)
