"""Order and residency by the solver against every start of every action and copy."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.scheduler.passes.order import chain, order, timing
from rlflow.scheduler.passes.residency import residency
from rlflow.scheduler.plan.plan import Cost, Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.memory import memory_fits
from rlflow.scheduler.verify.sleep_wake import moves_are_needed
from rlflow.scheduler.verify.time import devices_take_turns, list_is_an_order
from tests.budget import examples
from tests.scheduler.clockwork import Clock
from tests.scheduler.paged import CONTEXT, action, dep, part, plan_of, random_plan

pytest.importorskip("ortools")

SOLVED = SimpleNamespace(
    optimize=60.0,
    rough=False,
    costs=SimpleNamespace(
        copy=lambda moved, devices, kind: Cost(seconds=moved / len(devices), moved=moved)
    ),
)
RULES = (memory_fits, moves_are_needed, devices_take_turns, list_is_an_order)
seeds = st.integers(0, 10**6)


def tiny(seed: int) -> Plan:
    """Two or three actions and two parts, of which one may be thrown away, with little memory."""
    random = Random(seed)
    count = random.choice((1, 1, 2))
    parts = [
        part(
            f"p{n}",
            random.choice((1, 2)),
            random.randrange(count),
            kind=random.choice(("weights", "weights", "gradients")),
        )
        for n in range(2)
    ]
    actions = []
    for n in range(random.choice((2, 3, 3))):
        needs = random.sample(parts, random.choice((0, 1, 1)))
        devices = {d for p in needs for d in p.devices} or {random.randrange(count)}
        after = [dep(f"a{m}") for m in range(n) if random.random() < 0.4]
        actions.append(
            action(
                f"a{n}",
                *sorted(devices | ({0} if random.random() < 0.2 else set())),
                needs=tuple(p.name for p in needs),
                after=tuple(after),
                cost=Cost(seconds=float(random.choice((1, 1, 2))), transient=random.choice((0, 1))),
            )
        )
    back = dep(actions[-1].id, random.choice((1, 1, 2)))
    actions[0] = replace(actions[0], after=(*actions[0].after, back))
    budgets = {}
    for device in range(count):
        here = {p.name: p.size or 0 for p in parts if device in p.devices}
        alone = [
            sum(here.get(name, 0) for name in a.needs) + (a.cost.transient or 0)
            for a in actions
            if device in a.devices
        ]
        budgets[device] = max([*alone, *([max(here.values())] if here else [1])])
        budgets[device] += random.choice((0, 0, 1))
    return plan_of(budgets, parts, actions)


def planned(plan: Plan, context: SimpleNamespace = SOLVED) -> Plan:
    plan = timing(chain(residency(order(plan, context), context), context), context)
    assert [] == [text for rule in RULES for text in rule(Facts(plan=plan))]
    return plan


@settings(max_examples=examples(20))
@given(seed=seeds)
def test_the_solver_finds_what_trying_every_start_finds(seed: int) -> None:
    plan = tiny(seed)
    made = planned(plan)
    assert made.timing is not None
    turn = math.ceil(made.timing.period - 1e-3)
    fewest = Clock(plan, turn).fewest()
    assert fewest is not None
    assert turn == 1 or Clock(plan, turn - 1).fewest() is None
    if made.timing.period > turn - 1e-3:
        assert fewest == sum(a.cost.moved or 0 for a in made.actions if a.part is not None)


@pytest.mark.slow
@settings(max_examples=examples(10))
@given(seed=seeds)
def test_the_solver_takes_no_longer_than_the_search(seed: int) -> None:
    plan = random_plan(seed, length=7)
    solved = SimpleNamespace(**{**vars(CONTEXT), "optimize": 2.0})
    found, best = planned(plan, CONTEXT).timing, planned(plan, solved).timing
    assert found is not None
    assert best is not None
    assert best.period <= found.period * (1 + 2e-5)
