"""Prompts drawn by pass rates in whole runs: which version of them is read.

iteration          0  1  2  3  4  5
version, k = 0     0  1  2  3  4  5     of the pass rates that prompts read
version, k = 1     0  0  1  2  3  4     also just after a checkpoint
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.runtime.record.metrics import read_metrics
from tests.runtime.whole_runs import BEHIND, INSIDE, LEVELS, kept

pytestmark = pytest.mark.torch


def numbers(run: Path, start: str):
    """The metrics of every iteration whose names begin so."""
    lines = read_metrics(run / "metrics.jsonl")
    return [
        {name: value for name, value in line.metrics.items() if name.startswith(start)}
        for line in lines
        if line.iteration < 4
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "lag"), [("together", 1), ("late", 2)])
def test_prompts_read_the_version_that_is_declared(train, placement, lag):
    """What is measured in iteration i is read in iteration i + 1 + k, checkpoints or not."""
    run = train(LEVELS, placement)
    read = numbers(run, "prompts/rate/")
    seen, passed = dict.fromkeys("123", 0.0), dict.fromkeys("123", 0.0)
    versions = [dict.fromkeys("123", 0.5)]
    for count, measured in zip(numbers(run, "counts/"), numbers(run, "passes/"), strict=True):
        for level in "123":
            if n := count[f"counts/{level}"]:
                seen[level] = 0.9 * seen[level] + n
                passed[level] = 0.9 * passed[level] + n * measured[f"passes/passed/{level}"]
        versions.append({level: (0.5 + passed[level]) / (1 + seen[level]) for level in "123"})
    for iteration, line in enumerate(read):
        expected = versions[max(iteration + 1 - lag, 0)]
        got = {level: line[f"prompts/rate/{level}"] for level in "123"}
        assert pytest.approx(expected) == got, iteration
    assert len({tuple(line.values()) for line in read}) > lag


@pytest.mark.slow
def test_a_loop_tracks_and_draws_in_every_trip(train):
    run = train(INSIDE, "together")
    trips = sum(line["repeat/trips"] for line in numbers(run, "repeat/trips"))
    found = kept(run)["passes"]
    drawn = [value for key, value in found.items() if key.startswith("drawn/")]
    assert trips > 4
    assert 4 * trips == sum(drawn)
    assert [4.0, 3.0] == [found["newest"], found["oldest"]]


@pytest.mark.slow
def test_behind_a_loop_only_its_rows_are_tracked(train):
    read = numbers(train(BEHIND, "together"), "counts/")
    assert [8.0] * 4 == [sum(line.values()) for line in read]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.extra
def test_on_ray_prompts_are_the_same(train):
    """Both run in the worker of the host: the rollout is shared out over two ranks."""
    here = train(LEVELS, "late_apart")
    ray = train(LEVELS, "late_apart", "--backend", "ray")
    assert kept(here) == kept(ray)
    for start in ("prompts/", "passes/", "counts/"):
        assert numbers(here, start) == numbers(ray, start)
    assert 4 == len(numbers(train(LEVELS, "ranks"), "prompts/"))
