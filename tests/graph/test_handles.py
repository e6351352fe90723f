"""Handles and functions in the forms that users try: each works, or is told with its line."""

from __future__ import annotations

import functools

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError

DATA = rf.data.arithmetic(digits=2)


def traced(declare):
    def run(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        samples = ops.rollout(actor, ops.prompts(DATA, batch=4), n=4, max_new_tokens=8)
        declare(actor, samples)

    return rf.pipeline()(run).trace()


def codes(declare):
    with pytest.raises(GraphError) as caught:
        traced(declare)
    assert all(found.where.path.endswith("test_handles.py") for found in caught.value.findings)
    return [found.code for found in caught.value.findings]


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def close(response: str, answer: str, width: int = 1) -> float:
    return float(abs(len(response) - len(answer)) < width)


class Judge:
    """An object that is called."""

    def __call__(self, response: str, answer: str) -> float:
        return float(response == answer)

    def scores(self, response: str, answer: str) -> float:
        return 1.0


def trained(function):
    def declare(actor, samples):
        adv = ops.advantage("grpo", samples, ops.reward(function, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    return traced(declare)


def test_a_handle_has_no_truth():
    assert ["E658"] == codes(lambda actor, samples: 1 if ops.reward(exact, samples) else 0)


@pytest.mark.parametrize(
    "declare",
    [
        lambda actor, s: ops.update(actor, [s, s], loss=rf.PolicyLoss()),
        lambda actor, s: ops.rollout(actor, [s], n=2, max_new_tokens=4),
        lambda actor, s: ops.log_probs(actor, (s,)),
        lambda actor, s: ops.reward(exact, [s]),
        lambda actor, s: ops.advantage("grpo", {"samples": s}),
    ],
)
def test_a_list_in_the_place_of_handles(declare):
    assert ["E102"] == codes(declare)


def test_a_handle_of_another_pipeline_though_its_name_is_known_here():
    kept = []
    with pytest.raises(GraphError):
        traced(lambda actor, samples: kept.append(samples))
    assert ["E102"] == codes(lambda actor, samples: ops.reward(exact, kept[0]))


@pytest.mark.parametrize(
    ("function", "fields"),
    [
        (exact, ["response", "answer"]),
        (functools.partial(close, width=3), ["response", "answer"]),
        (functools.partial(functools.partial(close), width=3), ["response", "answer"]),
        (Judge(), ["response", "answer"]),
        (Judge().scores, ["response", "answer"]),
        (lambda response, answer: 1.0, ["response", "answer"]),
        (lambda response, **more: 1.0, ["response"]),
        (lambda response, *more: 1.0, ["response"]),
    ],
)
def test_functions_in_all_forms(function, fields):
    node = trained(function).node("reward")
    assert fields == [bound.name for bound in node.inputs]


def advantages(reward: rf.Row[float], *, scale: float = 1.0, **more: float) -> rf.Row[float]:
    return reward * scale


class Weighs:
    def __call__(self, reward: rf.Row[float]) -> rf.Row[float]:
        return reward


@pytest.mark.parametrize(
    ("function", "name", "fields"),
    [
        (advantages, "advantages", ["reward"]),
        (functools.partial(advantages, scale=2.0), "advantages", ["reward"]),
        (Weighs(), "Weighs", ["reward"]),
    ],
)
def test_ops_of_functions_in_all_forms(function, name, fields):
    op = rf.op(per="row")(function).op
    assert (name, fields) == (op.name, [wanted.name for wanted in op.inputs])
    assert [name] == [made.name for made in op.outputs]


async def later(cfg: rf.Config) -> None: ...


def yields(cfg: rf.Config) -> None:
    yield


async def both(cfg: rf.Config) -> None:
    yield


@pytest.mark.parametrize("function", [later, yields, both])
def test_pipelines_that_a_call_does_not_run(function):
    with pytest.raises(GraphError, match="E659"):
        rf.pipeline()(function)


def test_an_exit_in_a_pipeline(rlflow, tmp_path):
    text = "import sys\nimport rlflow as rf\n\n@rf.pipeline()\ndef ends(cfg: rf.Config):\n"
    (tmp_path / "ends.py").write_text(text + "    sys.exit(0)\n")
    result = rlflow("check", str(tmp_path / "ends.py"))
    assert (3, "") == (result.code, result.out)
    assert "E308" in result.err
    assert "SystemExit" in result.err
