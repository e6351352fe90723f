"""Adaptive coefficients of whole runs, and how what nodes keep is saved."""

from __future__ import annotations

import pytest

from rlflow.errors import RunError
from rlflow.ops.math.controllers import adaptive_kl
from rlflow.runtime.record.metrics import read_metrics
from rlflow.runtime.worker.node_states import NodeStates, agreed, saved_states, to_save
from tests.runtime.whole_runs import ADAPTIVE, kept

pytestmark = pytest.mark.torch

NUMBERS = {"actor.update": ("entropy", "entropy_coef", "kl_coef"), "advantage": ("kl_coef",)}


def test_the_coefficients_are_used_and_move(train):
    run = train(ADAPTIVE, "one")
    assert {node: tuple(found) for node, found in kept(run).items()} == NUMBERS
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
