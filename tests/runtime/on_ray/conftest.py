"""Clusters for tests: an embedded one for a module, and one of two nodes for all of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlflow.runtime.ray.cluster import reaper
from rlflow.runtime.ray.cluster.session import Session
from tests.conftest import ROOT

NODES = Path(__file__).with_name("nodes.py")


class Cluster:
    """A running cluster of several nodes, and the process that keeps it."""

    def __init__(self, *addresses: str) -> None:
        self.mark = secrets.token_hex(8)
        self.directory = Path(tempfile.mkdtemp(prefix="rlflow-", dir="/tmp"))
        self.process = subprocess.Popen(
            [sys.executable, str(NODES), self.mark, str(self.directory), *addresses],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        )
        self.address = self._answer()

    def ask(self, line: str) -> None:
        """Have it start or kill a node."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert "done" == self._answer()

    def close(self) -> None:
        """End every process of it."""
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        assert reaper.reap(self.mark, self.directory)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> str:
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def cluster(*addresses: str) -> Iterator[Cluster]:
    """A cluster of two CPUs at each of the addresses; the first is the head's."""
    made = Cluster(*addresses)
    try:
        assert made.address, "the nodes did not start"
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def nodes() -> Iterator[Cluster]:
    """Two nodes, the head's address the larger number though it is the smaller as text."""
    with cluster("127.0.0.10", "127.0.0.2") as made:
        yield made


@pytest.fixture(scope="session")
def two_nodes(nodes: Cluster) -> str:
    """Where a cluster of two nodes, two CPUs each, can be joined."""
    return nodes.address


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """An embedded cluster of four CPUs and two devices that call themselves GPUs."""
    with contextlib.closing(Session.start(address=None, cpus=4, gpus=2)) as made:
        yield made


@pytest.fixture
def join(two_nodes: str) -> Iterator[Callable[[], Session]]:
    """Join the cluster of two nodes; left at the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(
            contextlib.closing(Session.start(address=two_nodes, cpus=0))
        )
