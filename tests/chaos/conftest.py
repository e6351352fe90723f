"""What became of each row, on the page that is written after each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.report import Kept, Session, Told, keep, now
from tests.chaos.scene import SLOWER

PAGE = os.environ.get("RLFLOW_CHAOS_REPORT")
BEGAN = time.monotonic()


@pytest.fixture(scope="session")
def tell() -> Callable[[Told], None]:
    """Takes what became of a row; the page has it at once, whatever ends the session."""
    from tests.chaos.table import ROWS

    def take(each: Told) -> None:
        if PAGE:
            keep(Path(PAGE), ROWS, lambda kept: kept.rows.update({each.row: each}))

    return take


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that has the workers says how long all of it took."""
    if not PAGE or hasattr(session.config, "workerinput") or not session.testscollected:
        return
    from tests.chaos.table import ROWS

    made = Session(
        when=now(),
        rows=session.testscollected,
        workers=session.config.getoption("numprocesses", None) or 1,
        slower=SLOWER,
        minutes=(time.monotonic() - BEGAN) / 60,
    )

    def add(kept: Kept) -> None:
        kept.sessions.append(made)

    keep(Path(PAGE), ROWS, add)
