"""`make chaos`: every row of the matrix, or a sample of them; a page says what became of each.

RLFLOW_CHAOS_SAMPLE=n draws so many rows by RLFLOW_CHAOS_SEED; RLFLOW_CHAOS_REPORT is the page.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.matrix import Row, sample
from tests.chaos.report import Told
from tests.chaos.scene import Scene
from tests.chaos.table import ROWS, why_not

COUNT = int(os.environ.get("RLFLOW_CHAOS_SAMPLE") or 0)
SEED = int(os.environ.get("RLFLOW_CHAOS_SEED") or 0)
CHOSEN = sample(ROWS, COUNT, SEED) if COUNT else ROWS

pytestmark = [pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.fixture(scope="session")
def home():
    """Where runs without an accident are, the same for all rows of a session."""
    folder = Path(tempfile.mkdtemp(prefix="whole-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.id)
def test_row(row: Row, home: Path, tell: Callable[[Told], None]):
    missing = why_not(row)
    if missing:
        tell(Told(row, "not run", 0.0, missing))
        pytest.skip(missing)
    # A short path: sockets in it have names of a hundred letters at most.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    scene = Scene(folder, SEED * 1_000_003 + zlib.crc32(row.id.encode()), home)
    left: list[str] = []
    outcome, why, began = "failed", "", time.monotonic()
    seconds = 0.0
    try:
        assert row.inject is not None
        row.inject(scene)
        seconds = time.monotonic() - began
        left = scene.left()
        if scene.skipped:
            outcome = "not run"
            pytest.skip(scene.skipped)
        assert scene.fired, "the fault has not fired"
        assert [] == left
        assert seconds <= row.seconds, f"{seconds:.0f} s, later than its deadline"
        outcome = "holds"
    except AssertionError as error:
        lines = str(error).splitlines() or ["an assertion"]
        why = next((line for line in lines if line.startswith("error[")), lines[0])[:160]
        raise
    finally:
        seconds = seconds or time.monotonic() - began
        scene.close()
        tell(Told(row, outcome, seconds, scene.skipped or "; ".join([*left, *filter(None, [why])])))
        if outcome == "holds":
            shutil.rmtree(folder, ignore_errors=True)
