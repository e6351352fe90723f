"""Whole runs whose rollouts take newer weights on the way: versions token by token, same bits.

iteration     0  1  2  3 | 4  5  6       a checkpoint after every 4, staleness k=2
to the pause  0  0  0  1 | 4  4  4       max(i - 2, first of the segment)
after it      0  0  1  2 | 4  4  5       max(i - 1, first of the segment)
"""

from __future__ import annotations

import json

import pytest

from rlflow.runtime import durable
from tests.conftest import TINY
from tests.runtime.test_stale_runs import numbers, state, versions

pytestmark = pytest.mark.torch

AT = 3
ITERATIONS = 7
DECLARED = f"""
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    epochs: int = 1
    lr: float = 1e-3
    temperature: float = 1.0


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


def seen(version: list[list[int]], finished: list[bool]) -> dict[str, float]:
    before = [number for row in version for number in row[:{AT}]]
    after = [number for row in version for number in row[{AT}:]]
    found = {{"oldest": min(before), "older": max(before), "all": len(before) + len(after)}}
    found |= {{"newer": min(after), "newest": max(after)}} if after else {{}}
    stopped = sum(len(row) > {AT} for row in version)
    return found | {{"stopped": stopped, "ended": sum(finished)}}


def together(**options):
    return rf.Placement(pools={{"all": 1}}, assign={{"*": rf.on("all")}}, **options)


def apart(**options):
    assign = {{"*": rf.on("train"), "actor.rollout": rf.on("gen")}}
    return rf.Placement(pools={{"train": 1, "gen": 1}}, assign=assign, **options)


PLACEMENTS = {{f"together{{k}}": together(staleness=k, pause_at={AT}) for k in (1, 2)}}
PLACEMENTS |= {{f"apart{{k}}": apart(staleness=k, pause_at={AT}) for k in (1, 2)}}
PLACEMENTS |= {{f"whole{{k}}": apart(staleness=k) for k in (1, 2)}}


@rf.pipeline(placements=PLACEMENTS)
def paused(cfg: Config) -> None:
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6, temperature=cfg.temperature)
    ops.metrics(samples, function=seen, name="seen")
    reward = ops.reward(letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    loss = rf.PolicyLoss(correction=rf.ImportanceSampling(cap=3.0)) if cfg.epochs > 1 else None
    given = [ops.log_probs(actor, samples)] if cfg.epochs > 1 else []
    ops.update(actor, samples, adv, *given, loss=loss or rf.PolicyLoss(), epochs=cfg.epochs)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a run in a directory."""
    monkeypatch.chdir(tmp_path)

    def words(run, placement, *extra, resume=False):
        file = tmp_path / "paused.py"
        file.write_text(DECLARED)
        where = ("--resume", run) if resume else ("--run-dir", run)
        options = ("--placement", placement, "--devices", "cpu:2", "--threads", "1", *where, "-q")
        return ("run", file, *options, "--iterations", ITERATIONS, "--save-every", 4, *extra)

    return words


@pytest.fixture(scope="module")
def finished():
    """The directories of runs that are done, by what was run; tests only read them."""
    return {}


@pytest.fixture
def train(rlflow, command, finished, tmp_path_factory):
    """The run directory of a run, made once."""

    def call(*words):
        if words not in finished:
            run = tmp_path_factory.mktemp("paused") / "run"
            result = rlflow(*command(run, *words))
            assert 0 == result.code, result.err
            finished[words] = run
        return finished[words]

    return call


def sampled(line: dict[str, float]) -> dict[str, float]:
    """What of an iteration's numbers follows from its tokens alone."""
    length = "actor.rollout.resumed/length"
    names = ("judged/mean", "judged/std", length, f"{length}_max", "actor.rollout/paused")
    return {name: line[name] for name in (*names, "seen/stopped", "seen/ended")}


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("placement", ["together", "apart"])
def test_tokens_after_the_pause_are_one_update_newer(train, placement, staleness):
    lines = numbers(train(f"{placement}{staleness}"))
    older, newer = versions(staleness), versions(staleness - 1)
    assert (
        older == [line["seen/oldest"] for line in lines] == [line["seen/older"] for line in lines]
    )
    assert newer == [line["seen/newer"] for line in lines]
    assert newer == [line["seen/newest"] for line in lines]
    most = [i - version for i, version in enumerate(older)]
    assert most == [line["actor.update/staleness/max"] for line in lines]
    for i, line in enumerate(lines):
        mean = line["actor.update/staleness/mean"]
        assert i - newer[i] < mean < i - older[i] or older[i] == newer[i] == i - mean


@pytest.mark.parametrize("staleness", [1, 2])
def test_colocated_and_split_runs_have_the_same_bits(train, staleness):
    assert state(train(f"together{staleness}")) == state(train(f"apart{staleness}"))


@pytest.mark.slow
def test_several_corrected_steps_have_the_same_bits_in_every_placement(train):
    words = ("--set", "epochs=2")
    assert state(train("together2", *words)) == state(train("apart2", *words))


def test_lengths_are_those_of_whole_responses(train):
    for line in numbers(train("apart1")):
        assert {"actor.rollout/length", "actor.rollout/finished"}.isdisjoint(line)
        assert 16 * line["actor.rollout.resumed/length"] == pytest.approx(line["seen/all"])
        assert 16 * line["actor.rollout.resumed/finished"] == line["seen/ended"]
        assert AT < line["actor.rollout.resumed/length_max"] <= 6
        assert 16 * line["actor.rollout/paused"] == line["seen/stopped"]
        assert line["actor.rollout/paused"] == line["actor.rollout.resumed/resumed"]
    shares = [line["actor.rollout/paused"] for line in numbers(train("apart1"))]
    assert 0 < min(shares) < 1


def test_tokens_after_a_pause_are_nearer_to_the_weights_that_learn_from_them(train):
    """Before an update nothing is newer: then a pause changes nothing but rounding."""
    whole, paused = numbers(train("whole1")), numbers(train("apart1"))
    assert whole[0]["actor.rollout/length"] == paused[0]["actor.rollout.resumed/length"]
    for name in ("judged/mean", "actor.update/grad_norm"):
        assert pytest.approx(whole[0][name], rel=1e-4) == paused[0][name]
    gaps = [[line["actor.update/rollout_gap"] for line in lines] for lines in (whole, paused)]
    assert max(gaps[0][0], gaps[1][0]) < 1e-5
    assert all(one > 1e-4 for one in gaps[0][1:4])
    assert sum(gaps[1]) < sum(gaps[0])


def test_with_equal_weights_a_pause_changes_no_token(train):
    """At a high temperature the tokens after the pause show which random numbers drew them."""
    words = ("--set", "temperature=3.0", "--set", "lr=1e-12", "--iterations", 2)
    whole, paused = numbers(train("whole1", *words)), numbers(train("apart1", *words))
    for one, two in zip(whole, paused, strict=True):
        assert one["actor.rollout/length"] == two["actor.rollout.resumed/length"] > 4
        assert one["judged/mean"] == two["judged/mean"]


def test_a_plan_shows_the_pause_and_a_run_keeps_it(train):
    plan = json.loads((train("apart2") / "plan.json").read_text())
    runs = {a["node"]: a["reads"] for a in plan["actions"] if a["kind"] == "run"}
    assert [["actor@gen", 2]] == runs["actor.rollout"]
    assert [["actor@gen", 1]] == runs["actor.rollout.resumed"]


def test_the_option_of_the_command_is_that_of_the_placement(train):
    assert state(train("whole2", "--pause-at", AT)) == state(train("apart2"))


@pytest.mark.parametrize("placement", ["together1", "apart1"])
def test_chunks_of_a_paused_rollout_make_the_same_tokens_and_losses(train, placement):
    one, four = numbers(train(placement)), numbers(train(placement, "--stream", "4"))
    for whole, chunks in zip(one, four, strict=True):
        assert whole.keys() == chunks.keys()
        assert pytest.approx(sampled(whole), rel=1e-12) == sampled(chunks)
        assert pytest.approx(whole, rel=1e-4, abs=1e-5) == chunks


@pytest.mark.parametrize(
    ("fault", "staleness"),
    [
        ("run:iteration=raise@6", 1),
        pytest.param("run:iteration=raise@6", 2, marks=pytest.mark.slow),
        pytest.param("run:iteration=raise@3", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_broke_continues_to_the_same_bits(
    rlflow, command, train, tmp_path, monkeypatch, fault, staleness
):
    whole, run = train(f"apart{staleness}"), tmp_path / "run"
    monkeypatch.setenv(durable.FAULT_VARIABLE, fault)
    durable.arm_from_environment()
    assert 1 == rlflow(*command(run, f"apart{staleness}")).code
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()
    assert 0 == rlflow(*command(run, f"apart{staleness}", resume=True)).code
    assert state(whole) == state(run)


def test_a_run_does_not_go_on_with_another_pause(rlflow, command, train, tmp_path):
    run = tmp_path / "run"
    assert 0 == rlflow(*command(run, "apart1", "--iterations", 1)).code
    more = ("--iterations", 2)
    result = rlflow(*command(run, "apart1", "--pause-at", AT + 1, *more, resume=True))
    assert 0 != result.code
    assert "error[E721]" in result.err
    assert 0 == rlflow(*command(run, "together1", *more, resume=True)).code


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--stream", "2")], ids=["whole", "chunks"])
def test_one_process_a_device_has_the_bits_of_one_process(train, words):
    here = train("apart2", *words)
    assert state(here) == state(train("apart2", *words, "--backend", "ray"))
