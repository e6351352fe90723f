"""The oracle sees what is wrong with rows, caches and versions, each in a plan that is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlflow.scheduler.plan.plan import Action, Dep, Plan, Reason
from tests.scheduler import test_engine_plans
from tests.scheduler.examples import EXAMPLES
from tests.scheduler.mutants import with_action, without_action
from tests.scheduler.player import play


def sleeping_between(plan: Plan, first: str, second: str) -> Plan:
    """The plan with an engine's cache asleep after a piece of its rollout, awake for the next."""
    part = next(part for part in plan.parts if part.kind == "pool")
    sleep = Action(
        id="sleep",
        kind="sleep",
        reason=Reason(rule="test", text="a test"),
        devices=part.devices,
        pool=plan.action(first).pool,
        instance=part.instance,
        part=part.name,
        mode="discard",
        after=(Dep(action=first, distance=0, kind="order"),),
    )
    again = (Dep(action="sleep", distance=0, kind="order"),)
    wake = replace(sleep, id="wake", kind="wake", after=again)
    after = (*plan.action(second).after, Dep(action="wake", distance=0, kind="order"))
    return with_action(replace(plan, actions=(*plan.actions, sleep, wake)), second, after=after)


def wrong() -> dict[str, tuple[Plan, str]]:
    """Plans with one thing wrong, and what is said of each."""
    rows, paused = EXAMPLES["ray_split"]().plan, EXAMPLES["grpo_paused"]().plan
    pieces = test_engine_plans.EXAMPLES["streamed"]().plan
    first, second = (action.id for action in pieces.actions if action.ends_first)
    carries = "transfer:advantage->train"
    return {
        "a field is left behind": (with_action(rows, carries, fields=()), "lacks advantages of"),
        "nobody carries rows": (without_action(rows, carries), "lacks advantages of advantage@0"),
        "a cache is thrown away between two pieces": (
            sleeping_between(pieces, first, second),
            "the cache of actor@gen/sglang was given away",
        ),
        "a resumed rollout has an update too many": (
            replace(paused, staleness=paused.staleness + 1),
            r"resumed@\d goes on with 1 after 0, not 0",
        ),
        "an update is due less often than its node": (
            with_action(paused, "actor.update", every=2),
            "reads version 1 of actor@train, not 2",
        ),
    }


@pytest.mark.parametrize("what", wrong())
def test_the_oracle_names_what_is_wrong(what: str) -> None:
    plan, says = wrong()[what]
    found = [told for seed in range(6) for told in play(plan, seed)]
    with pytest.raises(AssertionError, match=says):
        raise AssertionError("; ".join(found))
