"""Whole runs that sample from older weights: which versions, the same bits in every placement.

iteration    0  1  2  3 | 4  5  6       a checkpoint after every 4
version k=2  0  0  0  1 | 4  4  4       max(i - 2, first of the segment)
"""

from __future__ import annotations

import pytest

from tests.runtime.whole_runs import STALE, WEIGHTS, declared, numbers, plan_of

pytestmark = pytest.mark.torch

SAID = declared("stale:said", iterations=4, every=4)
CURRENT = declared("stale:current", iterations=1, every=4)


def versions(staleness: int, iterations: int = 7) -> list[int]:
    """The version that each iteration samples with, a checkpoint after every four."""
    return [max(i - staleness, i // 4 * 4) for i in range(iterations)]


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("placement", "staleness"),
    [
        *(("together", number) for number in (0, 1, 3)),
        *(("apart", number) for number in (0, 1, 2)),
        pytest.param("together", 2, marks=pytest.mark.slow),
        pytest.param("apart", 3, marks=pytest.mark.slow),
    ],
)
def test_every_token_is_of_the_version_declared(train, placement, staleness):
    lines = numbers(train(STALE, f"{placement}{staleness}"))
    assert versions(staleness) == [line["seen/oldest"] for line in lines]
    assert versions(staleness) == [line["seen/newest"] for line in lines]
    if staleness:
        ages = [i - version for i, version in enumerate(versions(staleness))]
        assert ages == [line["actor.update/staleness/mean"] for line in lines]
        assert ages == [line["actor.update/staleness/max"] for line in lines]
    else:
        assert "actor.update/staleness/mean" not in lines[0]


@pytest.mark.slow
def test_weights_are_1_but_for_rounding_while_samples_are_of_the_weights_that_learn(train):
    means = [line["actor.update/importance_mean"] for line in numbers(train(WEIGHTS, "together2"))]
    assert pytest.approx(1, abs=1e-5) == means[0]
    assert all(abs(mean - 1) > 1e-4 for mean in means[1:])


@pytest.mark.parametrize("placement", ["together", "apart"])
def test_a_staleness_of_0_is_a_run_without_the_word(train, placement):
    first, second = plan_of(train(STALE, placement)), plan_of(train(STALE, f"{placement}0"))
    assert first["graph"] == second["graph"]
    assert first["actions"] == second["actions"]


def test_staleness_changes_what_is_sampled_after_the_first_update(train):
    synchronous, stale = numbers(train(STALE, "apart0")), numbers(train(STALE, "apart1"))
    assert synchronous[0]["judged/mean"] == stale[0]["judged/mean"]
    sampled = ("judged/mean", "actor.rollout/length")
    assert [[line[name] for name in sampled] for line in synchronous[1:4]] != [
        [line[name] for name in sampled] for line in stale[1:4]
    ]


@pytest.mark.slow
def test_the_pipelines_word_holds_where_the_placement_is_silent(train):
    lines = numbers(train(SAID, "apart"))
    assert versions(2, 4) == [line["seen/oldest"] for line in lines]
    lines = numbers(train(SAID, "apart1"))
    assert versions(1, 4) == [line["seen/oldest"] for line in lines]


def test_a_loss_that_does_not_correct_is_refused_before_anything_runs(train, tmp_path):
    run = tmp_path / "run"
    result = train.begun(run, CURRENT, "apart1")
    assert 4 == result.code
    assert "error[E402]: actor.update has no correction for rows" in result.err
    assert 'fix          loss=rf.PolicyLoss("ppo_clip", old="rollout")' in result.err
    assert not run.exists()
    assert 0 == train.begun(run, CURRENT, "apart").code


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["ratio", "weights"])
def test_it_learns_from_samples_that_are_two_updates_old(train, pipeline):
    what = declared(f"stale:{pipeline}", iterations=40, every=4)
    words = ("--set", "batch=16", "--set", "sevens=true", "--set", "lr=0.001")
    rewards = [line["judged/mean"] for line in numbers(train(what, "apart2", *words))]
    assert sum(rewards[:5]) < 2
    assert sum(rewards[-5:]) > 20
