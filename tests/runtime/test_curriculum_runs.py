"""Prompts drawn by pass rates in whole runs: resumed to the bit, the same in each placement.

iteration          0  1  2  3  4  5
version, k = 0     0  1  2  3  4  5     of the pass rates that prompts read
version, k = 1     0  0  1  2  3  4     also just after a checkpoint
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlflow.runtime import durable
from rlflow.runtime.metrics import read_metrics
from tests.conftest import TINY

pytestmark = pytest.mark.torch

DECLARED = f"""
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    tracked: str = "plain"
    by: str = "level"


def letters(response: str) -> float:
    return (sum(map(ord, response)) % 5) / 4


def exact(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def counts(level: list[str]) -> dict[str, float]:
    return {{n: level.count(n) for n in "123"}}


def together(**options):
    return rf.Placement(pools={{"all": 1}}, assign={{"*": rf.on("all")}}, **options)


def apart(train=1, gen=1, **options):
    assign = {{"*": rf.on("train"), "actor.rollout": rf.on("gen")}}
    return rf.Placement(pools={{"train": train, "gen": gen}}, assign=assign, **options)


@rf.pipeline(placements={{
    "together": together(),
    "apart": apart(),
    "pooled": rf.Placement(
        pools={{"all": 1}}, assign={{k: rf.on("all") for k in ("*", "prompts", "passes")}}
    ),
    "streamed": apart(stream=2),
    "late": together(staleness=1),
    "late_apart": apart(staleness=1),
    "ranks": apart(1, 2, staleness=1),
}})
def levels(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=3e-4))
    sources = {{str(n): rf.data.arithmetic(digits=n, test_size=90) for n in (1, 2, 3)}}
    passes = rf.PassRates("passes", by=cfg.by, floor=0.2)
    data = rf.data.mix(sources, column="level")
    if cfg.by == "row_id":
        data = rf.data.arithmetic(digits=1, test_size=90)

    def attempt():
        prompts = ops.prompts(data, batch=4, weights=passes)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=5)
        reward = ops.reward(exact if cfg.tracked == "inside" else letters, samples)
        if cfg.tracked == "inside":
            ops.track(passes, samples, reward)
        if cfg.tracked == "plain":
            return samples, reward
        return samples, reward, ops.informative(samples, reward)

    if cfg.tracked == "plain":
        batch = attempt()
    else:
        batch = (ops.repeat(
            attempt, until="informative", groups=4, at_most=3, expected=2, exhausted="fill"
        ),)
    if cfg.tracked != "inside":
        ops.track(passes, *batch)
    if cfg.by == "level":
        ops.metrics(*batch, function=counts, name="counts")
    loss = rf.PolicyLoss(correction=rf.ImportanceSampling())
    ops.update(actor, *batch, ops.advantage("grpo", *batch), loss=loss)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a run in a directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "levels.py"
    file.write_text(DECLARED)

    def words(run, placement, *extra, iterations=4, every=2, resume=False):
        where = ("--resume", run) if resume else ("--run-dir", run)
        options = ("--placement", placement, "--devices", "cpu:3", "--threads", "1", *where, "-q")
        saved = ("--iterations", iterations, "--save-every", every)
        return ("run", file, *options, *saved, *extra)

    return words


@pytest.fixture(scope="module")
def finished():
    """The directories of runs that are done, by what was run; tests only read them."""
    return {}


@pytest.fixture
def ran(rlflow, command, finished, tmp_path_factory):
    """The directory of a run, made once."""

    def call(placement, *extra):
        if (placement, *extra) not in finished:
            run = tmp_path_factory.mktemp(placement) / "run"
            result = rlflow(*command(run, placement, *extra))
            assert 0 == result.code, result.err
            finished[placement, *extra] = run
        return finished[placement, *extra]

    return call


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()


def kept(run: Path):
    """What nodes keep at the last checkpoint."""
    text = (last_checkpoint(run) / "manifest.json").read_text()
    return json.loads(text)["state"]["nodes"]


def state(run: Path):
    """The bytes of the metrics, of what nodes keep and of every tensor of the last checkpoint."""
    last = last_checkpoint(run)
    tensors = {
        f"{file.stem}/{name}": tensor.contiguous().view(-1).numpy().tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return last.name, (run / "metrics.jsonl").read_bytes(), kept(run), tensors


def numbers(run: Path, start: str):
    lines = read_metrics(run / "metrics.jsonl")
    return [
        {name: value for name, value in line.metrics.items() if name.startswith(start)}
        for line in lines
        if line.iteration < 4
    ]


INSIDE, BEHIND, BY_ROW = (
    ("--set", word) for word in ("tracked=inside", "tracked=behind", "by=row_id")
)


@pytest.mark.parametrize(
    ("extra", "placements"),
    [
        ((), ("apart",)),
        (INSIDE, ("apart",)),
        pytest.param((), ("pooled", "streamed"), marks=pytest.mark.slow),
        pytest.param(BEHIND, ("apart",), marks=pytest.mark.slow),
        pytest.param(BY_ROW, ("pooled",), marks=pytest.mark.slow),
    ],
)
def test_every_placement_gives_the_same_bits(ran, extra, placements):
    expected = state(ran("together", *extra))
    for placement in placements:
        assert expected == state(ran(placement, *extra)), placement


@pytest.mark.parametrize("extra", [(), pytest.param(INSIDE, marks=pytest.mark.slow)])
def test_stale_runs_give_the_same_bits_in_every_placement(ran, extra):
    assert state(ran("late", *extra)) == state(ran("late_apart", *extra))


@pytest.mark.parametrize(("placement", "lag"), [("together", 1), ("late", 2)])
def test_prompts_read_the_version_that_is_declared(ran, placement, lag):
    """What is measured in iteration i is read in iteration i + 1 + k, checkpoints or not."""
    run = ran(placement)
    read = numbers(run, "prompts/rate/")
    seen, passed = dict.fromkeys("123", 0.0), dict.fromkeys("123", 0.0)
    versions = [dict.fromkeys("123", 0.5)]
    for count, measured in zip(numbers(run, "counts/"), numbers(run, "passes/"), strict=True):
        for level in "123":
            if n := count[f"counts/{level}"]:
                seen[level] = 0.9 * seen[level] + n
                passed[level] = 0.9 * passed[level] + n * measured[f"passes/passed/{level}"]
        versions.append({level: (0.5 + passed[level]) / (1 + seen[level]) for level in "123"})
    for iteration, line in enumerate(read):
        expected = versions[max(iteration + 1 - lag, 0)]
        got = {level: line[f"prompts/rate/{level}"] for level in "123"}
        assert pytest.approx(expected) == got, iteration
    assert len({tuple(line.values()) for line in read}) > lag


def test_a_loop_tracks_and_draws_in_every_trip(ran):
    run = ran("together", *INSIDE)
    trips = sum(line["repeat/trips"] for line in numbers(run, "repeat/trips"))
    found = kept(run)["passes"]
    drawn = [value for key, value in found.items() if key.startswith("drawn/")]
    assert trips > 4
    assert 4 * trips == sum(drawn)
    assert [4.0, 3.0] == [found["newest"], found["oldest"]]


@pytest.mark.slow
def test_behind_a_loop_only_its_rows_are_tracked(ran):
    read = numbers(ran("together", *BEHIND), "counts/")
    assert [8.0] * 4 == [sum(line.values()) for line in read]


@pytest.fixture
def broken(rlflow, command, tmp_path, monkeypatch):
    """A run that breaks in iteration 3, one after a checkpoint; returns its directory."""

    def call(placement, *extra):
        run = tmp_path / "broken"
        monkeypatch.setenv(durable.FAULT_VARIABLE, "run:iteration=raise@4")
        durable.arm_from_environment()
        result = rlflow(*command(run, placement, *extra))
        monkeypatch.delenv(durable.FAULT_VARIABLE)
        durable.arm_from_environment()
        assert 1 == result.code, result.err
        assert "iteration-000002" == last_checkpoint(run).name
        return run

    return call


@pytest.mark.parametrize(
    ("placement", "extra"),
    [("late_apart", ()), pytest.param("late_apart", INSIDE, marks=pytest.mark.slow)],
)
def test_a_broken_run_resumed_is_one_that_was_not(rlflow, command, ran, broken, placement, extra):
    whole, run = ran(placement, *extra), broken(placement, *extra)
    assert 0 == rlflow(*command(run, placement, *extra, resume=True)).code
    assert state(whole) == state(run)


def test_a_resumed_run_without_its_pass_rates_would_differ(
    rlflow, command, ran, broken, monkeypatch
):
    """The check that the test above can fail: forget what nodes keep, and the bits differ."""
    whole, run = ran("late_apart"), broken("late_apart")
    monkeypatch.setattr("rlflow.runtime.local.saved_states", lambda state: {})
    assert 0 == rlflow(*command(run, "late_apart", resume=True)).code
    assert state(whole) != state(run)


@pytest.mark.ray
@pytest.mark.slow
def test_on_ray_prompts_are_the_same(ran):
    """Both run in the worker of the host: the rollout is shared out over two ranks."""
    here = ran("late_apart", "--backend", "local")
    ray = ran("late_apart", "--backend", "ray")
    assert kept(here) == kept(ray)
    for start in ("prompts/", "passes/", "counts/"):
        assert numbers(here, start) == numbers(ray, start)
    assert 4 == len(numbers(ran("ranks"), "prompts/"))
