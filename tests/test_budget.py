"""Which rows of a long table a week runs."""

from __future__ import annotations

from tests.budget import drawn

ROWS = [f"tests/test_it.py::test_it[{row}]" for row in range(30)]


def test_a_week_runs_as_many_rows_as_are_said_and_always_the_same():
    assert len(drawn(ROWS, 7)) == 7
    assert drawn(ROWS, 7) == drawn(list(reversed(ROWS)), 7)
    assert drawn(ROWS, 40) == set(ROWS)


def test_every_row_has_its_weeks():
    weeks = [f"2026-{week:02}" for week in range(1, 53)]
    assert set().union(*(drawn(ROWS, 10, week) for week in weeks)) == set(ROWS)
