"""Whole runs of episodes: turns and versions, and what is told carries no gradient."""

from __future__ import annotations

import pytest

from tests.runtime.whole_runs import AGAIN, numbers, sets, tensors

pytestmark = pytest.mark.torch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "whole"), [("streamed", "apart"), ("streamed_paused", "apart_paused")]
)
def test_episodes_do_not_depend_on_how_their_first_turns_are_cut(train, cut, whole):
    mine, theirs = numbers(train(AGAIN, cut)), numbers(train(AGAIN, whole))
    for one, other in zip(mine, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_several_turns_are_taken_and_counted(train):
    for line in numbers(train(AGAIN, "together")):
        assert 1 < line["episodes/turns"] < 3 == line["episodes/turns_max"]
        assert line["episodes.turns/done"] == 1 - line["episodes/truncated"]
        assert 0 == line["seen/uneven"] == line["seen/loud"]
        assert 1 == line["seen/ordered"]
        assert 0 < line["episodes/told"] < 1


@pytest.mark.slow
def test_versions_are_those_of_the_weights_that_said_it(train):
    """A checkpoint after every 2 iterations, so those are v0 v1 | v2 v3, and i - 1 when stale."""
    for i, line in enumerate(numbers(train(AGAIN, "together"))):
        assert (i, i) == (line["seen/oldest"], line["seen/newest"])
    for i, line in enumerate(numbers(train(AGAIN, "apart_stale"))):
        older = i - i % 2
        assert (older, older) == (line["seen/oldest"], line["seen/newest"])
    for i, line in enumerate(numbers(train(AGAIN, "apart_paused"))):
        assert (i - i % 2, i) == (line["seen/first"], line["seen/last"])


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["together", "apart_paused", "streamed"])
def test_each_turn_goes_on_from_the_one_before(train, placement):
    for line in numbers(train(AGAIN, placement, *sets("ends=never"))):
        assert 2 == line["seen/least_told"] == line["seen/most_told"]


@pytest.mark.slow
def test_log_probs_are_those_of_the_tokens_that_were_said(train):
    lines = numbers(train(AGAIN, "together", *sets("compared=true")))
    assert 4 == len(lines)
    for line in lines:
        assert line["metrics/most"] < 1e-4


@pytest.mark.slow
def test_what_is_told_carries_no_gradient(train):
    spoiled = train(AGAIN, "together", *sets("told=nan"))
    assert tensors(train(AGAIN, "together")) == tensors(spoiled)
    assert "nan" not in (spoiled / "metrics.jsonl").read_text().lower()


@pytest.mark.slow
def test_without_the_mask_it_would(train):
    everything = train(AGAIN, "together", *sets("everything=true"))
    assert tensors(everything) != tensors(train(AGAIN, "together"))


@pytest.mark.slow
def test_an_environment_that_never_ends_is_bounded_and_counted(train, tmp_path):
    for line in numbers(train(AGAIN, "together", *sets("ends=never"))):
        assert (1, 3, 0) == tuple(
            line[f"episodes{key}"] for key in ("/truncated", "/turns", ".turns/done")
        )
    result = train.begun(
        tmp_path / "run", AGAIN, "together", *sets("ends=never", "max_truncated=0.5")
    )
    assert 0 != result.code
    assert "E625" in result.err
    assert "16 of 16 episodes of iteration 0 did not end" in result.err


@pytest.mark.slow
def test_an_episode_has_no_more_tokens_than_said(train):
    for line in numbers(train(AGAIN, "together", *sets("ends=never", "max_tokens=11", "turns=6"))):
        assert 1 == line["episodes/truncated"]
        assert line["episodes/length"] <= 11
        assert line["episodes/turns"] < 3


def test_an_environment_that_fails_stops_the_run(train, tmp_path):
    result = train.begun(tmp_path / "run", AGAIN, "together", *sets("ends=raises"))
    assert 0 != result.code
    assert "E621" in result.err
    assert "LookupError: no such sum" in result.err


@pytest.mark.slow
def test_or_its_episodes_are_left_out(train, tmp_path):
    kept = numbers(train(AGAIN, "together", *sets("ends=raises", "on_error=end")))
    left = numbers(train(AGAIN, "together", *sets("ends=raises", "on_error=drop_sample")))
    group = numbers(train(AGAIN, "together", *sets("ends=raises", "on_error=drop_group")))
    assert kept[0]["episodes/failed"] == left[0]["episodes/failed"] == left[0]["episodes/dropped"]
    assert 0 < left[0]["episodes/dropped"] <= group[0]["episodes/dropped"]
    assert "episodes/dropped" not in kept[0]
    words = sets("ends=raises", "on_error=drop_sample", "max_failures=0.01")
    result = train.begun(tmp_path / "run", AGAIN, "together", *words)
    assert 0 != result.code
    assert "E624" in result.err


@pytest.mark.slow
def test_one_turn_is_a_rollout(train):
    for line in numbers(train(AGAIN, "together", *sets("turns=1"))):
        assert (1, 0) == (line["episodes/turns"], line["episodes/told"])
