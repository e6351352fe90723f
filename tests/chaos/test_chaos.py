"""`make chaos`: every row of the matrix, or some of them; a page says what became of each.

RLFLOW_CHAOS_REPORT is the page. RLFLOW_CHAOS_ROWS has the beginnings of ids, RLFLOW_CHAOS_MISSING
leaves out what holds by that page, RLFLOW_CHAOS_SAMPLE=n draws so many rows by RLFLOW_CHAOS_SEED:
a number, or `week` for those of this week.
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

from tests.budget import WEEK
from tests.chaos.conftest import PAGE
from tests.chaos.matrix import Row, chosen
from tests.chaos.report import Told, now, read
from tests.chaos.scene import SLOWER, Scene
from tests.chaos.table import ROWS, why_not

WORDS = {
    name: os.environ.get(f"RLFLOW_CHAOS_{name}", "")
    for name in ("ROWS", "MISSING", "SAMPLE", "SEED")
}
SEED = int(WORDS["SEED"].replace("week", WEEK.replace("-", "")) or 0)
HOLD = (
    {name for name, told in read(Path(PAGE)).rows.items() if told.outcome == "holds"}
    if PAGE
    else ()
)
CHOSEN = chosen(
    ROWS,
    beginnings=[each.strip() for each in WORDS["ROWS"].split(",") if each],
    without=HOLD if WORDS["MISSING"] else (),
    count=int(WORDS["SAMPLE"] or len(ROWS)),
    seed=SEED,
)

pytestmark = [pytest.mark.torch, pytest.mark.chaos, pytest.mark.timeout(1200 * SLOWER)]


@pytest.fixture(scope="session")
def home():
    """Where runs without an accident are, the same for all rows of a session."""
    folder = Path(tempfile.mkdtemp(prefix="whole-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.id)
def test_row(row: Row, home: Path, tell: Callable[[Told], None]):
    limit = row.seconds * SLOWER
    load = os.getloadavg()[0]

    def say(outcome: str, seconds: float, said: str) -> None:
        tell(
            Told(
                row=row.id,
                outcome=outcome,
                seconds=round(seconds, 1),
                limit=limit,
                said=said,
                load=round(load, 1),
                when=now(),
            )
        )

    missing = why_not(row)
    if missing:
        say("not run", 0.0, missing)
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
        assert seconds <= limit, f"{seconds:.0f} s, later than its deadline"
        outcome = "holds"
    except AssertionError as error:
        lines = str(error).splitlines() or ["an assertion"]
        why = next((line for line in lines if line.startswith("error[")), lines[0])[:160]
        raise
    finally:
        seconds = seconds or time.monotonic() - began
        scene.close()
        say(outcome, seconds, scene.skipped or "; ".join([*left, *filter(None, [why])]))
        if outcome == "holds":
            shutil.rmtree(folder, ignore_errors=True)
