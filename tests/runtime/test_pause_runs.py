"""Whole runs whose rollouts take newer weights on the way: versions token by token, same bits.

iteration     0  1  2  3 | 4  5  6       a checkpoint after every 4, staleness k=2
to the pause  0  0  0  1 | 4  4  4       max(i - 2, first of the segment)
after it      0  0  1  2 | 4  4  5       max(i - 1, first of the segment)
"""

from __future__ import annotations

import pytest

from tests.runtime.test_stale_runs import versions
from tests.runtime.whole_runs import PAUSED, numbers, plan_of, state

pytestmark = pytest.mark.torch

AT = 3


def sampled(line: dict[str, float]) -> dict[str, float]:
    """What of an iteration's numbers follows from its tokens alone."""
    length = "actor.rollout.resumed/length"
    names = ("judged/mean", "judged/std", length, f"{length}_max", "actor.rollout/paused")
    return {name: line[name] for name in (*names, "seen/stopped", "seen/ended")}


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("placement", "staleness"),
    [
        ("together", 1),
        ("apart", 1),
        pytest.param("together", 2, marks=pytest.mark.slow),
        ("apart", 2),
    ],
)
def test_tokens_after_the_pause_are_one_update_newer(train, placement, staleness):
    lines = numbers(train(PAUSED, f"{placement}{staleness}"))
    older, newer = versions(staleness), versions(staleness - 1)
    assert (
        older == [line["seen/oldest"] for line in lines] == [line["seen/older"] for line in lines]
    )
    assert newer == [line["seen/newer"] for line in lines]
    assert newer == [line["seen/newest"] for line in lines]
    most = [i - version for i, version in enumerate(older)]
    assert most == [line["actor.update/staleness/max"] for line in lines]
    for i, line in enumerate(lines):
        mean = line["actor.update/staleness/mean"]
        assert i - newer[i] < mean < i - older[i] or older[i] == newer[i] == i - mean


def test_lengths_are_those_of_whole_responses(train):
    for line in numbers(train(PAUSED, "apart1")):
        assert {"actor.rollout/length", "actor.rollout/finished"}.isdisjoint(line)
        assert 16 * line["actor.rollout.resumed/length"] == pytest.approx(line["seen/all"])
        assert 16 * line["actor.rollout.resumed/finished"] == line["seen/ended"]
        assert AT < line["actor.rollout.resumed/length_max"] <= 6
        assert 16 * line["actor.rollout/paused"] == line["seen/stopped"]
        assert line["actor.rollout/paused"] == line["actor.rollout.resumed/resumed"]
    shares = [line["actor.rollout/paused"] for line in numbers(train(PAUSED, "apart1"))]
    assert 0 < min(shares) < 1


@pytest.mark.slow
def test_tokens_after_a_pause_are_nearer_to_the_weights_that_learn_from_them(train):
    """Before an update nothing is newer: then a pause changes nothing but rounding."""
    whole, paused = numbers(train(PAUSED, "whole1")), numbers(train(PAUSED, "apart1"))
    assert whole[0]["actor.rollout/length"] == paused[0]["actor.rollout.resumed/length"]
    for name in ("judged/mean", "actor.update/grad_norm"):
        assert pytest.approx(whole[0][name], rel=1e-4) == paused[0][name]
    gaps = [[line["actor.update/rollout_gap"] for line in lines] for lines in (whole, paused)]
    assert max(gaps[0][0], gaps[1][0]) < 1e-5
    assert all(one > 1e-4 for one in gaps[0][1:4])
    assert sum(gaps[1]) < sum(gaps[0])


@pytest.mark.slow
def test_with_equal_weights_a_pause_changes_no_token(train):
    """At a high temperature the tokens after the pause show which random numbers drew them."""
    words = ("--set", "temperature=3.0", "--set", "lr=1e-12", "--iterations", 2)
    whole, paused = (
        numbers(train(PAUSED, "whole1", *words)),
        numbers(train(PAUSED, "apart1", *words)),
    )
    for one, two in zip(whole, paused, strict=True):
        assert one["actor.rollout/length"] == two["actor.rollout.resumed/length"] > 4
        assert one["judged/mean"] == two["judged/mean"]


def test_a_plan_shows_the_pause_and_a_run_keeps_it(train):
    plan = plan_of(train(PAUSED, "apart2"))
    runs = {a["node"]: a["reads"] for a in plan["actions"] if a["kind"] == "run"}
    assert [["actor@gen", 2]] == runs["actor.rollout"]
    assert [["actor@gen", 1]] == runs["actor.rollout.resumed"]


@pytest.mark.slow
def test_the_option_of_the_command_is_that_of_the_placement(train):
    assert state(train(PAUSED, "whole2", "--pause-at", AT)) == state(train(PAUSED, "apart2"))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["together1", "apart1"])
def test_chunks_of_a_paused_rollout_make_the_same_tokens_and_losses(train, placement):
    one, four = (
        numbers(train(PAUSED, placement)),
        numbers(train(PAUSED, placement, "--stream", "4")),
    )
    for whole, chunks in zip(one, four, strict=True):
        assert whole.keys() == chunks.keys()
        assert pytest.approx(sampled(whole), rel=1e-12) == sampled(chunks)
        assert pytest.approx(whole, rel=1e-4, abs=1e-5) == chunks


@pytest.mark.slow
def test_a_run_does_not_go_on_with_another_pause(train, tmp_path):
    run = tmp_path / "run"
    assert 0 == train.begun(run, PAUSED, "apart1", "--iterations", 1).code
    more = ("--iterations", 2)
    result = train.begun(run, PAUSED, "apart1", "--pause-at", AT + 1, *more, option="--resume")
    assert 0 != result.code
    assert "error[E721]" in result.err
    assert 0 == train.begun(run, PAUSED, "together1", *more, option="--resume").code
