"""What became of each row, on the page that is written after each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.report import Told, write


@pytest.fixture(scope="session")
def tell() -> Callable[[Told], None]:
    """Takes what became of a row; the page is that of all so far, whatever ends the session."""
    from tests.chaos.table import ROWS

    told: list[Told] = []
    began = time.monotonic()
    path = os.environ.get("RLFLOW_CHAOS_REPORT")
    seed = int(os.environ.get("RLFLOW_CHAOS_SEED") or 0)

    def take(each: Told) -> None:
        told.append(each)
        if path:
            write(told, len(ROWS), seed, time.monotonic() - began, Path(path))

    return take
