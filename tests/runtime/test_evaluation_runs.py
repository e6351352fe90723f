"""Evaluations of weights: what a run has logged of its own comes out again, by every way to them.

Also within a run: an evaluation changes no bit of what is trained, wherever it runs.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest

import rlflow as rf
from rlflow.cli.config import load_pipeline
from rlflow.runtime.record.edges.reading import read_edge, recorded
from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import PIPELINES
from tests.runtime.whole_runs import GRPO, declared, last_checkpoint, plan_of, tensors

pytestmark = pytest.mark.torch

WATCHED = declared("watched", iterations=3, every=3, devices="cpu:3")


@pytest.fixture
def evaluated(rlflow, tmp_path, monkeypatch):
    """Evaluate by some words in an empty directory: the answer of `--json`."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        result = rlflow("eval", *words, "--threads", 1, "--json")
        assert 0 == result.code, result.err
        return json.loads(result.out)

    return call


def test_one_greedy_sample_is_what_the_run_has_logged_of_its_last_weights(train, evaluated):
    run = train(GRPO, "colocate")
    line = read_metrics(run / "metrics.jsonl")[-1]
    assert line.closing
    found = evaluated(run, "-n", 1)
    assert line.metrics["eval/reward"] == found["metrics"]["mean"]["value"]
    assert line.metrics["eval/length"] == found["length"]
    assert found["metrics"]["pass@1"] == found["metrics"]["mean"] == found["metrics"]["maj@1"]
    assert (512, 1, 0.0) == (found["prompts"], found["samples"], found["sampling"]["temperature"])


@pytest.mark.slow
def test_every_way_to_some_weights_samples_the_same(train, evaluated, rlflow, tmp_path):
    run, pipeline = train(GRPO, "colocate"), PIPELINES / "grpo_arithmetic.py"
    asked = ("-n", 4, "--limit", 12, "--max-new-tokens", 6, "--answer", "number")
    whole = evaluated(run, *asked)
    assert 0 == rlflow("export", run, "-o", tmp_path / "model").code
    moved = tmp_path / "moved" / "iteration-000003"
    shutil.copytree(last_checkpoint(run), moved)
    ways = {
        "checkpoint": (last_checkpoint(run),),
        "iteration": (run, "--iteration", 3, "--placement", "split"),
        "model": (tmp_path / "model", "--pipeline", pipeline),
        "loose": (moved, "--pipeline", pipeline, "--node", "eval"),
    }
    for name, words in ways.items():
        found = evaluated(*words, *asked)
        assert whole["metrics"] == found["metrics"], name
    other = evaluated(run, *asked, "--seed", 1)
    assert whole["metrics"] != other["metrics"]
    assert ["evals", "model", "moved"] == sorted(path.name for path in tmp_path.iterdir())
    assert not list((tmp_path / "evals").glob(".weights*"))


def test_all_samples_are_recorded_for_a_look_at_the_worst(train, evaluated, rlflow, tmp_path):
    found = evaluated(train(GRPO, "colocate"), "-n", 2, "--limit", 3, "--run-dir", "mine")
    assert {"actor.rollout": (0,), "reward": (0,)} == {
        name: tuple(files) for name, files in recorded(tmp_path / "mine").items()
    }
    rows = json.loads(rlflow("samples", "mine", "--sort", "reward", "--json").out)
    assert 6 == len(rows)
    assert found["metrics"]["mean"]["value"] == pytest.approx(sum(r["reward"] for r in rows) / 6)
    assert ([], "mine") == (list((tmp_path / "mine" / "checkpoints").iterdir()), found["run_dir"])
    assert (
        "actor after 3 iterations"
        in json.loads((tmp_path / "mine/run.json").read_text())["evaluated"]
    )


def test_a_program_has_what_the_command_prints(train, rlflow, tmp_path, monkeypatch, capsys):
    run = train(GRPO, "colocate")
    monkeypatch.chdir(tmp_path)
    asked = {"samples": 2, "limit": 4, "answer": lambda response: response[:1]}
    found = rf.eval(run, **asked, threads=1)
    assert ("", "") == tuple(capsys.readouterr())
    assert {1, 2} == found.pass_at.keys() == found.maj_at.keys()
    assert found.mean.low <= found.mean.value <= found.mean.high
    assert found.mean.value == pytest.approx(found.samples()["reward"].mean())
    assert f"mean reward {found.mean.value:.4f} [{found.mean.low:.4f}" in str(found)
    assert "actor after 3 iterations" in found._repr_html_()

    pipeline = load_pipeline(str(PIPELINES / "grpo_arithmetic.py"))
    placed = rf.eval(pipeline, placement=pipeline.placements["colocate"], limit=4, threads=1)
    words = ("eval", PIPELINES / "grpo_arithmetic.py", "--limit", 4, "--threads", 1, "--json")
    assert placed.as_json()["metrics"] == json.loads(rlflow(*words).out)["metrics"]


@pytest.mark.slow
@pytest.mark.ray
def test_workers_of_ray_sample_the_same(train, evaluated):
    run, asked = train(GRPO, "colocate"), ("-n", 2, "--limit", 12)
    here = evaluated(run, *asked)
    assert here["metrics"] == evaluated(run, *asked, "--backend", "ray")["metrics"]


@pytest.mark.skipif("RLFLOW_SGLANG_PYTHON" not in os.environ, reason="no interpreter is named")
@pytest.mark.slow
@pytest.mark.sglang
def test_an_engine_of_its_own_is_given_the_weights_of_a_checkpoint(train, evaluated, tmp_path):
    run, asked = train(GRPO, "colocate"), ("-n", 1, "--limit", 24)
    here = evaluated(run, *asked, "--run-dir", "here")
    there = evaluated(run, *asked, "--run-dir", "there", "--placement", "sglang")
    tokens = [read_edge(tmp_path / f, "actor.rollout", 0)["response"] for f in ("here", "there")]
    assert tokens[0].to_pylist() == tokens[1].to_pylist()
    assert here["metrics"] == there["metrics"]


def test_rows_of_a_file_are_asked_by_the_columns_that_it_has(train, evaluated, tmp_path):
    rows = [{"question": f"{i}+1=", "sum": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--prompt-column", "question", "--answer-column", "sum")
    found = evaluated(train(GRPO, "colocate"), "--data", "rows.jsonl", *columns, "-k", 2)
    assert (5, 8) == (found["prompts"], found["samples"])
    assert {"mean", "pass@2", "maj@2"} == set(found["metrics"])


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("placement", "without"),
    [
        pytest.param("together", "together", marks=pytest.mark.slow),
        ("apart", "split"),
        pytest.param("ahead", "behind", marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_changes_no_bit_of_what_is_trained(train, placement, without):
    watched = train(WATCHED, placement, "--set", "sampled=1")
    plain = train(WATCHED, without, "--set", "every=0")
    assert tensors(plain) == tensors(watched)
    ours, theirs = (read_metrics(run / "metrics.jsonl") for run in (watched, plain))
    assert [line.metrics for line in theirs] == [
        {k: v for k, v in line.metrics.items() if not k.startswith("eval/")}
        for line in ours
        if not line.closing
    ]
    assert [0, 2, 3] == [line.iteration for line in ours if "eval/reward" in line.metrics]


def test_an_evaluation_apart_has_a_pool_and_a_snapshot_of_weights(train):
    plan = plan_of(train(WATCHED, "apart", "--set", "sampled=1"))
    (looks,) = (each for each in plan["actions"] if each["node"] == "eval" and each["closing"])
    assert "look" == looks["pool"]
    snapshots = [a for a in plan["actions"] if a["kind"] == "reshard" and a["pool"] != "gen"]
    assert any("look" in target for action in snapshots for target in action["targets"])
