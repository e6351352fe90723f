"""Routers of mixtures in graphs and plans: what is said of them, what it costs, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import RlflowError
from rlflow.graph.model import Model
from rlflow.graph.text import graph_text
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.strategies import exact, graph_of

ADAM = rf.AdamW(lr=1e-6)


def planned(path: str = "shape:qwen3-30b-a3b", router: rf.Router | None = None, **on: Any) -> Plan:
    def declare() -> None:
        actor = rf.Model("actor", path, dtype="bfloat16", optimizer=ADAM, router=router)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=64)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(pools={"all": 32}, assign={"*": rf.on("all", **on)})
    return compile_plan(graph_of(declare), placement, parse_cluster("h100:32", 1), name="p").plan


def test_a_balance_loss_forwards_the_rows_of_a_step_once_more() -> None:
    plain, z, balance = (
        planned(router=router, fsdp=32).action("actor.update").cost.seconds or 0
        for router in (None, rf.Router(z_coef=0.001), rf.Router(balance_coef=0.001))
    )
    assert plain == z
    assert 1.1 < balance / plain < 1.5


@pytest.mark.parametrize(
    ("path", "router", "code"),
    [
        ("shape:qwen2.5-7b", rf.Router(z_coef=0.1), "E534"),
        ("shape:qwen3-30b-a3b", rf.Router(bias_rate=0.001), "E535"),
    ],
)
def test_models_without_such_a_router_are_refused(path: str, router: rf.Router, code: str) -> None:
    with pytest.raises(RlflowError) as refused:
        planned(path, router, fsdp=32)
    assert [finding.code for finding in refused.value.findings] == [code]


def test_routers_are_declared_printed_and_read_back() -> None:
    router = rf.Router(balance_coef=0.01, balance_over="model")
    model = rf.Model("actor", "x", optimizer=ADAM, router=router)
    assert Model(**model.model_dump(mode="json")).router == router
    assert "router" not in rf.Model("actor", "x", optimizer=ADAM).model_dump()
    said = "router(balance_coef=0.01, balance_over=model)"
    assert said in model.describe()
    assert "router(z_coef=0.5)" in graph_text(planned(router=rf.Router(z_coef=0.5), fsdp=32).graph)
    with pytest.raises(ValidationError, match="needs optimizer="):
        rf.Model("ref", "x", router=router)
    with pytest.raises(ValidationError, match="does nothing without balance_coef="):
        rf.Router(balance_over="model")
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        rf.Router(z_coef=-1.0)
