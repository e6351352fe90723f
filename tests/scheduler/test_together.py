"""Order and residency decided together: no bytes move that another order spares."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.errors import PlanError
from rlflow.scheduler.memory.demand import _cheapest, _enough, demand_of
from rlflow.scheduler.memory.judge import Judge
from rlflow.scheduler.memory.profile import Memories
from rlflow.scheduler.passes.order import chain, order, periodic_problem, timing
from rlflow.scheduler.passes.order_and_residency import Decided, copies_of, joint_orders
from rlflow.scheduler.passes.residency import _paged, residency
from rlflow.scheduler.periodic.problem import Kernel
from rlflow.scheduler.plan.plan import HOST, Cost, Plan
from tests.budget import examples
from tests.scheduler.paged import CONTEXT, action, dep, part, plan_of, random_plan

seeds = st.integers(0, 10**6)
ORDERING = SimpleNamespace(optimize=0.0, rough=False)
CLOSE = 1 + 1e-6


def reshard_first() -> Plan:
    """A reshard fills the rollout's weights before the critic's update, which needs their room."""
    actions = [
        action("rollout", 0, needs=("sampler",), after=(dep("reshard", 1),)),
        action("update", 0, needs=("actor",), after=(dep("rollout"),)),
        action(
            "reshard", 0, needs=("actor", "sampler"), targets=("sampler",), after=(dep("update"),)
        ),
        action(
            "critic.update",
            0,
            needs=("critic",),
            after=(dep("rollout"),),
            cost=Cost(seconds=1.0, transient=15),
        ),
    ]
    return plan_of(
        50, [part("sampler", 20, 0), part("actor", 10, 0), part("critic", 20, 0)], actions
    )


def period(plan: Plan) -> float:
    found = timing(chain(plan, CONTEXT), CONTEXT).timing
    assert found is not None
    return found.period


def moved(plan: Plan) -> int:
    return sum(a.cost.moved or 0 for a in plan.actions if a.part is not None)


def test_a_reshard_waits_for_the_update_that_needs_the_room_of_what_it_fills() -> None:
    plan = residency(reshard_first(), CONTEXT)
    assert [a.id for a in plan.actions if a.part is None] == [
        "rollout",
        "update",
        "critic.update",
        "reshard",
    ]
    assert (0, 4.0) == (moved(plan), pytest.approx(period(plan)))
    assert not any(note.rule == "residency" for note in plan.notes)


def test_the_note_says_of_what_the_bytes_are_the_fewest() -> None:
    """Two parts that never fit together move in any order."""
    actions = [action("one", 0, needs=("a",)), action("two", 0, needs=("b",))]
    plan = residency(plan_of(20, [part("a", 20, 0), part("b", 20, 0)], actions), CONTEXT)
    (note,) = (note.text for note in plan.notes if note.rule == "residency")
    assert note == "sleeps and wakes move 80 B an iteration, the fewest for this order"
    alone = [action("one", 0, needs=("a",)), action("two", 0, cost=Cost(seconds=1.0, transient=15))]
    plan = residency(plan_of(20, [part("a", 20, 0)], alone), CONTEXT)
    (note,) = (note.text for note in plan.notes if note.rule == "residency")
    assert note.endswith("40 B an iteration, the fewest that memory allows in any order")


@settings(max_examples=examples(20))
@given(
    parts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8),
    share=st.floats(0.01, 1),
    sums=st.sampled_from([3, 5, 200]),
)
def test_the_fewest_bytes_are_those_of_the_best_of_all_choices_or_a_bound_below(
    parts: list[tuple[int, int]], share: float, sums: int
) -> None:
    need = max(round(share * sum(size for size, _ in parts)), 1)
    choices = (c for n in range(1, len(parts) + 1) for c in combinations(parts, n))
    freeing = [c for c in choices if sum(size for size, _ in c) >= need]
    best = min(sum(moved for _, moved in c) for c in freeing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlflow.scheduler.memory.demand.SUMS", sums)
        found = _cheapest(need, parts)
    told_apart = sums > sum(size for size, _ in parts)
    assert best == found if told_apart else 0 <= found <= best
    assert best <= _enough(need, parts)


@settings(max_examples=examples(20))
@given(seed=seeds)
def test_a_plan_is_as_it_was_judged_and_no_worse_than_the_order_before(seed: int) -> None:
    """Not longer than judged, nor than the first order; as long only with no more bytes moved."""
    plan = order(random_plan(seed), ORDERING)
    made, kept = residency(plan, CONTEXT), _paged(Decided(plan=plan), CONTEXT)[0]
    demand = demand_of(plan, Memories(plan=plan))
    decided = joint_orders(plan, CONTEXT, demand)[0]
    changed, away = decided.plan, decided.away
    names = [(held.part.name, action.id) for held in demand.held for action in plan.actions]
    assert away <= set(names)
    judge = Judge(periodic_problem(changed), demand_of(changed, Memories(plan=changed)), (), 1)
    judge.copies = copies_of(changed, CONTEXT, judge.demand)
    place = {action.id: number for number, action in enumerate(changed.actions)}
    held = {h.part.name: number for number, h in enumerate(judge.demand.held)}
    count = len(place)
    kernel = Kernel(order=tuple(range(count)), ahead=(0,) * count)
    found = judge.judged(kernel, frozenset((held[name], place[since]) for name, since in away))
    assert period(made) <= found.period * CLOSE
    assert period(made) <= period(kept) * CLOSE
    if period(made) >= period(kept) / CLOSE:
        assert moved(made) <= moved(kept)


@pytest.mark.rows(1)
@pytest.mark.parametrize("seed", [51, 213, 616])
def test_the_order_stays_where_a_host_has_room_for_its_sleeps_alone(seed: int) -> None:
    """Where a shorter order keeps more on the host than that has, and in no case E405."""
    plan = order(random_plan(seed, devices=2, length=7), ORDERING)
    alone = _paged(Decided(plan=plan), CONTEXT)[1].host_peak[0]
    free = residency(plan, CONTEXT)
    assert alone < free.peaks[HOST]
    short = replace(plan, budgets={**plan.budgets, HOST: alone})
    made = residency(short, CONTEXT)
    assert [a.id for a in plan.actions] == [a.id for a in made.actions if a.part is None]
    assert alone == made.peaks[HOST]
    (told,) = (note.text for note in made.notes if note.rule == "host memory")
    assert told == (
        f"a shorter order with its copies takes {free.peaks[HOST]} B of a host's memory, which "
        f"has {alone} B"
    )
    with pytest.raises(PlanError) as refused:
        residency(replace(plan, budgets={**plan.budgets, HOST: alone - 1}), CONTEXT)
    assert refused.value.findings[0].got.startswith(f"{alone} B at once:")
