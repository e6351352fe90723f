"""Whole runs for every suite, made once in a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of finished runs, the same for all processes of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "whole_runs"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def train(rlflow, shared_runs, monkeypatch):
    """Runs of pipelines; called, the directory of a finished one."""
    from tests.runtime.whole_runs import Runs

    monkeypatch.chdir(shared_runs)
    return Runs(rlflow, shared_runs, monkeypatch)


@pytest.fixture(scope="session")
def one_node() -> Iterator[str]:
    """Where a cluster of one node and two CPUs can be joined: Ray starts once for many runs."""
    from tests.runtime.on_ray.conftest import cluster

    with cluster("127.0.0.7") as made:
        yield made.address
