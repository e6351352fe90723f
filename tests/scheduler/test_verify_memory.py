"""The memory rules against plans that are wrong in one place, and against what plays out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from rlflow.scheduler.passes.order import chain, timing
from rlflow.scheduler.plan.plan import HOST, Action, Cost, Dep, Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.memory import memory_fits
from rlflow.scheduler.verify.sleep_wake import moves_are_needed
from rlflow.scheduler.verify.time import devices_take_turns, list_is_an_order, time_adds_up
from tests.budget import examples
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
    without,
)

Mutant = tuple[str, Plan]


def broken(plan: Plan) -> list[str]:
    facts = Facts(plan=plan)
    wrong = list(list_is_an_order(facts))
    rules = (memory_fits, moves_are_needed, devices_take_turns)
    return wrong or [text for rule in rules for text in rule(facts)]


def changed(plan: Plan, name: str, **fields: object) -> Plan:
    actions = tuple(replace(a, **fields) if a.id == name else a for a in plan.actions)
    return replace(plan, actions=actions)


def pressed() -> Plan:
    """Three parts of which two fit, and a long action in the middle that leaves room for one.

    one (a, b) -> two -> three (c, 10 bytes of its own) -> four (b) -> five
    """
    actions = [
        action("one", 0, needs=("a", "b")),
        action("two", 0, after=(dep("one"),)),
        action("three", 0, needs=("c",), after=(dep("two"),), cost=Cost(seconds=3.0, transient=10)),
        action("four", 0, needs=("b",), after=(dep("three"),)),
        action("five", 0, after=(dep("four"),)),
    ]
    parts = [part("a", 20, 0), part("b", 16, 0, kind="optimizer"), part("c", 20, 0)]
    return planned(plan_of(46, parts, actions))


def mutants(plan: Plan) -> Iterator[Mutant]:
    """Moves dropped, moved and of another mode; dependencies of moves dropped; figures changed."""
    for a in plan.actions:
        if a.part is not None:
            yield f"no {a.id}", without(plan, a.id)
            other = "offload" if a.mode == "discard" else "discard"
            yield f"{a.id} {other}", changed(plan, a.id, mode=other)
            yield from listed_elsewhere(plan, a)
        for d in a.after:
            if a.part is not None or plan.action(d.action).part is not None:
                after = tuple(e for e in a.after if e != d)
                mutant = changed(plan, a.id, after=after)
                if Facts(plan=mutant).unrolled.past != Facts(plan=plan).unrolled.past:
                    yield f"{a.id} not after {d.action} @{d.distance}", mutant
        if a.peak:
            yield f"peak of {a.id}", changed(plan, a.id, peak=a.peak - 1)
    for device, peak in plan.peaks.items():
        if peak:
            yield f"{device} too small", replace(plan, budgets={**plan.budgets, device: peak - 1})
            yield f"peak of {device}", replace(plan, peaks={**plan.peaks, device: peak - 1})
    for held in plan.parts:
        awake = set(plan.awake_at_start) ^ {held.name}
        yield f"{held.name} the other way at the start", replace(plan, awake_at_start=tuple(awake))


def listed_elsewhere(plan: Plan, a: Action) -> Iterator[Mutant]:
    """A move at every other place of the list, its lane chained as that says."""
    bare = [replace(b, after=tuple(d for d in b.after if d.kind != "device")) for b in plan.actions]
    at = plan.actions.index(a)
    rest = [*bare[:at], *bare[at + 1 :]]
    for place in range(len(bare)):
        if place != at:
            actions = (*rest[:place], bare[at], *rest[place:])
            moved = chain(replace(plan, actions=actions), CONTEXT)
            if {b.id: set(b.after) for b in moved.actions} != {
                b.id: set(b.after) for b in plan.actions
            }:
                yield f"{a.id} at {place}", moved


def test_the_plan_itself_is_accepted() -> None:
    plan = pressed()
    assert [] == broken(plan)
    assert {"sleep", "wake"} <= {a.kind for a in plan.actions}
    assert len(list(mutants(plan))) > 40


def test_mutants_are_rejected() -> None:
    accepted = [name for name, plan in mutants(pressed()) if not broken(plan)]
    assert [] == accepted


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10**6), pick=st.integers(0, 10**6))
@example(seed=5933, pick=5774)
def test_what_is_accepted_plays_within_its_budgets(seed: int, pick: int) -> None:
    """A mutant is rejected, or no order that was tried shows anything wrong with it."""
    every = list(mutants(planned(random_plan(seed))))
    if not every:
        return
    name, plan = every[pick % len(every)]
    if not broken(plan):
        for turn in range(6):
            most, wrong = most_held(plan, turn)
            assert [] == wrong, name
            assert all(size <= plan.budget(d) for d, size in most.items()), name


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: without(p, "wake:a"), "sleep:a: a is asleep already"),
        (lambda p: without(p, "sleep:a"), "wake:a: a is awake already"),
        (lambda p: replace(p, awake_at_start=()), "sleep:a: a is asleep already"),
        (lambda p: replace(p, budgets={HOST: 10**9, 0: 40}), "bytes on device 0, the budget is 40"),
        (lambda p: replace(p, budgets={**p.budgets, HOST: 1}), "a host holds"),
        (lambda p: changed(p, "one", peak=1), "one states a peak of 1 bytes, it is"),
        (lambda p: changed(p, "sleep:a", mode="discard"), "is marked discard, and one is next"),
        (lambda p: replace(p, budgets={**p.budgets, 0: 10**6}), "is useless: a would have fitted"),
        (lambda p: changed(p, "one", needs=("b",)), "is useless: nobody needs a before"),
        (lambda p: changed(p, "two", needs=("a",)), "two needs a, which is asleep or may be"),
    ],
)  # fmt: skip
def test_a_sentence_names_the_move_and_the_figure(change, says) -> None:
    assert says in "\n".join(broken(change(pressed())))


def test_a_wake_that_may_start_early_is_seen() -> None:
    """Without its wait for `three`, `a` may be back while `three` runs."""
    plan = planned(line(49))
    wake = plan.action("wake:a")
    early = changed(plan, "wake:a", after=tuple(d for d in wake.after if d.kind == "device"))
    assert any("three holds" in text for text in broken(early))


def test_lanes_of_a_device_are_told_apart() -> None:
    """Two copies may not run at once; a copy and an action may."""
    plan = pressed()
    free = [replace(a, after=tuple(d for d in a.after if d.kind != "device")) for a in plan.actions]
    texts = list(devices_take_turns(Facts(plan=replace(plan, actions=tuple(free)))))
    assert any("device 0's copies at the same time" in text for text in texts)


def loop() -> Plan:
    """one -> two -> one of the next turn, with a period of 3 s."""
    actions = [
        action("one", 0, after=(dep("two", 1),)),
        action("two", 1, after=(dep("one"),), cost=Cost(seconds=2.0)),
    ]
    return timing(chain(plan_of(10, [], actions), CONTEXT), CONTEXT)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"period": 2.5}, "a cycle takes longer than the period of 2.5 s"),
        ({"period": 4.0}, "the critical cycle takes 3 s a turn, the period is 4 s"),
        ({"period": 1.0}, "below its bounds"),
        ({"critical": ()}, "nothing is no cycle"),
        ({"critical": ("one",)}, "the critical cycle takes 1 s a turn"),
        ({"critical": ("gone",)}, "timing names gone"),
        ({"slack": (("one", 1.0), ("two", 0.0))}, "one is critical and has 1 s of slack"),
        ({"slack": (("one", -1.0),)}, "one has -1 s of slack"),
        ({"binding": "order"}, "the order is said to bind"),
        ({"latency": 1.0}, "an iteration takes 1 s, one of its runs 2 s"),
    ],
)
def test_times_that_do_not_add_up_are_seen(fields: dict[str, object], says: str) -> None:
    plan = loop()
    assert plan.timing is not None
    assert [] == list(time_adds_up(Facts(plan=plan)))
    wrong = replace(plan, timing=replace(plan.timing, **fields))
    assert says in "\n".join(time_adds_up(Facts(plan=wrong)))


def test_a_cycle_made_longer_is_seen() -> None:
    plan = loop()
    slow = changed(plan, "two", cost=Cost(seconds=5.0))
    assert any("longer than the period" in text for text in time_adds_up(Facts(plan=slow)))
    waiting = (*plan.action("one").after, Dep(action="one", distance=1, kind="order"))
    assert [] == list(time_adds_up(Facts(plan=changed(plan, "one", after=waiting))))
