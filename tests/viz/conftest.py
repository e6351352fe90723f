"""A home with a tiny model's config, and the plans that several tests draw."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.scheduler.plan.plan import Plan
from tests.viz.examples import ppo_plan, squeezed_plan, write_model, write_run


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `models/tiny/config.json`."""
    where = tmp_path_factory.mktemp("viz")
    write_model(where)
    return where


@pytest.fixture(scope="session")
def split(home: Path) -> Plan:
    """PPO on two pools: a reshard."""
    return ppo_plan("split", home)


@pytest.fixture(scope="session")
def squeezed(home: Path) -> Plan:
    """PPO on one pool that is too small: sleeps and wakes."""
    return squeezed_plan(home)


@pytest.fixture
def run_dir(tmp_path: Path, split: Plan) -> Path:
    """A synthetic run of the split plan, six iterations."""
    path = tmp_path / "ppo-run"
    write_run(path, split)
    return path
