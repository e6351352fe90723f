"""What `@rf.op` functions return and keep: held against what they say, named, in checkpoints."""

from __future__ import annotations

import json
import typing

import pytest
import torch

import rlflow as rf
from rlflow.batch import make_batch, ragged_rows
from rlflow.errors import GraphError, RunError
from rlflow.ops.bodies.user.call import call as run
from rlflow.ops.body import Call
from tests.conftest import TINY

pytestmark = pytest.mark.torch


class Two(typing.TypedDict):
    weight: rf.Row[float]
    good: rf.Row[bool]


def called(made, inputs, **params):
    """The output of an op's body on three rows."""
    op = made.op
    rows = next(iter(inputs.values())).shape[0]
    return run(
        Call(
            node="mine",
            op=op,
            iteration=0,
            seed=0,
            params=params,
            wanted=frozenset(),
            permutation=range,
            tokenizer=None,
            inputs=make_batch(inputs, rows),
            where=None,
            state=params.pop("kept", {}),
        )
    )


def row_op(function):
    def made(reward: rf.Row[float]) -> rf.Row[float]:
        return function(reward)

    return rf.op(per="row")(made)


REWARDS = {"reward": torch.tensor([1.0, 2.0, 3.0])}
TOKENS = {"log_probs": ragged_rows([[0.1], [0.2, 0.3], []], torch.float32)}


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda r: r.long(), ("torch.int64", "torch.float32", "made.float()")),
        (lambda r: r > 0, ("torch.bool", "torch.float32")),
        (lambda r: r[:, None], ("shape (3, 1)", "one value a row: shape (3,)")),
        (lambda r: r[:2], ("shape (2,)", "a tensor with 3 rows")),
        (lambda r: r.sum(), ("shape ()", "a tensor with 3 rows")),
        (lambda r: r.tolist(), ("list: [1.0, 2.0, 3.0]",)),
        (lambda r: None, ("NoneType: None",)),
        (lambda r: {"mad": r}, ("fields mad", "did you mean", "made")),
        (lambda r: ragged_rows([[1.0], [2.0], [3.0]], torch.float32), ("rows of tokens",)),
    ],
)
def test_what_is_not_what_it_says(function, says):
    with pytest.raises(RunError) as caught:
        called(row_op(function), REWARDS)
    text = str(caught.value)
    assert "error[E643]: op mine made" in text
    assert "test_user_ops.py:" in text
    for each in says:
        assert each in text


def test_numbers_of_another_width_are_converted():
    made = called(row_op(lambda r: r.double()), REWARDS).fields["made"]
    assert (torch.float32, [1.0, 2.0, 3.0]) == (made.dtype, made.tolist())


def test_a_field_that_is_not_among_several():
    @rf.op(per="row")
    def mine(reward: rf.Row[float]) -> Two:
        return {"weight": reward, "god": reward > 0}

    with pytest.raises(RunError, match="made no field 'good'") as caught:
        called(mine, REWARDS)
    assert "fields god, weight" in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda t: ragged_rows([[1.0], [2.0], []], torch.float32), "rows of 1, 1, 0 tokens"),
        (lambda t: torch.ones(3, 2), "shape (3, 2)"),
        (lambda t: torch.ones(3), "shape (3,)"),
    ],
)
def test_values_of_tokens_are_one_a_token(returned, says):
    @rf.op(per="row")
    def scaled(log_probs: rf.Token[float]) -> rf.Token[float]:
        return returned(log_probs)

    with pytest.raises(RunError) as caught:
        called(scaled, TOKENS)
    assert says in str(caught.value)


@rf.op(per="batch", state={"mean": 0.0, "seen": 0})
def centered(reward: rf.Row[float], *, rate: float = 0.5, state: dict[str, float]) -> rf.Row[float]:
    state["seen"] += len(reward)
    state["mean"] += rate * (float(reward.mean()) - state["mean"])
    return reward - state["mean"]


def test_a_state_is_read_and_kept():
    kept = {}
    for expected in (1.0, 1.5):
        params = {"rate": 0.5, "state": "centered", "state_begins": (("mean", 0.0), ("seen", 0))}
        called(centered, REWARDS, **params, kept=kept)
        assert expected == kept["mean"]
    assert {"mean": 1.5, "seen": 6.0} == kept


@pytest.mark.parametrize("left", [float("nan"), "text", torch.ones(2)])
def test_a_state_that_cannot_be_kept(left):
    @rf.op(per="batch", state={"mean": 0.0})
    def keeps(reward: rf.Row[float], *, state: dict[str, float]) -> rf.Row[float]:
        state["mean"] = left
        return reward

    kept = {}
    with pytest.raises(RunError, match="E657"):
        called(keeps, REWARDS, state="keeps", state_begins=(("mean", 0.0),), kept=kept)
    assert {} == kept


@pytest.mark.parametrize(
    "options",
    [
        {"per": "row", "state": {"a": 0.0}},
        {"per": "batch", "state": {"a": "0"}},
        {"per": "batch", "state": {"a": float("nan")}},
        {"per": "batch", "state": {}},
        {"per": "batch", "state": {"a": True}},
        {"per": "batch", "state": {"a": 0.0}, "dispatch": "all"},
    ],
)
def test_states_that_no_op_can_have(options):
    with pytest.raises(GraphError, match="E656"):
        rf.op(**options)


FILE = f"""\
import rlflow as rf
from rlflow import ops

def length(response: str) -> float:
    return float(len(response))

@rf.op(per="batch", state={{"mean": 0.0}})
def advantages(reward: rf.Row[float], *, state: dict[str, float]) -> rf.Row[float]:
    state["mean"] = 0.9 * state["mean"] + 0.1 * float(reward.mean())
    return reward - state["mean"]

@rf.pipeline()
def moving(cfg: rf.Config):
    actor = rf.Model("actor", {str(TINY)!r}, optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=2)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    better = advantages(samples, ops.reward(length, samples))
    ops.metrics(better)
    ops.update(actor, samples, better, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.mark.slow
def test_a_resumed_run_has_the_state(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moving.py").write_text(FILE)
    whole = ("run", "moving.py", "--iterations", 4, "--run-dir", "whole", "-q")
    half = ("run", "moving.py", "--iterations", 2, "--run-dir", "half", "-q")
    again = ("run", "moving.py", "--iterations", 4, "--resume", "half", "-q")
    for words in (whole, half, again):
        done = rlflow(*words)
        assert 0 == done.code, done.err
    lines = [(tmp_path / run / "metrics.jsonl").read_text() for run in ("whole", "half")]
    assert lines[0] == lines[1]
    assert 4 == len(lines[0].splitlines())
    json.loads(lines[0].splitlines()[-1])
