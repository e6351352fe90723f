"""What became of each row, kept for the page that is written in the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.chaos import report

TOLD: list[report.Told] = []


@pytest.fixture(scope="session")
def told() -> list[report.Told]:
    """The rows so far."""
    return TOLD


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN] = time.monotonic()


BEGAN = pytest.StashKey[float]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page where one is asked for."""
    path = os.environ.get("RLFLOW_CHAOS_REPORT")
    if path and TOLD:
        from tests.chaos.table import ROWS

        took = time.monotonic() - session.config.stash.get(BEGAN, time.monotonic())
        seed = int(os.environ.get("RLFLOW_CHAOS_SEED") or 0)
        report.write(TOLD, len(ROWS), seed, took, Path(path))
