"""Small graphs that rewrites do something to, and what they make of a graph."""

from __future__ import annotations

from dataclasses import replace

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.graph.trace import Handle
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.passes.rewrite import REWRITES, rewrite
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.examples import COLOCATE
from tests.scheduler.strategies import PLENTY, cluster, exact, graph_of

ADAM = rf.AdamW(lr=1e-3)
LORA = rf.LoRA(rank=4)


def before(
    graph: Graph, placement: rf.Placement = COLOCATE, staleness: int = 0
) -> tuple[Plan, Context]:
    """What the first pass is given."""
    devices = cluster("cpu", placement.num_devices(), PLENTY)
    shapes = {model.name: model_shape(model, None) for model in graph.models}
    costs = Costs(graph=graph, cluster=devices, shapes=shapes)
    plan = Plan(
        graph=replace(graph, staleness=staleness),
        placement="drawn",
        cluster=devices.describe(),
        budgets=devices.budgets(),
        backend="local",
        staleness=staleness,
        pools=placement.devices(),
    )
    return plan, Context(placement=placement, cluster=devices, costs=costs)


def rewritten(
    graph: Graph, placement: rf.Placement = COLOCATE, staleness: int = 0, only: str = ""
) -> Plan:
    """The plan after all rewrites, or one of them."""
    plan, context = before(graph, placement, staleness)
    return dict(REWRITES)[only](plan, context) if only else rewrite(plan, context)


def notes(plan: Plan, rule: str) -> list[str]:
    return [note.text for note in plan.notes if note.rule == rule]


def names(plan: Plan) -> list[str]:
    return [node.name for node in plan.graph.nodes]


def rollout(actor: rf.Model, n: int = 2) -> Handle:
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    return ops.rollout(actor, prompts, n=n, max_new_tokens=8)


def learns(*, sft_first: bool = False, old: str = "auto", **steps: int) -> Graph:
    """rollout -> log_probs of the actor -> update, and perhaps another update before."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=ADAM)
        samples = rollout(actor)
        given = ops.log_probs(actor, samples)
        if sft_first:
            ops.update(actor, samples, loss=rf.SFTLoss(), name="actor.sft")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        loss = rf.PolicyLoss("ppo_clip", old=old)
        ops.update(actor, samples, advantage, given, loss=loss, **steps)

    return graph_of(declare)


def scores(*temperatures: float | None, fields: tuple[str | None, ...] = ()) -> Graph:
    """ref.log_probs at several temperatures, each shown by a metrics node of its own."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny")
        ref = rf.Model("ref", "models/tiny")
        samples = rollout(actor)
        for number, temperature in enumerate(temperatures):
            field = fields[number] if fields else None
            name = f"score{number}"
            made = ops.log_probs(ref, samples, temperature=temperature, field=field, name=name)
            ops.metrics(made, name=f"seen{number}")

    return graph_of(declare)


def adapted(*, probe: bool = False, init: str = "pretrained", **ref: str) -> Graph:
    """GRPO on adapters against a reference; `ref` are the reference's options."""

    def declare() -> None:
        options = {"path": "models/mid", "init": init, **ref}
        actor = rf.Model("actor", "models/mid", optimizer=ADAM, lora=LORA, init=init)
        frozen = rf.Model("ref", **options)
        samples = rollout(actor)
        if probe:
            ops.metrics(rollout(frozen), name="probe")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        given = ops.log_probs(frozen, samples)
        ops.update(actor, samples, advantage, given, loss=rf.PolicyLoss(kl_coef=0.1))

    return graph_of(declare)
