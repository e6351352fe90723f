"""The matrix itself: ids, failpoints without a row, samples; nothing is injected here."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from rlflow.runtime.record.durable import fault_points
from tests.chaos.matrix import SHORT, Row, chosen, sample
from tests.chaos.report import Session, Told, keep, read
from tests.chaos.run_rows import ELSEWHERE
from tests.chaos.table import MISSING, ROWS, TESTED
from tests.conftest import ROOT
from tests.sources import FILES

pytestmark = pytest.mark.torch

# Points whose rows are tests of other suites, and those that tests register.
OTHERS = (*ELSEWHERE, "test:")


def test_every_row_has_an_id_of_its_own_and_every_kind_has_rows():
    assert not [name for name, count in Counter(row.id for row in ROWS).items() if count > 1]
    assert set("KDRSGNCX") == {row.id[0] for row in ROWS}


def test_every_failpoint_has_a_row():
    """Those of every file that has some; the others begin with what tests of their own are for."""
    for file in FILES:
        if "faults(" in file.read_text():
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    ids = {row.id for row in ROWS}
    assert not [p for p in fault_points() if f"K1 {p}" not in ids and not p.startswith(OTHERS)]


def test_the_tests_that_are_rows_are_there():
    for name, *_, tests in TESTED:
        for each in tests:
            file, _, test = each.partition("::")
            text = (ROOT / "tests" / file).read_text()
            assert not test or f"def {test}(" in text, (name, each)


def test_a_sample_has_all_kinds_in_turn_and_is_that_of_its_seed():
    drawn = sample(ROWS, 8, 3)

    assert drawn == sample(ROWS, 8, 3) != sample(ROWS, 8, 4)
    assert set("KDRNX") == {row.id[0] for row in drawn} == {row.id[0] for row in ROWS if row.own}
    assert not [row for row in drawn if row.seconds > SHORT or row.needs]
    short = [row for row in ROWS if row.seconds <= SHORT and row.own and not row.needs]
    assert short == sample(ROWS, 10**6, 0)


def test_rows_are_chosen_by_their_beginnings_and_by_what_holds_the_longest_first():
    names = [row.id for row in chosen(ROWS, beginnings=["N1", "K1 ranks"], count=len(ROWS), seed=0)]
    assert ["K1 ranks", "N1"] == names
    left = chosen(ROWS, beginnings=["N"], without={"N1"}, count=len(ROWS), seed=0)
    assert {row.id for row in ROWS if row.id[0] == "N"} - {"N1"} == {row.id for row in left}
    assert 2 == len(chosen(ROWS, beginnings=["D"], count=2, seed=0))


def told(row: Row, outcome: str, said: str = "") -> Told:
    return Told(row=row.id, outcome=outcome, seconds=2.0, limit=9.0, said=said, when="today")


def test_the_page_has_the_last_outcome_of_each_row_whatever_session_ran_it(tmp_path):
    page = tmp_path / "results" / "chaos.md"
    first, second = ROWS[0], MISSING[0]
    for each in (told(first, "failed"), told(second, "not run", "a | b\nc"), told(first, "holds")):
        keep(page, ROWS, lambda kept, each=each: kept.rows.update({each.row: each}))
    made = Session(when="today", rows=3, workers=2, slower=4.0, minutes=1.25)
    keep(page, ROWS, lambda kept: kept.sessions.append(made))

    text = page.read_text()
    assert f"2 of {len(ROWS)} rows" in text
    assert "1 holds, 0 failed, 1 not run" in text
    assert "a \\| b c" in text
    assert "| today | 3 | 2 | 4 | 1.2 |" in text
    assert len(ROWS) - 2 == text.count("| not yet |")
    assert ({first.id, second.id}, [made]) == (set(read(page).rows), read(page).sessions)


def test_a_row_that_is_no_more_leaves_the_page(tmp_path):
    page = tmp_path / "chaos.md"
    gone = Told(row="K0", outcome="holds", seconds=1.0, limit=9.0)
    keep(page, ROWS, lambda kept: kept.rows.update({gone.row: gone}))
    assert "K0" not in read(page).rows
