"""`rlflow tune`: what it prints, and the placement that it writes."""

from __future__ import annotations

import json
import re
import runpy

import pytest

import rlflow as rf
from rlflow.cli.commands import Target, declare
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from tests.conftest import PIPELINES

GRPO, PPO = PIPELINES / "grpo_arithmetic.py", PIPELINES / "ppo_arithmetic.py"


def test_a_table_and_a_placement_to_paste(rlflow):
    result = rlflow("tune", GRPO, "--devices", "cpu:2", "--top", "3")

    assert 0 == result.code
    lines = result.out.splitlines()
    assert lines[0].startswith("grpo   6 nodes, 1 model on cpu:2")
    assert "512 samples an iteration" in lines[0]
    ranks = [line.split()[0] for line in lines if re.match(r"  \(?\d+\)? ", line)]
    assert ["1", "2", "3"] == [rank for rank in ranks if rank.isdigit()]
    assert "split (hand-written): train[0] actor whole; gen[1] actor.rollout whole" in result.out
    assert "does not fit: fsdp_tp: placement 'fsdp_tp' needs 4 devices, there are 2" in result.out
    assert re.search(r"looked at \d+ placements, compiled \d+", result.out)
    assert lines[-1].startswith("  rf.Placement(pools={")


@pytest.mark.slow
def test_what_is_pasted_compiles_to_the_plan_shown(rlflow):
    options = ("--devices", "h100:4", "--model-shape", "qwen2.5-7b", "--max-staleness", "1")
    found = json.loads(rlflow("tune", PPO, *options, "--top", "4", "--json").out)
    text = rlflow("tune", PPO, *options, "--top", "4").out
    graph = declare(Target(pipeline=str(PPO), model_shape="qwen2.5-7b")).graph
    where = parse_cluster("h100:4", 4)

    assert f"\n  {found['best']}\n" in text
    # The best one is written in shares of the devices, rows with the numbers that were tried.
    said = [found["best"], *(row["placement"] for row in found["rows"])]
    plans = [compile_plan(graph, eval(each, {"rf": rf}), where).plan for each in said]
    assert plans[0].actions == plans[1].actions
    for row, plan in zip(found["rows"], plans[1:], strict=True):
        assert row["period"] == plan.timing.period
        assert row["staleness"] == plan.staleness
        assert row["peak"] == max(size for d, size in plan.peaks.items() if d >= 0)
        assert 128 / plan.timing.period == row["samples_per_second"]
    periods = [row["period"] for row in found["rows"]]
    assert sorted(periods) == periods
    assert periods[0] <= min(row["period"] for row in found["hand_written"])


def test_the_best_placement_is_written_to_a_file(rlflow, tmp_path):
    path = tmp_path / "placement.py"
    result = rlflow("tune", GRPO, "--devices", "cpu:2", "--json", "-o", path)

    assert f"wrote {path}" in result.err
    written = runpy.run_path(str(path))["placement"]
    assert eval(json.loads(result.out)["best"], {"rf": rf}) == written


def test_a_file_that_is_not_python_is_refused_before_the_search(rlflow, tmp_path):
    result = rlflow("tune", GRPO, "-o", tmp_path / "placement.json")

    assert 2 == result.code
    assert "error[E243]" in result.err
    assert "" == result.out


def test_nothing_fits(rlflow):
    result = rlflow("tune", PPO, "--devices", "h100:1@20GB", "--model-shape", "qwen2.5-7b")

    assert 4 == result.code
    assert "error[E240]: no placement of 'ppo' fits h100:1 (20.0 GB each)" in result.err
    assert "the nearest is actor.update on 1 device, fsdp=1 tp=1: 64.1 GB at once" in result.err


def test_one_placement_to_beat(rlflow):
    found = json.loads(
        rlflow("tune", GRPO, "--placement", "split", "--devices", "cpu:2", "--json").out
    )

    assert ["split"] == [row["name"] for row in found["hand_written"]]


def test_without_devices_it_takes_the_cores_of_this_machine(rlflow):
    found = json.loads(rlflow("tune", GRPO, "--threads", "1", "--json").out)

    assert found["cluster"].startswith("cpu:")
