"""Ops of a user's own that make text, make nothing, or have an effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TypedDict

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError, RunError
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices import cluster
from tests.conftest import TINY


class Told(TypedDict):
    words: list[str]
    size: rf.Row[int]


@rf.op(per="row")
def loud(response: list[str]) -> list[str]:
    return [each.upper() for each in response]


@rf.op(per="group")
def together(response: list[str], note: list[str] | None) -> Told:
    import torch

    assert note is None
    joined = "+".join(response)
    return {"words": [joined] * len(response), "size": torch.tensor([len(joined)] * len(response))}


@rf.op(per="row")
def seen(response: list[str], *, iteration: int) -> None:
    assert 3 == iteration
    SEEN.append(response)


@rf.op(per="row", effect=True)
def marked(reward: rf.Row[float]) -> rf.Row[float]:
    return reward


SEEN: list[list[str]] = []


def test_an_op_without_a_result_acts_and_is_in_one_place():
    made = seen.op
    assert ((), "none", "effectful", "first") == (
        made.outputs,
        made.rows,
        made.effect,
        made.dispatched,
    )
    assert ("effectful", "same", "first") == (
        marked.op.effect,
        marked.op.rows,
        marked.op.dispatched,
    )
    assert ("text", "row") == (loud.op.outputs[0].dtype, loud.op.outputs[0].level)


def test_what_cannot_be_is_refused():
    with pytest.raises(GraphError, match="E123"):
        rf.op(per="row", effect="yes")

    def raw(response: list[str]) -> rf.Row[str]: ...
    def forgotten(response: list[str]): ...

    for function in (raw, forgotten):
        with pytest.raises(GraphError, match=r"(?s)E104.*-> None for no result"):
            rf.op(per="row")(function)


def test_effects_are_neither_merged_nor_left_out_and_run_when_said():
    @rf.pipeline()
    def acting(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(), batch=2)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        reward = ops.reward(lambda response: 1.0, samples, name="reward")
        first = marked(reward)
        marked(reward)
        seen(samples, every=5)
        adv = ops.advantage("grpo", samples, reward)
        ops.metrics(first)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    devices = cluster.cpu_cluster(1, threads=1, memory=4e9)
    where = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}, stream=2)
    plan = compile_plan(acting.trace(), where, devices, near=TINY).plan
    nodes = {action.node: action for action in plan.actions if action.kind == "run"}
    assert {"marked", "marked_2", "seen"} <= set(nodes)
    assert 5 == nodes["seen"].every
    assert nodes["marked"].chunk is None


def called(op, fields, groups=(0, 0, 1)):
    import torch

    from rlflow.batch import make_batch, text
    from rlflow.ops.bodies.user.call import call

    columns = {name: text(value) for name, value in fields.items()}
    columns["group"] = torch.tensor(groups)
    there = len(groups)
    made = SimpleNamespace(
        op=op.op,
        node="node",
        where=None,
        iteration=3,
        params={},
        inputs=make_batch(columns, there),
        outputs=tuple(each.name for each in op.op.outputs),
    )
    return call(made)


@pytest.mark.torch
def test_text_comes_and_goes_as_strings():
    from rlflow.batch import strings

    said = {"response": ["a", "", "é"]}
    assert ["A", "", "É"] == strings(called(loud, said).fields["loud"])
    made = called(together, said, groups=(5, 2, 5)).fields
    assert ["a+é", "", "a+é"] == strings(made["words"])
    assert [3, 0, 3] == made["size"].tolist()
    assert {} == called(seen, said).fields
    assert [["a", "", "é"]] == SEEN
    assert [] == strings(called(loud, {"response": []}, groups=()).fields["loud"])


@pytest.mark.torch
@pytest.mark.parametrize(
    ("result", "says"),
    [("abc", "str: 'abc'"), (["a"], "1 of them"), (["a", 2, "b"], "int: 2"), (None, "NoneType")],
)
def test_what_is_no_text_of_the_rows_is_told(result, says):
    @rf.op(per="batch")
    def wrong(response: list[str]) -> list[str]:
        return result

    with pytest.raises(RunError, match=f"(?s)E643.*'wrong'.*{says}.*a list of 3 strings"):
        called(wrong, {"response": ["a", "b", "c"]})
