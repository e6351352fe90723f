"""Whole runs that sample from older weights: which versions, the same bits in every placement.

iteration    0  1  2  3 | 4  5  6       a checkpoint after every 4
version k=2  0  0  0  1 | 4  4  4       max(i - 2, first of the segment)
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
    batch: int = 4
    epochs: int = 1
    lr: float = 3e-4
    sevens: bool = False


def sevens(response: str) -> float:
    return float(response.count("7"))


def letters(response: str) -> float:
    return float(sum(map(ord, response)) % 5)


def seen(version: list[int]) -> dict[str, float]:
    tokens = [number for row in version for number in row]
    return {{"oldest": min(tokens), "newest": max(tokens), "tokens": len(tokens)}}


def together(**options):
    return rf.Placement(pools={{"all": 1}}, assign={{"*": rf.on("all")}}, **options)


def apart(**options):
    assign = {{"*": rf.on("train"), "actor.rollout": rf.on("gen")}}
    return rf.Placement(pools={{"train": 1, "gen": 1}}, assign=assign, **options)


PLACEMENTS = {{"together": together(), "apart": apart()}}
PLACEMENTS |= {{f"together{{k}}": together(staleness=k) for k in range(4)}}
PLACEMENTS |= {{f"apart{{k}}": apart(staleness=k) for k in range(4)}}


def declare(cfg, loss, **old):
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=cfg.lr))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=cfg.batch)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=6)
    ops.metrics(samples, function=seen, name="seen")
    reward = ops.reward(sevens if cfg.sevens else letters, samples, name="judged")
    adv = ops.advantage("grpo", samples, reward)
    given = [ops.log_probs(actor, samples)] if loss.correction and cfg.epochs > 1 else []
    ops.update(actor, samples, adv, *given, loss=loss, epochs=cfg.epochs)
"""

RATIO = """
@rf.pipeline(placements=PLACEMENTS)
def ratio(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss())
"""
WEIGHTS = """
@rf.pipeline(placements=PLACEMENTS)
def weights(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss(correction=rf.ImportanceSampling(cap=3.0)))
"""
SAID = """
@rf.pipeline(placements=PLACEMENTS, staleness=2)
def said(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss())
"""
CURRENT = """
@rf.pipeline(placements=PLACEMENTS)
def current(cfg: Config) -> None:
    declare(cfg, rf.PolicyLoss(old="current"))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a run of one of the pipelines in a directory."""
    monkeypatch.chdir(tmp_path)

    def words(run, placement, *extra, pipeline=RATIO, iterations=7, resume=False):
        file = tmp_path / "stale.py"
        file.write_text(DECLARED + pipeline)
        where = ("--resume", run) if resume else ("--run-dir", run)
        options = ("--placement", placement, "--devices", "cpu:2", "--threads", "1", *where, "-q")
        return ("run", file, *options, "--iterations", iterations, "--save-every", 4, *extra)

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
            run = tmp_path_factory.mktemp("stale") / "run"
            result = rlflow(*command(run, *words, **options))
            assert 0 == result.code, result.err
            finished[key] = run
        return finished[key]

    return call


def numbers(run: Path) -> list[dict[str, float]]:
    return [line.metrics for line in read_metrics(run / "metrics.jsonl")]


def state(run: Path) -> tuple[bytes, dict[str, bytes]]:
    """The bytes of the metrics, and of every tensor of the last checkpoint."""
    last = run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()
    tensors = {
        f"{file.stem}/{name}": tensor.contiguous().view(-1).numpy().tobytes()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return (run / "metrics.jsonl").read_bytes(), tensors


def versions(staleness: int, iterations: int = 7) -> list[int]:
    """The version that each iteration samples with, a checkpoint after every four."""
    return [max(i - staleness, i // 4 * 4) for i in range(iterations)]


@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("placement", ["together", "apart"])
def test_every_token_is_of_the_version_declared(train, placement, staleness):
    lines = numbers(train(f"{placement}{staleness}"))
    assert versions(staleness) == [line["seen/oldest"] for line in lines]
    assert versions(staleness) == [line["seen/newest"] for line in lines]
    if staleness:
        ages = [i - version for i, version in enumerate(versions(staleness))]
        assert ages == [line["actor.update/staleness/mean"] for line in lines]
        assert ages == [line["actor.update/staleness/max"] for line in lines]
    else:
        assert "actor.update/staleness/mean" not in lines[0]


@pytest.mark.parametrize("staleness", range(4))
def test_colocated_and_split_runs_have_the_same_bits(train, staleness):
    assert state(train(f"together{staleness}")) == state(train(f"apart{staleness}"))


def test_several_corrected_steps_have_the_same_bits_in_every_placement(train):
    """Weights are 1 but for rounding while the samples are of the weights that train on them."""
    options = {"pipeline": WEIGHTS, "iterations": 4}
    one = train("together2", "--set", "epochs=2", **options)
    assert state(one) == state(train("apart2", "--set", "epochs=2", **options))
    means = [line["actor.update/importance_mean"] for line in numbers(one)]
    assert pytest.approx(1, abs=1e-5) == means[0]
    assert all(abs(mean - 1) > 1e-4 for mean in means[1:])


@pytest.mark.parametrize("placement", ["together", "apart"])
def test_a_staleness_of_0_is_a_run_without_the_word(train, placement):
    plain, zero = train(placement), train(f"{placement}0")
    assert state(plain) == state(zero)
    first, second = (json.loads((run / "plan.json").read_text()) for run in (plain, zero))
    assert first["graph"] == second["graph"]
    assert first["actions"] == second["actions"]


def test_staleness_changes_what_is_sampled_after_the_first_update(train):
    synchronous, stale = numbers(train("apart0")), numbers(train("apart1"))
    assert synchronous[0]["judged/mean"] == stale[0]["judged/mean"]
    sampled = ("judged/mean", "actor.rollout/length")
    assert [[line[name] for name in sampled] for line in synchronous[1:4]] != [
        [line[name] for name in sampled] for line in stale[1:4]
    ]


def test_the_pipelines_word_holds_where_the_placement_is_silent(train):
    lines = numbers(train("apart", pipeline=SAID, iterations=4))
    assert versions(2, 4) == [line["seen/oldest"] for line in lines]
    lines = numbers(train("apart1", pipeline=SAID, iterations=4))
    assert versions(1, 4) == [line["seen/oldest"] for line in lines]


def test_a_loss_that_does_not_correct_is_refused_before_anything_runs(rlflow, command, tmp_path):
    run = tmp_path / "run"
    result = rlflow(*command(run, "apart1", pipeline=CURRENT))
    assert 4 == result.code
    assert "error[E402]: actor.update has no correction for rows" in result.err
    assert 'fix          loss=rf.PolicyLoss("ppo_clip", old="rollout")' in result.err
    assert not run.exists()
    assert 0 == rlflow(*command(run, "apart", pipeline=CURRENT, iterations=1)).code


@pytest.mark.parametrize(
    ("fault", "staleness"),
    [
        ("run:iteration=raise@6", 1),
        pytest.param("run:iteration=raise@3", 1, marks=pytest.mark.slow),
        pytest.param("run:iteration=raise@6", 3, marks=pytest.mark.slow),
        pytest.param("run:saved=raise@1", 2, marks=pytest.mark.slow),
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


def test_a_finished_run_goes_on_from_its_checkpoint(rlflow, command, train, tmp_path):
    run = tmp_path / "run"
    assert 0 == rlflow(*command(run, "apart2", iterations=4)).code
    assert 0 == rlflow(*command(run, "apart2", iterations=7, resume=True)).code
    assert state(train("apart2")) == state(run)


@pytest.mark.ray
@pytest.mark.parametrize("staleness", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_one_process_a_device_has_the_bits_of_one_process(train, staleness):
    here = train(f"apart{staleness}")
    assert state(here) == state(train(f"apart{staleness}", "--backend", "ray"))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [RATIO, WEIGHTS], ids=["ratio", "weights"])
def test_it_learns_from_samples_that_are_two_updates_old(train, pipeline):
    words = ("--set", "batch=16", "--set", "sevens=true", "--set", "lr=0.001")
    rewards = [
        line["judged/mean"]
        for line in numbers(train("apart2", *words, pipeline=pipeline, iterations=40))
    ]
    assert sum(rewards[:5]) < 2
    assert sum(rewards[-5:]) > 20
