"""Whole runs of loops: who is sampled how often, and what is left over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rlflow.cli.commands import Target, compile_target
from rlflow.runtime.local import LocalMachine
from rlflow.runtime.record.metrics import read_metrics
from rlflow.runtime.record.spans import read_spans
from rlflow.runtime.worker.worker import Worker
from tests.runtime.whole_runs import COUNTING, KEPT, MANY, MIXED, played, tensors

pytestmark = pytest.mark.torch

AT_MOST, BATCH, GROUPS, SAMPLES = 5, 4, 5, 4


def numbers(run):
    """The numbers of every iteration; those that `seen` has made are equal for all rows."""
    return [
        {
            name.removesuffix("_mean") if name.startswith("seen/") else name: value
            for name, value in line.metrics.items()
        }
        for line in read_metrics(run / "metrics.jsonl")
    ]


def trips_of(run):
    """How many trips each iteration has made, by the spans of what ran."""
    runs = [span for span in read_spans(run / "spans") if span.kind == "run"]
    ran = Counter(span.iteration for span in runs if span.node.partition("#")[0] == "prompts")
    return [ran[iteration] for iteration in sorted(ran)]


def test_trips_that_are_logged_are_those_that_ran(train):
    run = train(MIXED, "together")
    lines, ran = numbers(run), trips_of(run)
    assert ran == [line["enough/trips"] for line in lines]
    assert 2 <= len(set(ran))
    for line, trips in zip(lines, ran, strict=True):
        assert (GROUPS, GROUPS * SAMPLES) == (line["seen/groups"], line["seen/rows"])
        assert GROUPS * (SAMPLES - 1) == line["seen/together"]
        found = line["enough/kept"] * BATCH * trips
        assert GROUPS + line["enough/surplus"] == pytest.approx(found)
        assert (0.0, 1.0) == (line["enough/filled"], line["seen/sorted"])
        assert line["informative/share"] == pytest.approx(line["enough/kept"])


def test_every_trip_draws_prompts_of_its_own(train):
    """Groups are numbered by draw: iteration times at most trips, and the trip."""
    for iteration, line in enumerate(numbers(train(MIXED, "together"))):
        draws = range(AT_MOST * iteration, AT_MOST * (iteration + 1))
        assert line["seen/first"] in draws
        assert draws[0] + line["enough/trips"] - 1 >= line["seen/last"] >= line["seen/first"]
    named = [s.action for s in read_spans(train(MIXED, "together") / "spans") if s.iteration == 0]
    assert len(set(named)) == len(named)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="finish"),
        pytest.param(("--set", "ignore_eos=true"), id="prompts"),
    ],
)
def test_chunks_bring_the_same_tokens(train, words):
    whole, chunks = train(MIXED, "apart", *words), train(MIXED, "stream", *words)
    assert trips_of(whole) == trips_of(chunks)
    for one, many in zip(numbers(whole), numbers(chunks), strict=True):
        assert one.keys() == many.keys()
        assert one["seen/digest"] == many["seen/digest"]
        assert one == pytest.approx(many, rel=1e-4, abs=1e-5)
    assert tensors(whole) == tensors(chunks)


@pytest.mark.slow
def test_all_trips_of_an_iteration_sample_with_the_same_old_weights(train):
    for placement, lag in (("stale", 1), ("stale2", 2)):
        lines = numbers(train(MIXED, placement))
        versions = [max(i - lag, i // 4 * 4) for i in range(7)]
        assert versions == [line["seen/oldest"] for line in lines]
        assert versions == [line["seen/newest"] for line in lines]
        assert 2 <= max(line["enough/trips"] for line in lines)
        ages = [i - version for i, version in enumerate(versions)]
        assert ages == [line["actor.update/staleness/max"] for line in lines]


@pytest.mark.slow
def test_pauses_in_trips_take_newer_weights_in_every_placement(train):
    one, two = numbers(train(MIXED, "paused")), numbers(train(MIXED, "paused2"))
    assert trips_of(train(MIXED, "paused")) == trips_of(train(MIXED, "paused2"))
    assert [line["seen/digest"] for line in one] == [line["seen/digest"] for line in two]
    assert [0, 0, 1, 2, 4, 4, 5] == [line["seen/newest"] for line in one]
    assert [0, 0, 0, 1, 4, 4, 4] == [line["seen/oldest"] for line in one]


# --- what is left over ----------------------------------------------------------------------


def test_rows_left_over_come_first_in_the_next_iteration(train):
    """They are of the iteration before, trips and weights; a checkpoint drops them."""
    lines = numbers(train(KEPT, "together"))
    owed, lost = 0.0, 0
    for iteration, line in enumerate(lines):
        if iteration % 3 == 0:
            lost += owed > 0
            owed = 0.0
        first = AT_MOST * iteration
        assert 1.0 == line["seen/sorted"]
        assert (line["seen/first"] < first) == (owed > 0)
        assert line["seen/first"] >= first - AT_MOST
        assert iteration - (owed > 0) == line["seen/oldest"]
        assert line["actor.update/staleness/max"] == (owed > 0)
        assert GROUPS * SAMPLES == line["seen/rows"]
        owed = min(line["enough/surplus"], GROUPS)
    assert 2 <= sum(line["seen/first"] < AT_MOST * i for i, line in enumerate(lines))
    assert lost


@pytest.mark.slow
def test_they_spare_trips(train):
    dropped, kept = trips_of(train(MANY, "together")), trips_of(train(KEPT, "together"))
    assert kept[0] == dropped[0]
    assert sum(kept) < sum(dropped)


@pytest.mark.slow
def test_what_is_left_over_alone_may_be_enough(train):
    """One group is wanted and often more are mixed: the trip that runs all the same is kept."""
    lines = numbers(train(KEPT, "together", "--set", "groups=1"))
    assert {1.0} == {line["enough/trips"] for line in lines[1:3]}
    for iteration in (1, 2):
        assert lines[iteration]["seen/last"] < AT_MOST * iteration


@pytest.mark.slow
def test_another_distance_of_checkpoints_is_another_run_where_rows_are_kept(train, tmp_path):
    run = tmp_path / "run"
    assert 0 == train.begun(run, KEPT, "together", "--iterations", 1).code
    more = ("--iterations", 2, "--save-every", 2)
    result = train.begun(run, KEPT, "together", *more, option="--resume")
    assert 0 != result.code
    assert "error[E721]" in result.err


# --- rows without a reward ------------------------------------------------------------------


@pytest.mark.slow
def test_rows_without_a_reward_are_counted_as_the_mean_over_trips(train):
    """Groups with such a row count by their other rows, and plain numbers of trips may differ."""
    lines = numbers(train(MIXED, "together", "--iterations", 3, "--set", "lost=true"))
    failed = [line["letters_failures/failed"] * line["enough/trips"] for line in lines]
    assert failed == pytest.approx([round(count) for count in failed])
    assert any(line["letters_failures/failed"] % 1 for line in lines)
    assert all(count > 0 for count in failed)
    assert {GROUPS * SAMPLES} == {line["seen/rows"] for line in lines}


# --- too few --------------------------------------------------------------------------------


def test_too_few_groups_stop_the_run_with_what_was_found(train, tmp_path):
    run = tmp_path / "run"
    result = train.begun(run, MIXED, "together", "--set", "multiple=1", "--set", "at_most=2")
    assert 1 == result.code
    assert (
        "error[E766]: enough: 2 trips did not bring 5 groups in iteration 0\n"
        in result.err.splitlines(keepends=True)
    )
    assert "0 of 8 groups in 2 trips have informative" in result.err
    assert "mean reward 1: 8 groups" in result.err
    assert "expected     5 groups with a true informative" in result.err
    assert 'exhausted="fill"' in result.err
    assert "continue with: rlflow run" in result.err
    assert not list(read_metrics(run / "metrics.jsonl"))


@pytest.mark.slow
def test_others_fill_up_where_that_is_declared(train):
    words = ("together", "--set", "multiple=1", "--set", "at_most=2", "--set", "exhausted=fill")
    for line in numbers(train(MIXED, *words, "--iterations", 2)):
        assert (2.0, 0.0, 5.0) == tuple(line[f"enough/{n}"] for n in ("trips", "kept", "filled"))
        assert GROUPS * SAMPLES == line["seen/rows"]
        assert 0.0 == line["actor.update/grad_norm"]


# --- a state that goes round ----------------------------------------------------------------


@pytest.mark.rows(1)
@pytest.mark.parametrize("placement", ["together", "apart"])
def test_a_state_goes_round_until_every_row_is_done(train, placement):
    """Samples 0 to 3 of a prompt aim at 1, 2, 3 and 1: three trips, 4 * (1 + 2 + 3 + 1)."""
    for line in numbers(train(COUNTING, placement)):
        assert (3.0, 1.0) == (line["count/trips"], line["count/done"])
        assert (28.0, 3.0, 0.0, 0.0) == tuple(
            line[f"seen/{name}"] for name in ("total", "most", "short", "left")
        )


@pytest.mark.slow
def test_a_state_that_is_not_done_ends_as_it_is(train):
    """After two trips the samples that aim at 3 have 2: 4 * (1 + 2 + 2 + 1)."""
    words = ("together", "--set", "at_most=2")
    for line in numbers(train(COUNTING, *words)):
        assert (2.0, 0.75) == (line["count/trips"], line["count/done"])
        assert (24.0, 2.0, 4.0, 4.0) == tuple(
            line[f"seen/{name}"] for name in ("total", "most", "short", "left")
        )


@pytest.mark.rows(1)
@pytest.mark.parametrize(("most", "trips"), [(1, 1), (2, 2), (4, 4)])
def test_a_state_takes_as_many_trips_as_its_last_row(train, most, trips):
    words = ("together", "--iterations", 1, "--set", f"most={most}")
    run = train(COUNTING, *words)
    assert trips == numbers(run)[0]["count/trips"]
    grown = {s.action for s in read_spans(run / "spans") if s.node.startswith("grown")}
    assert trips == len(grown)


# --- what is kept in a process --------------------------------------------------------------


@pytest.mark.rows(1)
@pytest.mark.parametrize("what", [MIXED, COUNTING], ids=["gather", "state"])
@pytest.mark.parametrize("placement", ["together", "apart"])
def test_what_did_not_run_leaves_nothing_behind(what, placement):
    leaves_nothing(what, placement, "/trips")


def leaves_nothing(what, placement, outer):
    """Three iterations in this process, some with trips that do not run, and an empty store."""
    target = Target(pipeline=what.file, placement=placement, devices="cpu:2", threads=1)
    plan = compile_target(target).compiled.plan
    worker = Worker(plan, seed=0, near=Path(what.file))
    lines = played(plan, LocalMachine(plan, worker, threads=1))
    trips = [v for line in lines for name, v in line.items() if name.endswith(outer)]
    assert 3 == len(trips)
    assert min(trips) < max(a.trip.levels[0].of for a in plan.actions if a.trip)
    assert 0 == len(worker.store)
    assert {} == worker.store.surplus
