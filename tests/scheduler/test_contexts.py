"""Rows longer than a model's context are refused by plans, with the code of the engines."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.strategies import exact, graph_of

CONTEXT = 32_768


def scored(reward: Callable[..., float], new: int, ref: str = "qwen2.5-7b") -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "shape:qwen2.5-0.5b", optimizer=rf.AdamW(lr=1e-6))
        other = rf.Model("ref", f"shape:{ref}")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=new)
        advantage = ops.advantage("grpo", samples, ops.reward(reward, samples))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.01)
        ops.update(actor, samples, advantage, ops.log_probs(other, samples), loss=loss)

    return graph_of(declare)


def planned(graph: Graph) -> Plan:
    placement = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all")})
    return compile_plan(graph, placement, parse_cluster("h100:8", 1), verified=False).plan


def test_rows_as_long_as_the_context_are_planned() -> None:
    assert planned(scored(exact, CONTEXT - 1)).timing


@pytest.mark.parametrize(
    ("new", "ref", "refused", "context"),
    [
        (CONTEXT, "qwen2.5-7b", ["actor.rollout", "ref.log_probs", "actor.update"], CONTEXT),
        (40_000, "qwen3-8b", ["actor.rollout", "actor.update"], CONTEXT),
    ],
)
def test_rows_that_may_be_longer_are_refused_for_each_model_that_reads_them(
    new: int, ref: str, refused: list[str], context: int
) -> None:
    graph = scored(exact, new, ref)
    with pytest.raises(PlanError) as caught:
        planned(graph)
    findings = caught.value.findings
    assert {finding.code for finding in findings} == {"E505"}
    assert [finding.what.split("'")[1] for finding in findings] == refused
    assert all(f"at most {context} tokens" in finding.expected for finding in findings)
    assert all(finding.fix == f"max_new_tokens={context - 1}" for finding in findings)


def test_held_out_rows_are_as_long_as_the_context_allows() -> None:
    def declare() -> None:
        student = rf.Model("student", "shape:qwen2.5-0.5b", optimizer=rf.AdamW(lr=1e-6))
        rows = rf.data.arithmetic(digits=2)
        answers = ops.tokenize(student, ops.prompts(rows, batch=8))
        ops.update(student, answers, loss=rf.SFTLoss())
        ops.evaluate(student, rows, exact, every=8, max_new_tokens=CONTEXT)

    with pytest.raises(PlanError, match=r"E505\]: rows of 'eval' may be longer"):
        planned(graph_of(declare))


class Judge:
    """A reward that is an object."""

    def __call__(self, response: str) -> float:
        return float(len(response))


def least(response: str, tokens: int) -> float:
    return float(len(response) >= tokens)


@pytest.mark.parametrize(
    ("reward", "name"), [(Judge(), "Judge"), (functools.partial(least, tokens=3), "least")]
)
def test_a_reward_is_anything_that_can_be_called(reward: Callable[..., float], name: str) -> None:
    assert planned(scored(reward, 64)).action("reward").reason.text == f"reward of {name}"
