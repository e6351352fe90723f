"""Plans played on a virtual clock: periods and causes of idle time, worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from rlflow.errors import PlanError
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.simulate.play import play
from rlflow.scheduler.simulate.simulate import hyperperiod, play_plan
from rlflow.scheduler.simulate.text import simulation_text, typical_turn
from tests.runtime.kernels import action, lagging, plan_of, sleeping
from tests.scheduler.examples import EXAMPLES, SPLIT, compiled_with, grpo
from tests.scheduler.strategies import Case

MOVING = ("run", "transfer")
TWO = {"train": (0,), "gen": (1,)}


def synchronous(**options):
    """Rollout 3 s on one device, update 4 s on the other, 1 s for both: one after another."""
    return plan_of(
        action("roll", (1,), ("sync", 1), seconds=3.0),
        action("update", (0,), ("roll", 0), seconds=4.0),
        action("sync", (0, 1), ("update", 0), seconds=1.0),
        pools=TWO,
        **options,
    )


def planned(case: Case) -> Plan | None:
    """The plan of a case, None where it is refused."""
    try:
        return case.compile().plan
    except PlanError:
        return None


def shares(found):
    return {use.label: dict(use.waits) for use in found.uses}


def test_a_chain_around_two_devices_has_the_period_of_its_sum():
    found = play_plan(synchronous())
    assert found.exact
    assert 8.0 == pytest.approx(found.period)
    assert 8.0 == pytest.approx(found.latency)
    busy = {use.label: use.busy for use in found.uses}
    assert {"train[0]": pytest.approx(5 / 8), "gen[1]": pytest.approx(4 / 8)} == busy
    assert {"roll": pytest.approx(3 / 8)} == shares(found)["train[0]"]
    assert {"update": pytest.approx(4 / 8)} == shares(found)["gen[1]"]
    assert (3 + 4) / 16 == pytest.approx(found.idle)


def test_idle_time_is_followed_back_to_all_that_it_waited_for():
    plan = plan_of(
        action("roll", (1,), ("update", 1), seconds=2.0),
        action("reward", (-1,), ("roll", 0), seconds=3.0),
        action("update", (0,), ("reward", 0), seconds=5.0),
        pools=TWO,
    )
    found = play_plan(plan)
    assert 10.0 == pytest.approx(found.period)
    expected = {"update": pytest.approx(0.5), "reward": pytest.approx(0.3)}
    assert expected == shares(found)["gen[1]"]
    assert ["train[0]", "gen[1]", "host"] == [use.label for use in found.uses]


def test_what_runs_every_third_time_counts_where_it_falls():
    """The evaluation delays the rollout after it by 2 s, so a period is 8 + 2/3 s."""
    base = synchronous()
    roll = replace(base.action("roll"), after=(*base.action("roll").after,))
    look = action("eval", (1,), ("sync", 1), seconds=2.0, every=3)
    actions = (look, *action_after(roll, "eval"), *base.actions[1:])
    found = play_plan(replace(base, actions=actions))
    assert found.exact
    assert 3 == hyperperiod(found.plan)
    assert 8 + 2 / 3 == pytest.approx(found.period)
    due = [span.iteration for span in found.spans if span.action.id == "eval"]
    assert list(range(0, found.iterations, 3)) == due


def action_after(roll, name):
    dep = replace(roll.after[0], action=name, distance=0)
    return (replace(roll, after=(*roll.after, dep)),)


def test_a_phase_says_in_which_iterations_it_is_due():
    plan = plan_of(action("a", (0,)), action("b", (1,), every=4, phase=3))
    due = [span.iteration for span in play(plan, 9) if span.action.id == "b"]
    assert [3, 7] == due


@pytest.mark.parametrize(("lag", "period"), [(0, 9.7), (1, 5.5), (2, 5.5), (3, 5.5)])
def test_a_rollout_that_lags_hides_behind_the_update(lag, period):
    found = play_plan(lagging(lag))
    assert period == pytest.approx(found.period)
    assert found.exact


def test_samples_are_as_old_as_their_lag_except_where_a_segment_begins():
    plan = lagging(2)
    free = play_plan(plan, iterations=10)
    assert {"actor.rollout": {0: 1, 1: 1, 2: 8}} == free.lags
    drained = play_plan(plan, iterations=10, barrier=5)
    assert {"actor.rollout": {0: 2, 1: 2, 2: 6}} == drained.lags
    assert drained.makespan > free.makespan
    assert drained.makespan / 10 == pytest.approx(drained.period)


def test_memory_is_copied_on_a_lane_of_its_own():
    """0.4 s of copies before each of two uses of 1 s, none of them beside a use."""
    found = play_plan(sleeping())
    assert 2.8 == pytest.approx(found.period)
    (use,) = (use for use in found.uses if use.label == "p[0]")
    assert 2 / 2.8 == pytest.approx(use.busy)
    assert 0.8 / 2.8 == pytest.approx(use.copying)
    assert {"sleep.a", "wake.b", "sleep.b", "wake.a"} == set(dict(use.waits))


def test_a_copy_runs_beside_the_action_before():
    plan = plan_of(
        action("use", (0,), ("wake", 1), seconds=3.0),
        action("more", (0,), ("use", 0), seconds=2.0),
        action("sleep", (0,), ("use", 0), kind="sleep", part="x", seconds=0.5),
        action("wake", (0,), ("sleep", 0), kind="wake", part="x", seconds=1.0),
        action("use", (0,)),
        pools={"p": (0,)},
    )
    plan = replace(plan, actions=plan.actions[:4])
    plan = replace(plan, actions=(*action_after(plan.actions[0], "wake"), *plan.actions[1:]))
    first = replace(plan.actions[0], after=(replace(plan.actions[0].after[0], distance=1),))
    found = play_plan(replace(plan, actions=(first, *plan.actions[1:])))
    assert 5.0 == pytest.approx(found.period)


def test_of_several_that_are_ready_the_one_listed_first_goes_first():
    plan = plan_of(action("b", (0,)), action("a", (0,)), action("c", (1,), ("a", 0)))
    assert ["b", "a", "b", "a"] == [
        span.action.id for span in play(plan, 2) if span.action.devices == (0,)
    ]


def test_nothing_is_two_turns_ahead_of_the_first_unfinished_one():
    plan = plan_of(
        action("free", (0,), seconds=0.1), action("slow", (1,), ("free", 0), seconds=9.0)
    )
    starts = {(s.action.id, s.turn): s.start for s in play(plan, 6)}
    ends = {(s.action.id, s.turn): s.end for s in play(plan, 6)}
    for turn in range(2, 6):
        assert starts["free", turn] >= ends["slow", turn - 2]


def test_a_plan_that_waits_for_itself_is_refused():
    plan = plan_of(action("a", (0,), ("b", 0)), action("b", (1,), ("a", 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        play(plan, 2)
    plan = plan_of(action("a", (0,), ("b", -1)), action("b", (1,)))
    with pytest.raises(ValueError, match="order"):
        play(plan, 2)


def test_seconds_may_be_given_for_every_instance():
    drawn = Random(7)
    seconds = {(name, i): drawn.random() for name in ("roll", "update", "sync") for i in range(20)}
    found = play_plan(synchronous(), iterations=20, seconds=lambda action, i: seconds[action.id, i])
    assert sum(seconds.values()) == pytest.approx(found.makespan)
    assert not found.exact


@pytest.mark.parametrize("iterations", [1, 2, 3, 7])
def test_few_iterations_are_added_up_too(iterations):
    found = play_plan(lagging(1), iterations=iterations)
    assert iterations == len([s for s in found.spans if s.action.id == "actor.update"])
    assert 0 < found.period <= found.makespan
    assert simulation_text(found)


@pytest.mark.parametrize("name", ["grpo_split", "ray_mesh", "grpo_gpus"])
def test_json_says_what_was_played_the_same_each_time(name):
    texts = {json.dumps(play_plan(EXAMPLES[name]().plan).as_json(), sort_keys=True) for _ in "ab"}
    (text,) = texts
    document = json.loads(text)
    assert {"period", "devices", "spans", "lags", "sources", "latency"} <= document.keys()
    assert all(span["start"] <= span["end"] for span in document["spans"])


def test_the_text_tells_period_bounds_idle_time_and_draws_a_turn():
    text = simulation_text(play_plan(compiled_with(grpo(), SPLIT, name="split").plan))
    assert "placement split on cpu:2" in text
    for word in ("iteration ", "bounds ", "latency ", "idle ", "samples ", "estimates from: "):
        assert f"\n  {word}" in text
    drawn = [line for line in text.splitlines() if line.startswith("  train[0] |")]
    assert ["[actor.update"] == [line.partition("[actor.update")[1] for line in drawn]
    rows = {len(line) for line in text.splitlines() if line.endswith("|") and " |" in line}
    assert 1 == len(rows)


def test_a_typical_turn_has_the_median_length():
    base = synchronous()
    found = play_plan(
        base, iterations=24, seconds=lambda action, i: 50.0 if i % 3 == 0 else action.cost.seconds
    )
    _, start, end = typical_turn(found)
    assert 8.0 == pytest.approx(end - start)


def test_devices_with_equal_schedules_are_one_row():
    found = play_plan(EXAMPLES["ray_mesh"]().plan)
    labels = [use.label for use in found.uses]
    assert len(set(labels)) == len(labels)
    devices = [device for use in found.uses for device in use.devices]
    assert sorted(devices) == sorted(set(devices))
    assert any(len(use.devices) > 1 for use in found.uses)
