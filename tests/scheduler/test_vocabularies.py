"""Likeliest tokens in a plan: as many as there are, priced by width, and all for a full KL."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.fields import token
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.pieces import WHOLE
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.models.vocabularies import vocabulary_findings
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import _field
from tests.scheduler.strategies import exact, graph_of
from tests.scheduler.test_costs_estimates import on

SMALL, LARGE = 151_936, 152_064


def declared(top_k: int, *, ref: str = "qwen2.5-0.5b", loss: object = None) -> Graph:
    """A policy of qwen2.5-0.5b whose reference hands on its likeliest tokens."""

    def declare() -> None:
        actor = rf.Model("actor", "shape:qwen2.5-0.5b", optimizer=rf.AdamW(lr=1e-6))
        other = rf.Model("ref", f"shape:{ref}")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=10)
        given = [samples, ops.log_probs(other, samples, top_k=top_k, sum_pi_squared=True)]
        if loss is None:
            given.append(ops.advantage("grpo", samples, ops.reward(exact, samples)))
        chosen = loss or rf.PolicyLoss(kl_coef=0.1, kl="full")
        ops.update(actor, *given, loss=chosen, mini_batches=2)

    return graph_of(declare, "wide")


def found(graph: Graph) -> list[tuple[str, str]]:
    shapes = {model.name: model_shape(model) for model in graph.models}
    return [(f.code, str(f.got)) for f in vocabulary_findings(graph, shapes)]


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (declared(SMALL), []),
        (declared(SMALL + 1), [("E635", f"a vocabulary of {SMALL}")]),
        (declared(128), [("E637", "top_k=128 of ref.log_probs")]),
        (declared(128, loss=rf.DistillLoss("jsd")), []),
        (declared(LARGE, ref="qwen2.5-7b", loss=rf.DistillLoss("jsd")), []),
        (
            declared(LARGE, ref="qwen2.5-7b"),
            [("E637", f"model 'ref' with a vocabulary of {LARGE}")],
        ),
    ],
)
def test_as_many_tokens_as_there_are_and_all_for_a_full_kl(graph, expected):
    assert expected == found(graph)
    shapes = dict.fromkeys((model.name for model in graph.models), None)
    assert [] == vocabulary_findings(graph, shapes)


def plan(graph: Graph) -> Plan:
    where = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    return compile_plan(graph, where, parse_cluster("h100:1", 1)).plan


def test_a_plan_is_refused_with_the_k_that_is_needed():
    with pytest.raises(PlanError) as caught:
        plan(declared(128))
    (finding,) = caught.value.findings
    assert f"top_k={SMALL}" in str(finding.fix)


def test_a_forward_makes_the_tokens_beside_log_probs():
    made = plan(declared(64, loss=rf.DistillLoss("reverse_kl"))).graph
    (update,) = [node for node in made.nodes if node.op.use == "train"]
    read = {bound.name: str(bound.field) for bound in update.inputs}
    assert "top_log_probs:float32[token,64|response_mask]" == read["top_log_probs"]
    assert "top_ids:int64[token,64|response_mask]" == read["top_ids"]
    assert "top_rest:float32[token|response_mask]" == read["top_rest"]
    assert not {"ref_log_probs", "old_log_probs", "advantages"} & read.keys()


@pytest.mark.parametrize("width", [None, 1, 64])
def test_a_wide_field_is_read_back(width):
    field = token("top_ids", "int64", width=width)
    assert field == _field(str(field))


def costs(graph: Graph) -> Costs:
    shapes = {model.name: model_shape(model) for model in graph.models}
    return Costs(graph=graph, cluster=parse_cluster("h100:1", 1), shapes=shapes)


def test_the_bytes_of_a_field_are_as_wide_as_it_is():
    """8 rows of 10 tokens: 64 floats and 64 integers each, and one float of the rest."""
    graph = declared(64, loss=rf.DistillLoss("jsd"))
    names = ("top_log_probs", "top_ids", "top_rest")
    assert 80 * (64 * 4 + 64 * 8 + 4) == costs(graph).fields(graph.node("ref.log_probs"), names)


@pytest.mark.parametrize(
    ("loss", "forwards"),
    [
        (rf.PolicyLoss(), 0),
        (rf.PolicyLoss(top_entropy=0.5), 1),
        (rf.PolicyLoss("clip_cov"), 1),
        (rf.DPOLoss("simpo"), 1),
        (rf.RewardModelLoss("regression"), 1),
        (rf.DistillLoss("jsd"), 0),
        (rf.ValueLoss(), 0),
    ],
    ids=lambda value: value.describe() if hasattr(value, "describe") else None,
)
def test_a_look_at_the_mini_batch_costs_a_forward_each_step(loss, forwards):
    graph = declared(64, loss=rf.DistillLoss("jsd"))
    node = graph.node("actor.update")
    params = dict(node.params)
    instance = on((0,), trained=True)
    table = costs(graph)
    plain, other = (
        table.table(replace(node, params=tuple({**params, "loss": each}.items())), instance, 1)
        for each in (rf.PolicyLoss(), loss)
    )
    load = table.load(node, 1, WHOLE)
    one = table.roofline(instance, table.shapes["actor"]).forward(load)
    assert forwards == loss.forwards
    assert other.seconds == pytest.approx(plain.seconds + 2 * forwards * one)
