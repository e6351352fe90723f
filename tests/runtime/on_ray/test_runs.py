"""Whole runs on Ray: sharding changes no token."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.runtime.whole_runs import declared, numbers, plan_of

pytestmark = [pytest.mark.ray, pytest.mark.torch]

GREEDY = declared("greedy", iterations=20, every=20, devices="cpu:4")


def assert_close(one: Path, many: Path, iterations: int) -> None:
    """The same tokens in every iteration, and all other numbers to float32 tolerance."""
    whole, parts = numbers(one), numbers(many)
    assert iterations == len(whole) == len(parts)
    for iteration, (left, right) in enumerate(zip(whole, parts, strict=True)):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if "digest" in name:
                assert value == right[name], (iteration, name)
            assert math.isclose(value, right[name], rel_tol=2e-3, abs_tol=2e-4), (iteration, name)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("fsdp2tp2", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.extra])
            for name in ("dp2", "fsdp2", "tp2", "hsdp")
        ),
    ],
)
def test_sharded_ranks_make_the_same_tokens_and_losses(train, placement):
    many = train(GREEDY, placement, "--check-sync")
    assert_close(train(GREEDY, "one"), many, iterations=20)


@pytest.mark.slow
def test_parts_that_sleep_on_one_of_their_devices_change_no_number(train):
    """Beside training a copy of the weights sleeps, and shards of the optimizer; others stay."""
    roomy = train(GREEDY, "hybrid", "--devices", "cpu:3@1GB", "--iterations", 3)
    tight = train(GREEDY, "hybrid", "--devices", "cpu:3@8.5MB", "--iterations", 3, "--check-sync")
    stays = {part["name"]: part["stays"] for part in plan_of(tight)["parts"] if "stays" in part}
    assert [2] == stays["actor@gen/weights"]
    assert [0] == stays["actor@train/optimizer"]
    assert (roomy / "metrics.jsonl").read_bytes() == (tight / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_two_nodes_make_the_same_tokens_as_one_process(train, two_nodes):
    one = train(GREEDY, "one", "--iterations", 5)
    words = ("--address", two_nodes, "--check-sync", "--iterations", 5)
    many = train(GREEDY, "fsdp2tp2", *words)
    plan = (many / "plan.txt").read_text()
    assert "by collective (across hosts or GPUs)" in plan
    ranks = re.findall(r"^\d +cpu +(\S+) ", plan, flags=re.MULTILINE)
    assert ["127.0.0.2", "127.0.0.2", "127.0.0.10", "127.0.0.10"] == ranks
    assert_close(one, many, iterations=5)
