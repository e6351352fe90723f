"""Plans of several stages of a pipeline on each rank: what they hold, take and send, and refuse."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import KINDS, Cluster
from rlflow.scheduler.plan.plan import Action, Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.strategies import graph_of


def length(response: str) -> float:
    return float(len(response))


@cache
def planned(model: str = "shape:qwen2.5-7b", kind: str = "h100", **on: Any) -> Plan:
    """A GRPO update and a rollout on eight GPUs."""

    def declared() -> None:
        actor = rf.Model("actor", model, dtype="bfloat16", optimizer=rf.AdamW(lr=1e-6))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
        samples = ops.rollout(actor, prompts, n=8, max_new_tokens=1024)
        advantages = ops.advantage("grpo", samples, ops.reward(length, samples))
        ops.update(actor, samples, advantages, loss=rf.PolicyLoss())

    where = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all", **on)})
    cluster = Cluster(kind=KINDS[kind], count=8)
    return compile_plan(graph_of(declared, "stages"), where, cluster).plan


def update(plan: Plan) -> Action:
    return next(action for action in plan.actions if action.node == "actor.update")


def note(plan: Plan) -> str:
    return next(each.text for each in plan.notes if "are cut into" in each.text)


def test_ranks_wait_for_less_hold_more_and_send_more() -> None:
    one, two = (planned(pp=4, tp=2, micro=4096, virtual=v) for v in (1, 2))
    trained = two.trained_instance("actor")
    assert "pp=4 virtual=2 tp=2" in trained.layout()
    assert (8, 28) == (len(trained.stages), sum(trained.stages))
    assert [2, 2, 2, 2] == [len(runs) for runs in trained.runs]
    assert [28] == [trained.runs[3][1].stop]
    before, after = update(one).cost, update(two).cost
    assert 0.8 < (after.seconds or 0) / (before.seconds or 1) < 1
    held = dict(before.holds)["activations"], dict(after.holds)["activations"]
    # The first rank has p (1 + (p - 1) / (p v)) micro-batches, by p of them: Narayanan et al. 2021,
    # section 2.2.2; each after it one less, or two passes of a half. The second has more layers.
    assert [6, 8] == [sum(map(len, runs)) for runs in trained.runs[:2]]
    assert held[1] / held[0] == pytest.approx(max(6 * 5.5, 8 * 4.5) / max(6 * 4, 8 * 3), rel=0.01)
    assert "x virtual=2 stages" in note(two)
    assert "up to 5.5 under way" in note(two)


def test_what_fills_up_a_round_is_told_and_counted() -> None:
    """65 micro-batches are three short of 17 rounds of four ranks; 68 smaller ones are as many."""
    found = {}
    for micro, passes, empty in (
        (4096, 65, ", and 3 of a single token"),
        (3900, 68, ", the first"),
    ):
        one, two = (planned(pp=4, tp=2, micro=micro, virtual=v) for v in (1, 2))
        assert re.search(rf"update passes {passes} micro-batches.* for others{empty}", note(two))
        assert "single token" not in note(one)
        found[micro] = [update(plan).cost.seconds or 0 for plan in (one, two)]
    assert found[3900][0] > found[4096][0]
    assert found[3900][1] < found[4096][1]


def test_a_plan_with_several_is_read_back(tmp_path: Path) -> None:
    plan = planned(pp=4, tp=2, micro=4096, virtual=2)
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    found, trained = read_plan(path).trained_instance("actor"), plan.trained_instance("actor")
    assert (trained.layout(), trained.runs) == (found.layout(), found.runs)
    assert '"virtual"' not in dump_plan(planned(pp=4, tp=2, micro=4096, virtual=1))


def test_mixtures_have_several_as_well() -> None:
    model = "shape:qwen3-30b-a3b"
    on = {"pp": 2, "ep": 4, "micro": 4096, "gradient_sync": "each"}
    one, two = (planned(model, **on, virtual=v) for v in (1, 2))
    trained = two.trained_instance("actor")
    assert "pp=2 virtual=2 fsdp=4 ep=4" in trained.layout()
    assert [2, 2] == [len(runs) for runs in trained.runs]
    assert (update(two).cost.seconds or 0) < (update(one).cost.seconds or 0)


@pytest.mark.parametrize(
    ("model", "on", "what"),
    [
        ("shape:qwen2.5-7b", {"virtual": 2}, "cannot have several stages.*pp=1"),
        ("shape:qwen2.5-7b", {"pp": 8, "virtual": 4}, "pp=8 virtual=4.*fewer layers.*28 layers"),
    ],
)
def test_what_cannot_have_several_is_refused(model: str, on: dict[str, int], what: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)E531.*{what}"):
        planned(model, **on)
