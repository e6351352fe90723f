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
MIXTURE = "shape:qwen3-30b-a3b"


def planned(path: str = MIXTURE, router: rf.Router | None = None, **on: Any) -> Plan:
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
        (MIXTURE, rf.Router(bias_rate=0.001), "E535"),
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


def replayed(cluster: str, *, kind: str = "r3", path: str = MIXTURE, **rollout: Any) -> Plan:
    """A plan in which experts of the rollout (r3), or of log-probs (r2), are chosen again."""

    def declare() -> None:
        actor = rf.Model("actor", path, dtype="bfloat16", optimizer=ADAM)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
        routing: Any = {"routing": "record"} if kind == "r3" else {}
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=64, **routing)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        old = ops.log_probs(actor, samples, routing="record" if kind == "r2" else None)
        loss = rf.PolicyLoss("ppo_clip", old="recomputed")
        replay: Any = {"routing": "replay"} if kind else {}
        ops.update(actor, samples, advantage, old, loss=loss, **replay)

    assign = {"actor": rf.on("train", fsdp=16), "actor.rollout": rf.on("gen", **rollout)}
    placement = rf.Placement(pools={"train": 16, "gen": 16}, assign=assign)
    graph = graph_of(declare)
    return compile_plan(graph, placement, parse_cluster(cluster, 1), name="p").plan


def moved(plan: Plan, field: str) -> int:
    return sum(
        a.cost.moved or 0 for a in plan.actions if a.kind == "transfer" and field in a.fields
    )


def test_experts_are_fields_whose_bytes_a_plan_counts() -> None:
    """48 layers of 8 experts, 2 bytes each, of 128 rows of 64 tokens and their prompts."""
    plan = replayed("h100:32", fsdp=16)
    rollout = plan.graph.node("actor.rollout")
    assert (
        str(rollout.op.output("routed_experts")) == "routed_experts:int16[token,384|response_mask]"
    )
    more = moved(plan, "routed_experts") - moved(replayed("h100:32", kind="", fsdp=16), "group")
    responses = 128 * 64 * 384 * 2
    assert responses < more < 1.6 * responses


def test_experts_of_log_probs_are_replayed_too() -> None:
    plan = replayed("h100:32", kind="r2", fsdp=16)
    sources = {bound.source for bound in plan.graph.node("actor.update").inputs
               if bound.name.endswith("_experts")}  # fmt: skip
    assert sources == {"actor.log_probs"}
    assert [made.name for made in plan.graph.node("actor.log_probs").op.outputs] == [
        "old_log_probs",
        "prompt_experts",
        "routed_experts",
    ]


def test_an_engine_is_told_to_keep_them_or_refused() -> None:
    plan = replayed("h100:32", engine="sglang", tp=4)
    engine = next(i for i in plan.instances if i.engine_plan.own_process)
    assert engine.options is not None
    assert engine.options.said()["routed_experts"] is True
    with pytest.raises(RlflowError, match=r"E249.*vllm.*experts"):
        replayed("h100:32", engine="vllm", tp=4)
    with pytest.raises(RlflowError, match="E536"):
        replayed("h100:32", path="shape:qwen2.5-7b", fsdp=16)


def test_what_routing_may_say_is_said_where_it_is_wrong() -> None:
    def declare() -> None:
        actor = rf.Model("actor", MIXTURE, optimizer=ADAM)
        draft = rf.Model("draft", "shape:qwen3-0.6b")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        wrong: Any = "replay"
        ops.rollout(actor, prompts, max_new_tokens=8, routing=wrong)
        ops.rollout(actor, prompts, max_new_tokens=8, routing="record", drafter=draft)

    with pytest.raises(AssertionError) as refused:
        graph_of(declare)
    assert "E118]: a rollout with routing='replay'" in str(refused.value)
    assert "E118]: a rollout with routing= and a drafter" in str(refused.value)


def test_an_update_without_experts_names_who_would_make_them() -> None:
    def declare() -> None:
        actor = rf.Model("actor", MIXTURE, optimizer=ADAM)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"), routing="replay")

    with pytest.raises(AssertionError) as refused:
        graph_of(declare)
    assert "'actor.update' has no input 'routed_experts'" in str(refused.value)
    assert 'samples = ops.rollout(actor, prompts, ..., routing="record")' in str(refused.value)


def test_experts_of_another_mixture_are_refused() -> None:
    def declare() -> None:
        actor = rf.Model("actor", MIXTURE, dtype="bfloat16", optimizer=ADAM)
        ref = rf.Model("ref", "shape:mixtral-8x7b", dtype="bfloat16")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, routing="record")
        ref_lp = ops.log_probs(ref, samples, routing="replay")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
        ops.update(actor, samples, advantage, ref_lp, loss=loss, routing="replay")

    assign = {"*": rf.on("all", fsdp=32), "ref": rf.on("all", fsdp=8)}
    placement = rf.Placement(pools={"all": 32}, assign=assign)
    with pytest.raises(RlflowError, match=r"E536.*cannot choose(.|\n)*384 experts(.|\n)*64:"):
        compile_plan(graph_of(declare), placement, parse_cluster("h100:32", 1), name="p")
