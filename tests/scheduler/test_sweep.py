"""Sweeps over cluster sizes: where another family wins, by curves whose crossing is known."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from rlflow.cli.planning.sweeping import swept_kind, swept_sizes
from rlflow.errors import Finding, PlanError, UsageError
from rlflow.report.charts.sweep import label_places, sweep_picture
from rlflow.scheduler.devices.cluster import cpu_cluster
from rlflow.scheduler.plan.period_range import Contest
from rlflow.scheduler.search import sweep
from rlflow.scheduler.search.families import placement_family
from rlflow.scheduler.search.search import Tried
from rlflow.scheduler.search.sweep import Crossover, sweep_sizes
from rlflow.scheduler.search.sweep_text import crossover_texts, sweep_text
from rlflow.scheduler.search.tune import Tuned
from tests.scheduler.examples import COLOCATE, SPLIT, compiled_with, grpo

PLACEMENTS = {"colocate": COLOCATE, "split": SPLIT}


@functools.cache
def plan_of(family):
    return compiled_with(grpo(), PLACEMENTS[family]).plan


def tried(family, period):
    placement, plan = PLACEMENTS[family], plan_of(family)
    timed = replace(plan, timing=replace(plan.timing, period=period))
    return Tried(name="", placement=placement, plan=timed)


def tuned(devices):
    """Colocated 640 / n + 2 seconds, split 720 / n + 1. Below 16 none fits.

    Equal at 80 devices; at 88 split takes less by less than 1 %, and has more pools.
    """
    if devices < 16:
        raise PlanError(Finding(code="E240", what="no placement fits"))
    found = [tried("colocate", 640 / devices + 2), tried("split", 720 / devices + 1)]
    return Tuned(
        rows=tuple(sorted(found, key=lambda one: one.period)),
        written=(),
        misfits={},
        refused={},
        looked_at=2,
        compiled=2,
        samples=512,
        graph=plan_of("split").graph,
        cluster=cpu_cluster(devices),
        tokens=512 * 100.0,
    )


def test_the_crossing_is_found_between_two_sizes():
    told = []
    found = sweep_sizes([8, 16, 32, 64, 128], tuned, "h100", told.append)
    crossover = Crossover(
        family="split", over="colocate", devices=96, before=88, times=1.0, told=False
    )
    assert (crossover,) == (replace(found.crossovers[0], times=1.0),)
    assert found.crossovers[0].times == pytest.approx((640 / 96 + 2) / (720 / 96 + 1))
    assert [8, 16, 32, 64, 80, 88, 96, 128] == [size.devices for size in found.sizes]
    assert [80, 88, 96] == [size.devices for size in found.sizes if size.between]
    assert ["colocate"] * 5 + ["split"] * 2 == [size.winner for size in found.sizes[1:]]
    (text,) = crossover_texts(found)
    assert text == (
        "split wins from 96 h100 on, 1.02x as fast as colocate there; colocate wins at 88"
    )
    assert len(found.sizes) == len(told)


def test_figures_of_a_size_by_hand():
    (size,) = sweep_sizes([128], tuned, "h100", str).sizes
    period = 720 / 128 + 1
    assert size.samples_per_second("split") == pytest.approx(512 / period)
    assert size.tokens_per_second("split") == pytest.approx(51200 / period)
    hours = 128 * period / 3600 / 51200 * 1e6
    assert size.hours_per_million("split") == pytest.approx(hours)


def test_the_table_the_json_and_the_picture_have_all_sizes():
    found = sweep_sizes([8, 16, 128], tuned, "h100", str)
    text = sweep_text(found, "grpo", 2.5)
    assert "8 devices: no placement fits" in text
    assert "cost / M tokens" in text
    document = found.as_json(2.5)
    assert [None, "colocate"] == [size["winner"] for size in document["sizes"][:2]]
    split = document["sizes"][-1]["families"]["split"]
    assert split["cost_per_million_tokens"] == 2.5 * split["device_hours_per_million_tokens"]
    svg = sweep_picture(found, "a sweep", "svg").decode()
    assert all(word in svg for word in ("colocate", "split", "from 96", "Throughput"))


def test_labels_of_near_crossings_are_below_each_other():
    """Those from 128 to 200 devices would lie over each other, and that of 2048 has no room."""
    pairs = [(16, 24), (120, 128), (176, 184), (192, 200), (1920, 2048)]
    crossed = [
        Crossover(family="split", over="hybrid", devices=b, before=a, times=1.1, told=True)
        for a, b in pairs
    ]
    places = [(0, "left"), (0, "left"), (1, "left"), (2, "left"), (0, "right")]
    assert places == label_places(crossed, [8, 16, 2048])


def test_what_fits_nowhere_and_what_is_wrong_is_raised():
    with pytest.raises(PlanError, match="E240"):
        sweep_sizes([2, 4, 8], tuned, "h100", str)

    def unknown(devices):
        raise PlanError(Finding(code="E241", what="a model of unknown size"))

    told = []
    with pytest.raises(PlanError, match="E241"):
        sweep_sizes([2, 4], unknown, "h100", told.append)
    assert 1 == len(told)


def test_the_text_says_from_where_a_winner_is_told_apart():
    """From the size on after which every one is told apart."""
    found = sweep_sizes([32, 64], tuned, "h100", str)
    for low, told in (
        ((1.2, 0.9), "within what is uncertain"),
        ((0.9, 1.2), "by more than what is uncertain from 64 on"),
        ((1.1, 1.2), "by more than what is uncertain from 32 on"),
    ):
        contests = [Contest(times=1.3, low=least, high=2.0, wins=0.9) for least in low]
        pairs = zip(found.sizes, contests, strict=True)
        sizes = tuple(replace(size, contest=each) for size, each in pairs)
        assert [f"colocate wins at every size; {told}"] == crossover_texts(
            replace(found, sizes=sizes)
        )


def test_more_devices_are_no_worse_than_fewer_and_idle_ones_are_said():
    """A search that finds less on 24 devices than on 16."""
    found = sweep_sizes(
        [16, 24, 32],
        lambda n: tuned(16.5 if n == 24 else n) if n < 32 else tuned(12 + n),
        "h100",
        str,
    )
    periods = [size.families[size.winner].period for size in found.sizes]
    assert periods == sorted(periods, reverse=True)


def test_a_family_wins_where_that_is_more_than_what_is_uncertain(monkeypatch):
    """From 96 devices on by the means, from 256 on by what is known; between nothing is said."""

    def of(first, second, costs):
        times = second.period / first.period
        return Contest(times=times, low=times / costs, high=times * costs, wins=0.9)

    monkeypatch.setattr(sweep, "contest_of", of)

    def searched(devices):
        return replace(tuned(devices), costs=1.3)

    found = sweep_sizes([32, 64, 128, 512], searched, "h100", str)
    (crossover,) = found.crossovers
    times = [(640 / n + 2) / (720 / n + 1) for n in (crossover.before, crossover.devices)]
    assert times[0] < 1.3 < times[1]
    assert crossover.told
    first, last = crossover_texts(found)
    assert first == (
        f"split wins from {crossover.devices} h100 on, 1.30x as fast as colocate there, by more"
        f" than what is uncertain; not yet at {crossover.before}"
    )
    assert last.startswith("shortest, but within what is uncertain: split at 128, ")
    assert (
        "colocate leads; no other" in crossover_texts(sweep_sizes([32, 128], searched, "h", str))[0]
    )


def test_one_winner_is_said_to_win_everywhere():
    found = sweep_sizes([16, 32], tuned, "h100", str)
    assert ["colocate wins at every size"] == crossover_texts(found)
    assert "colocate" == placement_family(found.sizes[0].families["colocate"])


@pytest.mark.parametrize(
    ("said", "sizes"),
    [
        ("devices=8..64", [8, 16, 32, 64]),
        ("devices=8..100", [8, 16, 32, 64, 100]),
        ("devices=8..8", [8]),
        ("devices=96,8,96", [8, 96]),
    ],
)
def test_sizes_are_doubled_or_listed(said, sizes):
    assert sizes == swept_sizes(said)


@pytest.mark.parametrize(
    "said", ["device=8..64", "8..64", "devices=64..8", "devices=0..8", "devices=8,x", "devices="]
)
def test_other_sweeps_are_refused(said):
    with pytest.raises(UsageError, match="E359"):
        swept_sizes(said)


def test_a_sweep_is_of_one_kind():
    assert ("h100", "") == swept_kind("h100:8")
    assert ("cpu", "@4GB") == swept_kind("cpu:2@4GB")
    for devices in (None, "h100:8,a100:8", "mine.toml"):
        with pytest.raises(UsageError, match="E359"):
            swept_kind(devices)
