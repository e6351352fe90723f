"""The matrix itself: ids, failpoints without a row, samples; nothing is injected here."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from tests.chaos.matrix import SHORT, sample
from tests.chaos.report import Told, page
from tests.chaos.table import MISSING, ROWS, TESTED
from tests.conftest import ROOT

pytestmark = pytest.mark.torch


def test_every_row_has_an_id_of_its_own_and_every_kind_has_rows():
    assert not [name for name, count in Counter(row.id for row in ROWS).items() if count > 1]
    assert set("KDRSGNCX") == {row.id[0] for row in ROWS}


def test_every_failpoint_has_a_row():
    """In a process of its own: other tests may have registered points of theirs."""
    program = (
        "import rlflow.runtime.run, rlflow.runtime.ray.rank, rlflow.runtime.worker.saving\n"
        "import rlflow.runtime.record.edges.writing, rlflow.runtime.record.trackers.observer\n"
        "from rlflow.runtime.record.durable import fault_points\n"
        "from tests.chaos.run_rows import ELSEWHERE, points\n"
        "print([p for p in fault_points() if p not in points() and not p.startswith(ELSEWHERE)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "[]" == found.stdout.strip()


def test_the_tests_that_are_rows_are_there():
    for name, *_, tests in TESTED:
        for each in tests:
            file, _, test = each.partition("::")
            text = (ROOT / "tests" / file).read_text()
            assert not test or f"def {test}(" in text, (name, each)


def test_a_sample_has_all_kinds_in_turn_and_is_that_of_its_seed():
    drawn = sample(ROWS, 8, 3)

    assert drawn == sample(ROWS, 8, 3) != sample(ROWS, 8, 4)
    assert set("KDRSGNCX") == {row.id[0] for row in drawn}
    assert not [row for row in drawn if row.seconds > SHORT or row.needs]
    short = [row for row in ROWS if row.seconds <= SHORT and not row.needs]
    assert short == sample(ROWS, 10**6, 0)


def test_the_page_has_a_line_a_row_and_says_what_was_not_run():
    told = [Told(ROWS[0], "holds", 1.0, ""), Told(MISSING[0], "not run", 0.0, "a | b\nc")]
    text = page(told, 9, 5, 61.0)

    assert "2 of 9 rows in 1 minutes: 1 holds, 0 failed, 1 not run" in text
    assert "a \\| b c" in text
    assert 2 + 2 == len([line for line in text.splitlines() if line.startswith("|")])
