"""Passes `order`, `chain` and `timing` on whole plans: turns, queues, bounds and slack."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlflow.errors import PlanError, UsageError
from rlflow.scheduler.passes.order import (
    chain,
    order,
    resources_of,
    seconds_of,
    timing,
)
from rlflow.scheduler.plan.plan import HOST, Action, Cost, Dep, Plan, Reason
from rlflow.scheduler.plan.text import device_name

WITHOUT = SimpleNamespace(optimize=0.0, rough=False)


def action(
    name: str,
    seconds: float | None,
    devices: tuple[int, ...],
    *after: tuple[str, int],
    **more: object,
) -> Action:
    return Action(
        id=name,
        kind="run",
        reason=Reason(rule="test", text="test"),
        devices=devices,
        pool="pool",
        after=tuple(Dep(action=other, distance=d, kind="order") for other, d in after),
        cost=Cost(seconds=seconds),
        **more,
    )


def plan_of(*actions: Action) -> Plan:
    return Plan(
        graph=None,
        placement="test",
        cluster="test",
        budgets={},
        backend="ray",
        staleness=0,
        pools={"gen": (0, 1), "train": (2, 3)},
        actions=actions,
    )


def stale(staleness: int) -> Plan:
    """rollout (4) -> update (3) -> reshard (0.5) -> rollout, 1 + k iterations later."""
    return plan_of(
        action("rollout", 4.0, (0, 1), ("reshard", 1 + staleness)),
        action("update", 3.0, (2, 3), ("rollout", 0), ("reshard", 1)),
        action("reshard", 0.5, (0, 1, 2, 3), ("update", 0), ("rollout", -staleness)),
    )


def scheduled(plan: Plan, context: object = WITHOUT) -> Plan:
    return timing(chain(order(plan, context), context), context)


@pytest.mark.parametrize(
    ("staleness", "period", "recurrence", "binding", "critical", "room"),
    [
        (0, 7.5, 7.5, "recurrence", {"rollout", "update", "reshard"}, 0.0),
        (1, 4.5, 4.5, "resource", {"rollout", "reshard"}, 1.0),
        (2, 4.5, 4.5, "resource", {"rollout", "reshard"}, 1.0),
    ],
)
def test_rollouts_run_ahead_by_the_staleness(
    staleness: int, period: float, recurrence: float, binding: str, critical: set[str], room: float
) -> None:
    """With k = 1 the rollout and the reshard, 4.5, are a cycle too: weights it still reads."""
    plan = scheduled(stale(staleness))
    found = plan.timing
    assert (period, 4.5, recurrence) == (found.period, found.resource_bound, found.recurrence_bound)
    assert ("gen[0]", binding, critical) == (found.busiest, found.binding, set(found.critical))
    assert {"rollout": 0.0, "update": room, "reshard": 0.0} == dict(found.slack)
    assert {"rollout": staleness, "update": 0, "reshard": 0} == {
        a.id: a.ahead for a in plan.actions
    }
    after = plan.action("reshard").after
    assert [0] == [d.distance for d in after if (d.action, d.kind) == ("rollout", "order")]


def test_latency_is_from_the_first_start_to_the_last_end() -> None:
    """rollout(i) 0-4, reshard(i-1) -4.5, update(i) -7.5, rollout(i+1) 4.5-8.5, reshard(i) -9."""
    assert 7.5 == scheduled(stale(0)).timing.latency
    assert 9.0 == scheduled(stale(1)).timing.latency


def test_an_action_every_few_turns_counts_its_share() -> None:
    assert 0.5 == seconds_of(action("eval", 2.0, (0,), every=4))
    assert 1.0 == seconds_of(action("eval", None, (0,)))
    plan = plan_of(action("rollout", 4.0, (0,)), action("eval", 2.0, (0,), every=4))
    assert 4.5 == scheduled(plan).timing.period


def test_unknown_seconds_leave_the_timing_open() -> None:
    plan = scheduled(plan_of(action("a", None, (0,)), action("b", 1.0, (0,), ("a", 0))))
    assert None is plan.timing
    assert ["a", "b"] == [a.id for a in plan.actions]


def test_copies_take_a_lane_of_their_own() -> None:
    sleep = replace(action("sleep", 6.0, (0,), ("a", 0)), kind="sleep")
    plan = scheduled(plan_of(action("a", 4.0, (0,)), sleep))
    assert (6.0, "gen[0] copies") == (plan.timing.period, plan.timing.busiest)
    assert [("a", 1, "device")] == [(d.action, d.distance, d.kind) for d in plan.action("a").after]


def test_an_action_that_waits_for_itself_is_refused() -> None:
    plan = plan_of(action("a", 1.0, (0,), ("b", 1)), action("b", 1.0, (0,), ("a", -1)))
    with pytest.raises(PlanError) as refused:
        order(plan, WITHOUT)
    assert ["E404"] == [finding.code for finding in refused.value.findings]


def test_devices_used_alike_are_one_queue() -> None:
    wide = tuple(range(1000))
    actions = (
        action("a", 1.0, wide),
        action("b", 1.0, wide[:600]),
        action("c", 1.0, wide[400:]),
        action("host", 1.0, (HOST,)),
    )
    compute = "compute"
    assert [
        ((0, compute), (400, compute), (600, compute)),
        ((0, compute), (400, compute)),
        ((400, compute), (600, compute)),
        ((HOST, compute),),
    ] == resources_of(actions)
    chained = chain(plan_of(*actions), WITHOUT)
    assert {
        "a": [("b", 1), ("c", 1)],
        "b": [("a", 0)],
        "c": [("b", 0), ("a", 0)],
        "host": [("host", 1)],
    } == {a.id: [(d.action, d.distance) for d in a.after] for a in chained.actions}


def test_an_exact_order_is_noted_with_its_proof() -> None:
    plan = order(stale(1), SimpleNamespace(optimize=5.0, rough=False))
    (note,) = plan.notes
    assert "optimised order" == note.rule
    assert "period 4.5 s, proven optimal" == note.text
    assert order(stale(1), WITHOUT).actions == plan.actions


def test_an_exact_order_without_its_solver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UsageError, match="E230"):
        order(stale(1), SimpleNamespace(optimize=5.0, rough=False))


def test_devices_are_printed_by_their_pools() -> None:
    plan = stale(0)
    assert ["host", "gen[1]", "train[2]", "device[7]"] == [
        device_name(plan, device) for device in (HOST, 1, 2, 7)
    ]
