"""Small plans made by hand: a rollout that lags behind its updates, and memory that sleeps."""

from __future__ import annotations

from dataclasses import replace

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Op
from rlflow.scheduler.plan.plan import Action, Cost, Dep, Instance, Part, Plan, Reason, Spread
from tests.scheduler.strategies import exact, graph_of

REASON = Reason(rule="test", text="a test")
BYTES = 10


def action(name, devices, *after, seconds=1.0, **options):
    """An action; `after` are (name, distance in turns)."""
    deps = tuple(Dep(action=other, distance=distance, kind="order") for other, distance in after)
    node = name if options.get("kind", "run") == "run" else None
    shape = {"kind": "run", "node": node, "pool": "p", "cost": Cost(seconds=seconds)} | options
    return Action(id=name, reason=REASON, devices=devices, after=deps, **shape)


def plan_of(*actions, pools=None, **options):
    """A plan of these actions; its graph, unless one is given, has a node for every run."""
    op = Op(name="made", body="", inputs=(), outputs=(), per="batch")
    nodes = tuple(Node(name=a.node, op=op, inputs=()) for a in actions if a.kind == "run")
    graph = Graph(name="made", nodes=nodes, models=())
    shape = {"graph": graph, "staleness": 0, "budgets": {}} | options
    return Plan(
        placement="made",
        cluster="cpu:2",
        backend="local",
        pools=pools or {"p": (0, 1)},
        actions=tuple(actions),
        **shape,
    )


def _declare():
    actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    reward = ops.reward(exact, samples)
    ops.update(
        actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss("ppo_clip")
    )


def instances():
    """The actor trained on device 0 and rolled out on device 1."""
    return (
        Instance(
            name="actor@train",
            model="actor",
            pool="train",
            devices=(0,),
            uses=("train",),
            trained=True,
        ),
        Instance(
            name="actor@gen",
            model="actor",
            pool="gen",
            devices=(1,),
            uses=("rollout",),
            trained=False,
        ),
    )


def lagging(lag: int) -> Plan:
    """GRPO on two pools, the rollout `lag` updates behind and as many iterations ahead."""
    host, train, gen = (-1,), (0,), (1,)
    made = {"node": "actor.rollout", "instance": "actor@gen", "reads": (("actor@gen", lag),)}
    learns = {
        "node": "actor.update",
        "instance": "actor@train",
        "reads": (("actor@train", 0),),
        "writes": (("actor@train", -1),),
    }
    brings = {
        "kind": "reshard",
        "instance": "actor@train",
        "targets": ("actor@gen",),
        "reads": (("actor@train", -1),),
        "writes": (("actor@gen", -1),),
    }
    scored = {"node": "reward", "ahead": lag}
    rollout = (("prompts", 0), ("reshard", 1), ("actor.rollout", 1))
    update = (("advantage", 0), ("actor.rollout", lag), ("actor.update", 1), ("reshard", 1))
    judged = dict.fromkeys((("reward", lag), ("reward", min(lag, 1))))
    after = (("advantage", 0), ("reward", 1)) if lag else (("advantage", 1),)
    prompts = action("prompts", host, *after, ahead=lag, seconds=0.1, node="prompts")
    advantage = action("advantage", host, *judged, node="advantage", seconds=0.1)
    actions = [
        prompts,
        action("actor.rollout", gen, *rollout, ahead=lag, seconds=4.0, **made),
        action("reward", host, ("actor.rollout", 0), ("prompts", 0), seconds=0.1, **scored),
        action("actor.update", train, *update, seconds=5.0, **learns),
        action("reshard", (0, 1), ("actor.update", 0), ("actor.rollout", 0), seconds=0.5, **brings),
    ]
    actions.insert(0 if lag else 3, advantage)
    rows = (replace(a, takes=Spread(parts=(a.devices,))) if a.kind == "run" else a for a in actions)
    return plan_of(
        *rows,
        graph=replace(graph_of(_declare), staleness=lag),
        pools={"train": train, "gen": gen},
        instances=instances(),
        staleness=lag,
    )


def sleeping() -> Plan:
    """Two parts of 10 bytes that take turns in 15 bytes of a device; one is copied in ahead."""
    parts = tuple(
        Part(name=name, instance="", kind="optimizer", size=BYTES, devices=(0,)) for name in "ab"
    )
    return plan_of(
        action("use.a", (0,), ("wake.a", 1), ("use.b", 1), needs=("a",)),
        action("sleep.a", (0,), ("use.a", 0), kind="sleep", part="a", mode="offload", seconds=0.2),
        action("wake.b", (0,), ("sleep.a", 0), kind="wake", part="b", mode="offload", seconds=0.2),
        action("use.b", (0,), ("wake.b", 0), needs=("b",)),
        action("sleep.b", (0,), ("use.b", 0), kind="sleep", part="b", mode="offload", seconds=0.2),
        action("wake.a", (0,), ("sleep.b", 0), kind="wake", part="a", mode="offload", seconds=0.2),
        parts=parts,
        awake_at_start=("a",),
        pools={"p": (0,)},
        budgets={0: 15, -1: 20},
        peaks={0: 10, -1: 10},
    )
