"""Ranges of periods: worlds by hand, pairs of plans, figures that are what their sources say."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from rlflow.graph.user.lengths import read_lengths
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import ResponseLengths, scaled_lengths
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.passes.order import periodic_problem
from rlflow.scheduler.periodic.problem import Kernel, timed_kernel
from rlflow.scheduler.plan.diff import compare, contest_text, diff_text
from rlflow.scheduler.plan.period_range import Contest, PeriodRange, contest, quantile
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.simulate import ranges, uncertainty
from rlflow.scheduler.simulate.ranges import period_range
from rlflow.scheduler.simulate.uncertainty import WORLDS, normal_draws, rates
from tests.scheduler.examples import COLOCATE, SPLIT, grpo

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "benchmarks/results/published.md"


def planned(placement, devices="h100:2", words="", name="placement"):
    graph = replace(grpo(), lengths=read_lengths(words) if words else None)
    cluster = parse_cluster(devices, 1)
    plan = compile_plan(graph, placement, cluster, name=name).plan
    shapes = {model.name: model_shape(model, None) for model in graph.models}
    return plan, Costs(graph=plan.graph, cluster=cluster, shapes=shapes, backend=plan.backend)


@pytest.mark.parametrize("placement", [COLOCATE, SPLIT], ids=["colocate", "split"])
def test_each_world_is_the_plan_with_its_seconds(placement, monkeypatch):
    """Periods of worlds are those that pass `timing` finds of plans with such seconds."""
    plan, costs = planned(placement)
    seen = []
    periods = ranges._periods

    def kept(seconds, arcs, products):
        seen.append(products)
        return periods(seconds, arcs, products)

    monkeypatch.setattr(ranges, "_periods", kept)
    found = period_range(plan, costs)
    assert WORLDS == len(found.periods)
    for world in range(0, WORLDS, 17):
        actions = tuple(
            replace(a, cost=replace(a.cost, seconds=a.cost.seconds * factors[world]))
            for a, factors in zip(plan.actions, seen[0], strict=True)
        )
        problem = periodic_problem(replace(plan, actions=actions))
        kernel = Kernel(order=tuple(range(len(actions))), ahead=(0,) * len(actions))
        assert found.periods[world] == pytest.approx(timed_kernel(problem, kernel).period)


def test_ranges_are_the_same_each_time_and_around_the_estimate():
    plan, costs = planned(COLOCATE)
    found = period_range(plan, costs)
    assert found == period_range(plan, costs) != period_range(plan, costs, seed=1)
    assert found.low < plan.timing.period < found.high
    assert found.median == pytest.approx(plan.timing.period, rel=0.1)
    assert sum(share for _, share in found.shares) == pytest.approx(1)


def test_lengths_that_are_said_narrow_a_range():
    """A long rollout decides; its assumed lengths are what is least sure of it."""
    assumed, said = planned(COLOCATE), planned(COLOCATE, words="response=mean:4,p95:7")
    wide, narrow = (period_range(*each) for each in (assumed, said))
    assert narrow.high / narrow.low < wide.high / wide.low
    assert "lengths" not in dict(narrow.shares)


def test_a_plan_beside_itself_is_no_faster_and_is_told_apart_from_half_of_its_seconds():
    found = period_range(*planned(COLOCATE))
    same = contest(found, found)
    assert (1.0, 1.0, 1.0, 0.0, False) == (same.times, same.low, same.high, same.wins, same.told)
    half = contest(PeriodRange(periods=tuple(p / 2 for p in found.periods)), found)
    assert (half.times, half.wins, half.told) == (pytest.approx(2.0), 1.0, True)


def test_the_words_name_the_faster_one():
    slower = Contest(times=0.8, low=0.5, high=1.25, wins=0.25)
    assert (
        "b is 1.25x as fast as a, 0.80x to 2.00x in 90 % of the worlds: not told apart"
        " (faster in 75 %)"
    ) == contest_text("a", "b", slower)
    told = Contest(times=2.0, low=1.5, high=2.5, wins=1.0)
    assert contest_text("a", "b", told).endswith(": more than what is uncertain")


def test_diff_compares_worlds_and_saved_plans_keep_them(tmp_path):
    pairs = (planned(COLOCATE, name="colocate"), planned(SPLIT, name="split"))
    plans = [replace(plan, range=period_range(plan, costs)) for plan, costs in pairs]
    text = diff_text(compare(*plans))
    assert "range, 90 %" in text
    assert " as fast as " in text
    for plan in plans:
        (tmp_path / f"{plan.placement}.json").write_text(dump_plan(plan))
    saved = [read_plan(tmp_path / f"{plan.placement}.json") for plan in plans]
    assert text == diff_text(compare(*saved))
    assert plan_text(plans[0]) == plan_text(saved[0])
    assert plans[0].hash == replace(plans[0], range=None, inputs=()).hash


def test_worlds_are_standard_normal_and_fall_evenly():
    values = normal_draws("anything")
    assert fmean(values) == pytest.approx(0, abs=1e-9)
    assert pstdev(values) == pytest.approx(1, rel=0.02)
    assert values == normal_draws("anything") != normal_draws("other")
    logs = [math.log(value) for value in rates("layout", 0.3, 0.4)]
    assert pstdev(logs) == pytest.approx(math.sqrt(0.3**2 + 0.4**2 / 2), rel=0.1)


def test_scaled_lengths_scale_what_is_not_fixed():
    fixed = ResponseLengths(100, 100.0, 0.0)
    assert fixed == scaled_lengths(fixed, 2.0, 2.0)
    assert 60.0 == scaled_lengths(ResponseLengths(100, 40.0), 1.5, 1.0).mean
    assert scaled_lengths(ResponseLengths(100, 90.0), 4.0, 1.0).mean < 100


def test_quantiles_lie_between_neighbours():
    assert (1, 2.5, 4) == tuple(quantile([4, 1, 3, 2], share) for share in (0, 0.5, 1))


def published_ratios():
    """ln(predicted / measured) of the counted rows, by quantity."""
    rows = PUBLISHED.read_text().partition("## Rows that count")[2].partition("\n## ")[0]
    found = {}
    for line in rows.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and re.fullmatch(r"[\d.]+", cells[4]):
            found.setdefault(cells[1], []).append(math.log(float(cells[4])))
    return found


def rms(values):
    return math.sqrt(fmean(value**2 for value in values))


def test_spreads_of_rates_are_the_residuals_of_published_rows():
    of = published_ratios()
    assert uncertainty.ITERATION == pytest.approx(rms(of["iteration"]), abs=0.03)
    assert uncertainty.GENERATION == pytest.approx(rms(of["generation"]), abs=0.03)
    assert uncertainty.TRAINING == pytest.approx(rms(of["training"]), abs=0.03)
    assert uncertainty.FORWARD == pytest.approx(
        rms([*of["old_log_probs"], *of["reference"]]), abs=0.03
    )
    assert uncertainty.COPIES == pytest.approx(rms(of["sync"]), abs=0.03)


def test_the_spread_of_assumed_means_is_that_of_published_settings():
    settings = tomllib.loads((ROOT / "benchmarks/published/results.toml").read_text())["setting"]
    shares = [
        s["response_mean"] / s["response_limit"]
        for s in settings
        if s.get("response_mean", 0) and s["response_mean"] < s.get("response_limit", 0)
    ]
    assert len(shares) >= 50
    spread = rms([math.log(share / 0.5) for share in shares])
    assert uncertainty.ASSUMED_MEAN == pytest.approx(spread, abs=0.03)


def test_spreads_of_cpu_devices_are_those_of_measured_iterations():
    text = (ROOT / "benchmarks/results/prediction.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    table, told, measured = zip(*(map(int, row) for row in rows), strict=True)
    for said, spread in ((table, uncertainty.CPU_TABLE), (told, uncertainty.MEASURED)):
        errors = [math.log(one / other) for one, other in zip(said, measured, strict=True)]
        assert spread == pytest.approx(rms(errors), abs=0.05)
