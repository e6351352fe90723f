"""Whole runs of loops: who is sampled how often, what is left over, and the same bits everywhere.

A group of 4 samples is mixed where the letters of some sum up to a multiple of 5 and those of
others do not; 5 such groups are wanted of 4 prompts a trip.
"""

from __future__ import annotations

from collections import Counter

import pytest

from rlflow.commands import Target, compile_target
from rlflow.runtime import durable
from rlflow.runtime.local import LocalMachine
from rlflow.runtime.metrics import read_metrics
from rlflow.runtime.spans import read_spans
from rlflow.runtime.worker import Worker
from tests.conftest import TINY
from tests.runtime.on_ray.test_stream_runs import played
from tests.runtime.test_stale_runs import state

pytestmark = pytest.mark.torch

AT_MOST, BATCH, GROUPS, SAMPLES = 5, 4, 5, 4
DECLARED = f"""
import zlib
from typing import TypedDict
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    exhausted: str = "error"
    surplus: str = "drop"
    at_most: int = {AT_MOST}
    groups: int = {GROUPS}
    multiple: int = 5
    ignore_eos: bool = False


def letters(response: str, multiple: int) -> float:
    return float(sum(map(ord, response)) % multiple == 0)


class Seen(TypedDict):
    digest: rf.Row[float]
    groups: rf.Row[float]
    rows: rf.Row[float]
    together: rf.Row[float]
    first: rf.Row[float]
    last: rf.Row[float]
    sorted: rf.Row[float]
    oldest: rf.Row[float]
    newest: rf.Row[float]


@rf.op(per="batch")
def seen(response: rf.Row[str], group: rf.Row[int], version: rf.Token[int]) -> Seen:
    import torch
    from rlflow.batch import flat, strings
    group = group.tolist()
    trips = [number // {BATCH} for number in group]
    found = {{
        "digest": zlib.crc32("|".join(strings(response)).encode()) % 2**20,
        "groups": len(set(group)), "rows": len(group),
        "together": sum(a == b for a, b in zip(group, group[1:])),
        "first": min(trips), "last": max(trips), "sorted": trips == sorted(trips),
        "oldest": flat(version).min(), "newest": flat(version).max(),
    }}
    return {{name: torch.full((len(group),), float(value)) for name, value in found.items()}}


def together(**options):
    return rf.Placement(pools={{"all": 1}}, assign={{"*": rf.on("all")}}, **options)


def apart(**options):
    assign = {{"*": rf.on("train"), "actor.rollout": rf.on("gen"), "letters": rf.on("gen")}}
    return rf.Placement(pools={{"train": 1, "gen": 1}}, assign=assign, **options)


PLACEMENTS = {{"together": together(), "apart": apart(), "stream": apart(stream=4)}}
PLACEMENTS |= {{"stale": apart(staleness=1), "stale2": together(staleness=2)}}
PLACEMENTS |= {{"paused": apart(staleness=2, pause_at=2, stream=2)}}
PLACEMENTS |= {{"paused2": together(staleness=2, pause_at=2)}}


@rf.pipeline(placements=PLACEMENTS)
def mixed(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-3))

    def attempt():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch={BATCH})
        samples = ops.rollout(
            actor, prompts, n={SAMPLES}, max_new_tokens=6, temperature=1.5,
            ignore_eos=cfg.ignore_eos,
        )
        reward = ops.reward(letters, samples, multiple=cfg.multiple, name="letters")
        return samples, reward, ops.informative(samples, reward)

    batch = ops.repeat(
        attempt, until="informative", groups=cfg.groups, at_most=cfg.at_most,
        exhausted=cfg.exhausted, surplus=cfg.surplus, name="enough",
    )
    ops.metrics(seen(batch, name="look"), name="seen")
    ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())
"""
COUNTING = f"""
from typing import TypedDict
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    at_most: int = 4
    most: int = 3


@rf.op(per="row")
def begun(sample: rf.Row[int]) -> rf.Row[float]:
    return 0.0 * sample


@rf.op(per="row")
def target(sample: rf.Row[int], *, most: int) -> rf.Row[float]:
    return 1.0 + (sample % 4) % most


@rf.op(per="row")
def grown(count: rf.Row[float], target: rf.Row[float]) -> rf.Row[float]:
    return count + (count < target)


@rf.op(per="row")
def done(count: rf.Row[float], target: rf.Row[float]) -> rf.Row[bool]:
    return count >= target


class Seen(TypedDict):
    total: rf.Row[float]
    most: rf.Row[float]
    short: rf.Row[float]
    left: rf.Row[float]


@rf.op(per="batch")
def seen(count: rf.Row[float], target: rf.Row[float], done: rf.Row[bool]) -> Seen:
    short = target - count
    like = count.new_ones(len(count))
    return {{
        "total": count.sum() * like, "most": count.max() * like,
        "short": short.sum() * like, "left": (~done).sum() * like,
    }}


PLACEMENTS = {{
    "together": rf.Placement(pools={{"all": 1}}, assign={{"*": rf.on("all")}}),
    "apart": rf.Placement(
        pools={{"train": 1, "gen": 1}},
        assign={{"*": rf.on("train"), "actor.rollout": rf.on("gen"), "grown": rf.on("gen")}},
    ),
}}


@rf.pipeline(placements=PLACEMENTS)
def counting(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=4)
    aim = target(samples, most=cfg.most)

    def step(state):
        after = grown(state, aim).rename(count="grown")
        return after, done(after, aim)

    ended = ops.repeat(
        step, begun(samples).rename(count="begun"), until="done", at_most=cfg.at_most, name="count"
    )
    ops.metrics(seen(ended.only("count", "done"), aim, name="look"), name="seen")
    reward = ended.only("count").rename(reward="count")
    ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a run of one of the pipelines in a directory."""
    monkeypatch.chdir(tmp_path)

    def words(run, placement, *extra, text=DECLARED, resume=False):
        file = tmp_path / "loop.py"
        file.write_text(text)
        where = ("--resume", run) if resume else ("--run-dir", run)
        options = ("--placement", placement, "--devices", "cpu:2", "--threads", "1", *where, "-q")
        return ("run", file, *options, "--iterations", 7, "--save-every", 4, *extra)

    return words


@pytest.fixture(scope="module")
def finished():
    """The directories of runs that are done, by what was run; tests only read them."""
    return {}


@pytest.fixture
def train(rlflow, command, finished, tmp_path_factory):
    """The run directory of a run of one of the pipelines, made once."""

    def call(*words, **options):
        key = (*words, *options.items())
        if key not in finished:
            run = tmp_path_factory.mktemp("loops") / "run"
            result = rlflow(*command(run, *words, **options))
            assert 0 == result.code, result.err
            finished[key] = run
        return finished[key]

    return call


MANY = ("--set", "multiple=3", "--save-every", 3)
KEEP = (*MANY, "--set", "surplus=keep")


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
    run = train("together")
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
    for iteration, line in enumerate(numbers(train("together"))):
        draws = range(AT_MOST * iteration, AT_MOST * (iteration + 1))
        assert line["seen/first"] in draws
        assert draws[0] + line["enough/trips"] - 1 >= line["seen/last"] >= line["seen/first"]
    named = [s.action for s in read_spans(train("together") / "spans") if s.iteration == 0]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("words", [(), KEEP], ids=["drop", "keep"])
def test_colocated_and_split_runs_have_the_same_bits(train, words):
    assert state(train("together", *words)) == state(train("apart", *words))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((), id="finish"),
        pytest.param(("--set", "ignore_eos=true"), id="prompts", marks=pytest.mark.slow),
    ],
)
def test_chunks_bring_the_same_tokens(train, words):
    whole, chunks = train("apart", *words), train("stream", *words)
    assert trips_of(whole) == trips_of(chunks)
    for one, many in zip(numbers(whole), numbers(chunks), strict=True):
        assert one.keys() == many.keys()
        assert one["seen/digest"] == many["seen/digest"]
        assert one == pytest.approx(many, rel=1e-4, abs=1e-5)
    assert state(whole)[1] == state(chunks)[1]


def test_all_trips_of_an_iteration_sample_with_the_same_old_weights(train):
    for placement, lag in (("stale", 1), ("stale2", 2)):
        lines = numbers(train(placement))
        versions = [max(i - lag, i // 4 * 4) for i in range(7)]
        assert versions == [line["seen/oldest"] for line in lines]
        assert versions == [line["seen/newest"] for line in lines]
        assert 2 <= max(line["enough/trips"] for line in lines)
        ages = [i - version for i, version in enumerate(versions)]
        assert ages == [line["actor.update/staleness/max"] for line in lines]


def test_pauses_in_trips_take_newer_weights_in_every_placement(train):
    one, two = numbers(train("paused")), numbers(train("paused2"))
    assert trips_of(train("paused")) == trips_of(train("paused2"))
    assert [line["seen/digest"] for line in one] == [line["seen/digest"] for line in two]
    assert [0, 0, 1, 2, 4, 4, 5] == [line["seen/newest"] for line in one]
    assert [0, 0, 0, 1, 4, 4, 4] == [line["seen/oldest"] for line in one]


# --- what is left over ----------------------------------------------------------------------


def test_rows_left_over_come_first_in_the_next_iteration(train):
    """They are of the iteration before, trips and weights; a checkpoint drops them."""
    lines = numbers(train("together", *KEEP))
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


def test_they_spare_trips(train):
    dropped, kept = trips_of(train("together", *MANY)), trips_of(train("together", *KEEP))
    assert kept[0] == dropped[0]
    assert sum(kept) < sum(dropped)


def test_what_is_left_over_alone_may_be_enough(train):
    """One group is wanted and often more are mixed: the trip that runs all the same is kept."""
    lines = numbers(train("together", *KEEP, "--set", "groups=1"))
    assert {1.0} == {line["enough/trips"] for line in lines[1:3]}
    for iteration in (1, 2):
        assert lines[iteration]["seen/last"] < AT_MOST * iteration


def broken(rlflow, command, monkeypatch, run, fault, *words):
    monkeypatch.setenv(durable.FAULT_VARIABLE, fault)
    durable.arm_from_environment()
    assert 1 == rlflow(*command(run, *words)).code
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("together", *KEEP), id="keep"),
        pytest.param(("stale",), id="stale", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_broke_continues_to_the_same_bits(
    rlflow, command, train, tmp_path, monkeypatch, words
):
    """The fifth iteration is over, and the third or the fourth is saved."""
    whole, run = train(*words), tmp_path / "run"
    broken(rlflow, command, monkeypatch, run, "run:iteration=raise@6", *words)
    assert 0 == rlflow(*command(run, *words, resume=True)).code
    assert state(whole) == state(run)
    assert trips_of(whole)[4:] == trips_of(run)[4:]


@pytest.mark.slow
def test_another_distance_of_checkpoints_is_another_run_where_rows_are_kept(
    rlflow, command, tmp_path
):
    run = tmp_path / "run"
    assert 0 == rlflow(*command(run, "together", *KEEP, "--iterations", 1)).code
    more = ("--iterations", 2, "--save-every", 2)
    result = rlflow(*command(run, "together", *KEEP, *more, resume=True))
    assert 0 != result.code
    assert "error[E721]" in result.err


# --- rows without a reward ------------------------------------------------------------------


def test_rows_without_a_reward_are_counted_as_the_mean_over_trips(train):
    """Groups with such a row count by their other rows, and plain numbers of trips may differ."""
    text = DECLARED.replace(
        "    return float(sum(map(ord, response)) % multiple == 0)",
        "    total = sum(map(ord, response))\n"
        '    return float("nan") if total % 7 == 0 else float(total % multiple == 0)',
    ).replace('name="letters")', 'name="letters", on_error="drop_sample", max_failures=0.9)')
    lines = numbers(train("together", "--iterations", 3, text=text))
    failed = [line["letters_failures/failed"] * line["enough/trips"] for line in lines]
    assert failed == pytest.approx([round(count) for count in failed])
    assert any(line["letters_failures/failed"] % 1 for line in lines)
    assert all(count > 0 for count in failed)
    assert {GROUPS * SAMPLES} == {line["seen/rows"] for line in lines}


# --- too few --------------------------------------------------------------------------------


def test_too_few_groups_stop_the_run_with_what_was_found(rlflow, command, tmp_path):
    run = tmp_path / "run"
    result = rlflow(*command(run, "together", "--set", "multiple=1", "--set", "at_most=2"))
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


def test_others_fill_up_where_that_is_declared(train):
    words = ("together", "--set", "multiple=1", "--set", "at_most=2", "--set", "exhausted=fill")
    for line in numbers(train(*words, "--iterations", 2)):
        assert (2.0, 0.0, 5.0) == tuple(line[f"enough/{n}"] for n in ("trips", "kept", "filled"))
        assert GROUPS * SAMPLES == line["seen/rows"]
        assert 0.0 == line["actor.update/grad_norm"]


# --- a state that goes round ----------------------------------------------------------------


@pytest.mark.parametrize("placement", ["together", "apart"])
def test_a_state_goes_round_until_every_row_is_done(train, placement):
    """Samples 0 to 3 of a prompt aim at 1, 2, 3 and 1: three trips, 4 * (1 + 2 + 3 + 1)."""
    for line in numbers(train(placement, "--iterations", 2, text=COUNTING)):
        assert (3.0, 1.0) == (line["count/trips"], line["count/done"])
        assert (28.0, 3.0, 0.0, 0.0) == tuple(
            line[f"seen/{name}"] for name in ("total", "most", "short", "left")
        )


def test_a_state_that_is_not_done_ends_as_it_is(train):
    """After two trips the samples that aim at 3 have 2: 4 * (1 + 2 + 2 + 1)."""
    words = ("together", "--iterations", 2, "--set", "at_most=2")
    for line in numbers(train(*words, text=COUNTING)):
        assert (2.0, 0.75) == (line["count/trips"], line["count/done"])
        assert (24.0, 2.0, 4.0, 4.0) == tuple(
            line[f"seen/{name}"] for name in ("total", "most", "short", "left")
        )


@pytest.mark.parametrize(("most", "trips"), [(1, 1), (2, 2), (4, 4)])
def test_a_state_takes_as_many_trips_as_its_last_row(train, most, trips):
    words = ("together", "--iterations", 1, "--set", f"most={most}")
    run = train(*words, text=COUNTING)
    assert trips == numbers(run)[0]["count/trips"]
    grown = {s.action for s in read_spans(run / "spans") if s.node.startswith("grown")}
    assert trips == len(grown)


# --- what is kept in a process --------------------------------------------------------------


@pytest.mark.parametrize("text", [DECLARED, COUNTING], ids=["gather", "state"])
@pytest.mark.parametrize("placement", ["together", "apart"])
def test_what_did_not_run_leaves_nothing_behind(tmp_path, text, placement):
    file = tmp_path / "loop.py"
    file.write_text(text)
    target = Target(pipeline=str(file), placement=placement, devices="cpu:2", threads=1)
    plan = compile_target(target).compiled.plan
    worker = Worker(plan, seed=0, near=file)
    lines = played(plan, LocalMachine(plan, worker, threads=1))
    trips = [v for line in lines for name, v in line.items() if name.endswith("/trips")]
    assert 3 == len(trips)
    assert min(trips) < max(a.trip.of for a in plan.actions if a.trip)
    assert 0 == len(worker.store)
    assert {} == worker.store.surplus


# --- on Ray ---------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (DECLARED, ("apart", *KEEP)),
        pytest.param(DECLARED, ("stale",), marks=pytest.mark.extra),
        (DECLARED, ("stream",)),
        (COUNTING, ("apart", "--iterations", 2)),
    ],
    ids=["keep", "stale", "stream", "state"],
)
def test_one_process_a_device_has_the_bits_of_one_process(train, text, words):
    here, there = train(*words, text=text), train(*words, "--backend", "ray", text=text)
    assert trips_of(here) == trips_of(there)
    assert state(here) == state(there)
