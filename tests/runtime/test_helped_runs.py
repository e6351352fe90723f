"""Whole runs whose trainer helps to draw: which part is of which version.

iteration     0  1  2  3 | 4  5  6       a checkpoint after every 4, staleness k=1
on `gen`      0  0  1  2 | 4  4  5       max(i - 1, first of the segment)
on `train`    0  1  2  3 | 4  5  6       max(i, first of the segment)
"""

from __future__ import annotations

import pytest

from rlflow.cli.commands import Target, declare, plan_declared
from rlflow.cli.continuing import in_the_same_chunks
from rlflow.graph.roles import Portion
from tests.runtime.test_stale_runs import versions
from tests.runtime.whole_runs import HELPED, numbers, plan_of, state

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_part_of_the_trainer_is_one_update_newer(train, staleness):
    run = train(HELPED, f"helped{staleness}")
    lines = numbers(run)

    assert versions(staleness) == [line["seen/gen"] for line in lines]
    assert versions(staleness - 1) == [line["seen/train"] for line in lines]
    devices = {a["node"]: a["devices"] for a in plan_of(run)["actions"] if a["kind"] == "run"}
    assert [[1], [0]] == [devices[f"actor.rollout@{pool}"] for pool in ("gen", "train")]


def test_a_run_that_goes_on_keeps_the_share_that_was_found(train):
    asked = Target(pipeline=HELPED.file, placement="open", devices="cpu:2")
    declared = declare(asked)
    target = in_the_same_chunks(declared, asked, train(HELPED, "helped1"))
    found = plan_declared(declared, target).compiled.plan.graph.having(Portion)

    assert (("actor.rollout", 2),) == target.shares
    assert [(0, 2), (2, 4)] == [(role.first, role.last) for _, role in found]


@pytest.mark.slow
def test_with_the_newest_weights_a_run_goes_on_without_help(train, tmp_path):
    run = train.broken(tmp_path / "run", "run:iteration=raise@6", HELPED, "helped0")

    assert state(train(HELPED, "helped0")) == state(train.resumed(run, HELPED, "apart0"))


@pytest.mark.slow
def test_another_share_of_older_rows_is_another_run(train, tmp_path):
    run = train.broken(tmp_path / "run", "run:iteration=raise@6", HELPED, "helped1")
    result = train.begun(run, HELPED, "apart1", option="--resume")

    assert "E721" in result.err


@pytest.mark.slow
@pytest.mark.ray
def test_replicas_of_both_pools_draw_on_ray(train):
    """Ranks that share the update add up in another order: the same to rounding."""
    here, there = train(HELPED, "helped1"), train(HELPED, "wide", "--devices", "cpu:4")
    for one, other in zip(numbers(here), numbers(there), strict=True):
        names = ("seen/gen", "seen/train", "seen/ended", "judged/mean", "actor.rollout/length")
        assert [one[name] for name in names] == [other[name] for name in names]
        assert (
            pytest.approx(one["actor.update/grad_norm"], rel=1e-4)
            == other["actor.update/grad_norm"]
        )
