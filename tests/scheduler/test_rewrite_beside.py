"""What a plan says of its rewards: beside which uses of models they run, and their slack."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.scheduler.passes.rewrite.overlap import rewards_beside
from rlflow.scheduler.plan.plan import HOST, Action, Chunk, Cost, Dep, Note, Reason, Timing
from tests.scheduler.examples import COLOCATE, SPLIT, compiled_with, ppo
from tests.scheduler.rewriting import before

DEVICES = {"gen": (0,), "train": (1,), "host": (HOST,)}


def action(name: str, pool: str, *after: str, seconds: float = 1.0, chunk: int = 0) -> Action:
    """A run; on a pool of devices it uses a model. `chunk` numbers one of two pieces."""
    last = [source for source in after if source.startswith("last ")]
    deps = [Dep(action=s, distance=0, kind="data") for s in after if s not in last]
    deps += [Dep(action=s.removeprefix("last "), distance=1, kind="device") for s in last]
    return Action(
        id=f"{name}[{chunk}/2]" if chunk else name,
        kind="run",
        reason=Reason(rule="drawn", text="here"),
        devices=DEVICES[pool],
        pool=pool,
        after=tuple(deps),
        node=name,
        instance=None if pool == "host" else f"model@{pool}",
        cost=Cost(seconds=seconds),
        chunk=Chunk(index=chunk - 1, count=2) if chunk else None,
    )


def noted(*actions: Action, slack: dict[str, float] | None = None) -> list[str]:
    """The notes on a plan of PPO's nodes with these actions."""
    plan, context = before(ppo(), COLOCATE)
    plan = replace(plan, actions=actions)
    if slack is not None:
        timing = Timing(
            resource_bound=1.0,
            recurrence_bound=1.0,
            period=1.0,
            busiest="gen[0]",
            binding="resource",
            slack=tuple(slack.items()),
        )
        plan = replace(plan, timing=timing)
    found = rewards_beside(plan, context)
    assert replace(found, notes=()) == replace(plan, notes=())
    return [note.text for note in found.notes if note.rule == "reward beside"]


DIAMOND = (
    action("actor.rollout", "gen"),
    action("ref.log_probs", "gen", "actor.rollout", seconds=2.0),
    action("critic.values", "train", "actor.rollout", seconds=3.0),
    action("reward", "host", "actor.rollout"),
    action("advantage", "host", "reward", "ref.log_probs", "critic.values"),
    action("actor.update", "train", "advantage"),
)


@pytest.mark.parametrize(
    ("slack", "text"),
    [
        (None, ""),
        ({}, ""),
        ({"reward": 0.25}, "; the period is the same if it ends 250.0 ms later"),
        ({"reward": 0.0}, "; it is on the critical path"),
    ],
)
def test_forwards_that_nothing_orders_are_beside_it(
    slack: dict[str, float] | None, text: str
) -> None:
    """The longest first; neither the rollout before it nor the update after it."""
    expected = "reward runs on the host beside critic.values and ref.log_probs"
    assert [expected + text] == noted(*DIAMOND, slack=slack)


def test_what_an_order_puts_before_or_after_it_is_not_beside_it() -> None:
    """A reward that is given a device of the rollout's takes turns there with the forward."""
    turns = [
        action("actor.rollout", "gen"),
        action("ref.log_probs", "gen", "actor.rollout"),
        replace(action("reward", "gen", "ref.log_probs"), instance=None),
        action("actor.update", "train", "reward", "last reward"),
    ]
    expected = "runs on gen with no use of a model beside it"
    assert [f"reward {expected}"] == noted(*turns)


def test_an_edge_to_the_next_turn_orders_nothing_in_this_one() -> None:
    beside = [
        action("reward", "host", "last actor.rollout"),
        action("actor.rollout", "gen", "last reward"),
    ]
    assert ["reward runs on the host beside actor.rollout"] == noted(*beside)


def test_a_reward_in_chunks_is_one_note_with_the_least_slack() -> None:
    r"""rollout[1] -> rollout[2], and a chunk of the reward behind each of them."""
    chunks = [
        action("actor.rollout", "gen", chunk=1),
        action("actor.rollout", "gen", "actor.rollout[1/2]", chunk=2),
        action("reward", "host", "actor.rollout[1/2]", chunk=1),
        action("reward", "host", "actor.rollout[2/2]", "reward[1/2]", chunk=2),
    ]
    slack = {"reward[1/2]": 2.0, "reward[2/2]": 1.5}
    expected = "beside actor.rollout; the period is the same if it ends 1.50 s later"
    assert [f"reward runs on the host {expected}"] == noted(*chunks, slack=slack)


@pytest.mark.parametrize("placement", [COLOCATE, SPLIT])
def test_a_reward_waits_for_its_rollout_alone(placement: rf.Placement) -> None:
    """In the plan, too, but for turns that are taken on the host."""
    if "critic" not in placement.assign:
        assign = {**placement.assign, "critic": next(iter(placement.assign.values()))}
        placement = rf.Placement(pools=placement.pools, assign=assign)
    plan = compiled_with(ppo(), placement).plan
    reward = plan.action("reward")

    assert ["actor.rollout"] == [dep.action for dep in reward.after if dep.kind != "device"]
    (text,) = [note.text for note in plan.notes if note.rule == "reward beside"]
    assert "reward runs on the host beside ref.log_probs and critic.values" in text


def test_notes_are_added_behind_those_there_are() -> None:
    plan, context = before(ppo(), COLOCATE)
    plan = replace(plan, actions=DIAMOND).noting("other", "before")
    assert Note(rule="other", text="before") == rewards_beside(plan, context).notes[0]
