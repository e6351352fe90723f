"""Two plans side by side, and plans that were saved and read back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlflow.errors import UsageError
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.plan.diff import compare, diff_text
from rlflow.scheduler.plan.plan import Chunk, Cost
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.plan.text import plan_text
from tests.runtime.kernels import lagging, sleeping
from tests.scheduler.examples import COLOCATE, EXAMPLES, SPLIT, compiled_with, grpo


def rows(diff):
    return {label: (first, second) for label, first, second in diff.rows}


def test_two_placements_differ_in_devices_time_memory_and_actions():
    first = compiled_with(grpo(), COLOCATE, name="colocate").plan
    second = compiled_with(grpo(), SPLIT, name="split").plan
    diff = compare(first, second)
    found = rows(diff)
    assert not diff.same
    assert ("1", "2 (1 + 1)") == found["devices"]
    assert "-" == found["peak memory, all"][1]
    assert "-" == found["peak memory, gen"][0]
    assert ("0 / 0", "1 / 0") == found["reshard / transfer"]
    assert ("newest (on-policy)", "newest (on-policy)") == found["rollout weights"]
    assert ((), ("reshard actor@train -> actor@gen",)) == diff.only
    assert ("actor.update", "all[0]", "train[0]") in diff.moved
    assert ("reward", "host", "host") not in diff.moved
    text = diff_text(diff)
    assert "\n  only in split\n    reshard actor@train -> actor@gen\n" in text
    assert "only in colocate" not in text


def test_a_plan_is_equal_to_itself():
    plan = compiled_with(grpo(), SPLIT, name="split").plan
    diff = compare(plan, plan)
    assert diff.same
    assert ((), (), ()) == (*diff.only, diff.moved)
    assert "the plans are equal" in diff_text(diff)


def test_staleness_and_chunks_are_compared():
    first, second = lagging(0), lagging(2)
    found = rows(compare(first, second))
    assert ("newest (on-policy)", "<= 2 updates old") == found["rollout weights"]
    assert "chunks" not in found
    cut = [
        replace(first.action("reward"), id=f"reward[{i + 1}/2]", chunk=Chunk(index=i, count=2))
        for i in range(2)
    ]
    others = [action for action in first.actions if action.id != "reward"]
    diff = compare(replace(first, actions=(*others, *cut)), first)
    assert ("2", "1") == rows(diff)["chunks"]
    assert (("run reward in 2 chunks",), ("run reward",)) == diff.only


def test_bytes_are_those_of_an_iteration_and_may_be_unknown():
    plan = sleeping()
    moving = replace(
        plan,
        actions=tuple(
            replace(a, cost=Cost(seconds=1.0, moved=600), every=3 if a.id == "wake.a" else 1)
            for a in plan.actions
        ),
    )
    assert "2.0 kB" == rows(compare(moving, moving))["bytes moved an iteration"][0]
    unknown = replace(
        plan, actions=tuple(replace(a, cost=Cost(seconds=None, moved=None)) for a in plan.actions)
    )
    found = rows(compare(moving, unknown))
    assert "?" == found["bytes moved an iteration"][1]
    assert ("?", "?") == found["iteration, estimated"]
    assert ("?", "?") == found["idle device time"]
    assert ("2 / 2", "2 / 2") == found["sleep / wake"]
    assert ("10 B", "10 B") == found["peak memory, host"]


def test_a_comparison_as_json_keeps_both_sides_apart():
    plan = lagging(0)
    document = json.loads(json.dumps(compare(plan, lagging(1), names=("a", "a")).as_json()))
    assert ["a", "a"] == document["placements"]
    assert ["newest (on-policy)", "<= 1 update old"] == document["figures"]["rollout weights"]


@pytest.mark.rows(5)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_saved_plan_comes_back_whole(name, tmp_path):
    plan = EXAMPLES[name]().plan
    file = tmp_path / "plan.json"
    file.write_text(dump_plan(plan))
    found = read_plan(file)
    assert plan.hash == found.hash
    assert dump_plan(plan) == dump_plan(found)
    assert plan.actions == found.actions
    assert compare(plan, found).same
    assert plan_text(found).splitlines()[2:] == plan_text(plan).splitlines()[2:]


def damaged(**changes):
    document = json.loads(dump_plan(lagging(0)))
    return json.dumps({**document, **changes})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting"),
        ("[]", "list indices"),
        ("{}", "no 'pools' in it"),
        (damaged(placement="other"), "states the hash"),
        (damaged(actions=[{"id": "x", "size": 3}]), "Action has no size"),
    ],
    ids=["torn", "list", "empty", "changed", "unknown"],
)
def test_what_is_no_saved_plan_is_refused(text, said, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"E237.*not a saved plan") as caught:
        read_plan(file)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_plan(tmp_path / "nothing.json")
