"""Adaptive coefficients of whole runs: saved, resumed to the bit, the same in each placement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlflow.errors import RunError
from rlflow.ops.math.controllers import adaptive_kl
from rlflow.runtime import durable
from rlflow.runtime.metrics import read_metrics
from rlflow.runtime.node_states import NodeStates, agreed, saved_states, to_save
from tests.conftest import ended, process
from tests.runtime.adaptive_pipeline import ADAPTIVE

pytestmark = pytest.mark.torch

NUMBERS = {"actor.update": ("entropy", "entropy_coef", "kl_coef"), "advantage": ("kl_coef",)}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The words of a run in a directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "adaptive.py"
    file.write_text(ADAPTIVE)

    def words(run, placement="one", *, iterations=5, resume=False):
        where = ("--resume", run) if resume else ("--run-dir", run)
        options = ("--placement", placement, "--threads", "1", *where, "-q")
        return ("run", file, *options, "--iterations", iterations, "--save-every", 2)

    return words


def last_checkpoint(run: Path) -> Path:
    return run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text().strip()


def node_states(run: Path):
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
    return last.name, (run / "metrics.jsonl").read_bytes(), node_states(run), tensors


@pytest.fixture
def broken(rlflow, command, tmp_path, monkeypatch):
    """Start a run that breaks in iteration 3, one after a checkpoint; returns its directory."""

    def call(placement="one"):
        monkeypatch.setenv(durable.FAULT_VARIABLE, "run:iteration=raise@4")
        durable.arm_from_environment()
        result = rlflow(*command(tmp_path / "broken", placement))
        monkeypatch.delenv(durable.FAULT_VARIABLE)
        durable.arm_from_environment()
        assert 1 == result.code, result.err
        assert "iteration-000002" == last_checkpoint(tmp_path / "broken").name
        return tmp_path / "broken"

    return call


@pytest.mark.parametrize("placement", ["one", "old"])
def test_a_broken_run_resumed_is_one_that_was_not(rlflow, command, broken, tmp_path, placement):
    whole, run = tmp_path / "whole", broken(placement)
    assert 0 == rlflow(*command(whole, placement)).code
    assert 0 == rlflow(*command(run, placement, resume=True)).code
    assert state(whole) == state(run)
    assert {node: tuple(kept) for node, kept in node_states(whole).items()} == NUMBERS


@pytest.mark.slow
def test_a_killed_run_resumed_is_one_that_was_not(rlflow, command, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert 0 == rlflow(*command(whole)).code
    began = process(*command(killed), cwd=tmp_path, RLFLOW_FAULT="run:iteration=kill9@4")
    assert -9 == ended(began).code
    assert 0 == rlflow(*command(killed, resume=True)).code
    assert state(whole) == state(killed)


def test_the_coefficients_are_used_and_move(rlflow, command, tmp_path):
    run = tmp_path / "run"
    assert 0 == rlflow(*command(run)).code
    lines = [line.metrics for line in read_metrics(run / "metrics.jsonl")]
    in_reward = [line["advantage/kl_coef"] for line in lines]
    in_loss = [line["actor.update/kl_coef"] for line in lines]
    entropy = [line["actor.update/entropy_coef"] for line in lines]
    assert (0.05, 0.1, 0.01) == (in_reward[0], in_loss[0], entropy[0])
    for numbers in (in_reward, in_loss, entropy):
        assert len(set(numbers)) > 2, numbers
        assert min(numbers) >= 0
    for line, before, after in zip(lines, in_reward, in_reward[1:], strict=False):
        kl = line["advantage/kl"] * line["actor.rollout/length"]
        expected = adaptive_kl(before, kl, target=1e-3, horizon=10, n=8)
        assert pytest.approx(expected, rel=1e-6) == after


def test_a_resumed_run_without_its_numbers_would_differ(
    rlflow, command, broken, tmp_path, monkeypatch
):
    """The check that the test above can fail: forget what nodes keep, and the bits differ."""
    whole, run = tmp_path / "whole", broken()
    assert 0 == rlflow(*command(whole)).code
    monkeypatch.setattr("rlflow.runtime.local.saved_states", lambda state: {})
    assert 0 == rlflow(*command(run, resume=True)).code
    assert state(whole) != state(run)


def test_the_states_of_processes_are_joined():
    one, two = {"a": {"x": 1.0}, "c": {}}, {"b": {"y": 2.0}, "a": {"x": 1.0}}
    assert {"a": {"x": 1.0}, "b": {"y": 2.0}} == agreed([one, two])
    assert {} == agreed([{}, {"a": {}}])
    with pytest.raises(RunError) as caught:
        agreed([{"a": {"x": 1.0}}, {"a": {"x": 1.5}}])
    assert "E260" == caught.value.findings[0].code


def test_a_node_that_nobody_has_run_keeps_what_was_loaded():
    """Here the process has run a, and only loaded b; another one has run b too."""
    states = NodeStates()
    states.of("a")["x"] = 9.0
    loaded = {"a": {"x": 1.0}, "b": {"y": 2.0}}
    states.load(loaded)
    assert {"x": 1.0} == states.of("a")
    states.of("a")["x"] = 1.5
    assert {"a": {"x": 1.5}, "b": {"y": 2.0}} == to_save(loaded, [states.used])
    assert {"a": {"x": 1.5}, "b": {"y": 3.0}} == to_save(loaded, [states.used, {"b": {"y": 3.0}}])
    assert {"a": {"x": 1.0}, "b": {"y": 2.0}} == loaded


def test_a_checkpoint_of_a_run_without_states_has_none():
    assert {} == saved_states({})
    assert {"a": {"x": 1.5}} == saved_states({"nodes": {"a": {"x": 1.5}}})
