"""Compiling is a function: the same bytes in every process, whatever the hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = """
import sys
sys.path.insert(0, "{root}")
from rlflow.cli.commands import Target, declare
from rlflow.errors import RlflowError
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.compile import compile_plan, dump_plan

CASES = [
    ("ppo_arithmetic", "cpu:1@32MB", {{}}),
    ("ppo_arithmetic", "h100:4", {{"staleness": 2}}),
    ("grpo_arithmetic", "cpu:4", {{"stream": 4}}),
    ("grpo_arithmetic", "h100:4", {{"staleness": 1, "stream": "auto"}}),
]
for name, devices, changes in CASES:
    target = Target(pipeline="pipelines/" + name + ".py", devices=devices)
    declared = declare(target)
    for label, placement in declared.pipeline.placements.items():
        cluster = parse_cluster(devices, placement.num_devices())
        if placement.num_devices() > cluster.count:
            continue
        placement = placement.model_copy(update=changes)
        try:
            plan = compile_plan(declared.graph, placement, cluster, name=label).plan
        except RlflowError as error:
            print(label, error)
            continue
        print(label, dump_plan(plan))
"""


def compiled(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "RLFLOW_COSTS": "off"}
    made = subprocess.run(
        [sys.executable, "-c", WORK.format(root=ROOT)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def reference() -> str:
    return compiled("0")


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "4711"])
def test_plans_have_the_same_bytes_in_every_process(reference: str, seed: str) -> None:
    assert reference.count('"hash"') > 5
    assert reference == compiled(seed)
