from __future__ import annotations

import json
from dataclasses import replace

import pytest
from reshard import CASES, HEADER, Found, Size, measured

FOUND = Found(
    case="c",
    transport="collective",
    model=4_000_000,
    received=2_000_000,
    minimum=2_000_000,
    ours=(0.1, 1.0, 0.1),
    gathering=(0.2, 4.0, 0.2),
    plan=0.01,
    staging=8_000_000,
    gathered=3_000_000,
)


def test_the_ratio_is_the_median_of_the_pairs():
    # The second pair ran in a slow hour: both sides took ten times as long.
    assert (0.5, 0.25, 0.5) == FOUND.ratios
    assert 0.5 == FOUND.ratio


def test_more_bytes_than_the_least_or_a_longer_time_do_not_pass():
    assert FOUND.passed
    assert not replace(FOUND, received=2_000_001).passed
    assert not replace(FOUND, ours=(0.3, 5.0, 0.3)).passed


def test_the_row_shows_what_its_header_says():
    row = dict(zip(HEADER, FOUND.row(), strict=True))

    assert ("c", "4", "2", "1.000") == tuple(
        row[name] for name in ("case", "model MB", "received MB", "of minimum")
    )
    assert ("100", "200", "0.50", "0.25..0.50", "yes") == tuple(
        row[name] for name in ("rlflow ms", "gather ms", "ratio", "of pairs", "met")
    )


def test_json_has_every_second_and_the_figures_of_the_table():
    data = json.loads(json.dumps(FOUND.as_json()))

    assert [0.1, 1.0, 0.1] == data["ours"]
    assert (0.5, True) == (data["ratio"], data["passed"])


@pytest.mark.torch
@pytest.mark.slow
def test_a_small_case_runs_on_both_sides_with_the_least_bytes():
    tiny = Size(hidden=32, intermediate=64, layers=1, vocabulary=64)

    found = measured(CASES[0], tiny, pairs=1, warmup=1)

    assert ["collective", "shared memory"] == [each.transport for each in found]
    for each in found:
        assert 0 < each.received == each.minimum
