"""What the tests of pictures draw: a small graph made by hand, plans, a run's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rlflow as rf
from rlflow import ops
from rlflow.graph.fields import Binding, Field, row, token
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Input, Op
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text

SHAPE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 48,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
}


def made_op(name: str, inputs: tuple[str, ...], outputs: tuple[Field, ...], **more: Any) -> Op:
    """An op that reads text fields of rows and has no body."""
    wanted = tuple(Input(name=field, dtype="text", levels=("row",)) for field in inputs)
    options = {"per": "row", **more}
    return Op(name=name, body="nowhere:nothing", inputs=wanted, outputs=outputs, **options)


def made_node(name: str, op: Op, *reads: tuple[str, str, Field], **more: Any) -> Node:
    """A node; `reads` are (input, source node, field)."""
    inputs = tuple(Binding(name=n, source=source, field=field) for n, source, field in reads)
    return Node(name=name, op=op, inputs=inputs, **more)


def small_graph() -> Graph:
    r"""A graph with a node of every kind but `forward`, and names that need escaping.

    prompts -> actor.rollout -> tidy<b>[x] -> reward -> actor.update
         \__________________________________/                /
                   actor.rollout ___________________________/
    eval (reads the weights, as the rollout does)
    """
    text, answer, tidy = row("prompt", "text"), row("answer", "text"), row("tidy", "text")
    response, tokens, reward = row("response", "text"), token("response_tokens"), row("reward")
    effect: dict[str, Any] = {"effect": "effectful", "per": "batch"}
    nodes = (
        made_node(
            "prompts",
            made_op("prompts", (), (text, answer)),
            params=(("data", 'a "quoted" | source'), ("batch", 8)),
        ),
        made_node(
            "actor.rollout",
            made_op("rollout", ("prompt",), (tokens, response, row("finished")), use="rollout"),
            ("prompt", "prompts", text),
            params=(("n", 4), ("temperature", 1.0)),
            model="actor",
        ),
        made_node(
            "tidy<b>[x]",
            made_op("tidy", ("response",), (tidy,)),
            ("response", "actor.rollout", response),
        ),
        made_node(
            "reward",
            made_op("reward", ("response", "answer"), (reward,)),
            ("response", "tidy<b>[x]", tidy),
            ("answer", "prompts", answer),
        ),
        made_node(
            "actor.update",
            made_op("update", (), (), use="train", **effect),
            ("response_tokens", "actor.rollout", tokens),
            ("reward", "reward", reward),
            params=(("epochs", 1),),
            model="actor",
        ),
        made_node(
            "eval", made_op("evaluate", (), (), use="rollout", **effect), model="actor", every=5
        ),
    )
    actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
    return Graph(name="small", nodes=nodes, models=(actor,))


def exact_match(response: str, answer: str) -> float:
    """1 where the response is the answer."""
    return float(response == answer)


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}),
        "split": rf.Placement(
            pools={"train": 1, "gen": 1},
            assign={
                "*": rf.on("train"),
                "actor.rollout": rf.on("gen"),
                "ref": rf.on("gen"),
            },
        ),
        "gpus": rf.Placement(
            pools={"train": 2, "gen": 2},
            assign={"*": rf.on("train", fsdp=2), "actor.rollout": rf.on("gen", tp=2)},
        ),
    }
)
def ppo(cfg: rf.Config) -> None:
    """PPO with a critic, GAE and the KL term in the reward."""
    actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=3e-4))
    critic = rf.Model("critic", "models/tiny", head="value", optimizer=rf.AdamW(lr=3e-4))
    ref = rf.Model("ref", "models/tiny")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=32)
    samples = ops.rollout(actor, prompts, n=4, max_new_tokens=12)
    reward = ops.reward(exact_match, samples)
    ref_lp = ops.log_probs(ref, samples)
    values = ops.values(critic, samples)
    adv = ops.advantage("gae", samples, reward, values, ref_lp, kl_coef=0.05)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"), mini_batches=2)
    ops.update(critic, samples, adv, values, loss=rf.ValueLoss(), mini_batches=2)


def ppo_plan(placement: str, near: Path, devices: str | None = None) -> Plan:
    """The plan of PPO under one of its placements, on this machine's CPU unless said."""
    name, chosen = ppo.placement(placement)
    cluster = parse_cluster(devices, chosen.num_devices(), threads=1)
    return compile_plan(ppo.trace(), chosen, cluster, name=name, near=near / "pipeline.py").plan


def squeezed_plan(near: Path) -> Plan:
    """PPO on one device with room for nothing but its hungriest action: all others sleep then."""
    roomy = ppo_plan("colocate", near)
    sizes = {part.name: part.size or 0 for part in roomy.parts}
    needed = max(
        sum(sizes[part] for part in action.needs) + (action.cost.transient or 0)
        for action in roomy.actions
    )
    return ppo_plan("colocate", near, f"cpu:1@{needed / 1e6 + 0.001:.3f}MB")


def write_model(home: Path) -> None:
    """The config of the tiny model under `home`."""
    (home / "models" / "tiny").mkdir(parents=True)
    (home / "models" / "tiny" / "config.json").write_text(json.dumps(SHAPE))


def write_run(path: Path, plan: Plan, iterations: int = 6) -> None:
    """A run's directory as a run of `plan` leaves it: every action takes 10 ms on its devices.

    Action number n of iteration i runs from second i + 0.01 n; rewards are 0.2 + 0.1 i.
    """
    (path / "spans").mkdir(parents=True)
    run = {
        "id": "8a", "name": plan.graph.name, "pipeline": "pipelines/a b.py", "host": "box",
        "command": ["rlflow", "run", "pipelines/a b.py", "--placement", plan.placement],
        "again": ["run", "pipelines/a b.py", "--placement", plan.placement],
        "started": "2025-01-31T14:25:01+00:00",
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": None},
    }  # fmt: skip
    documents = {
        "run.json": run,
        "config.json": {"iterations": iterations, "seed": 0, "note": "<script>"},
        "graph.json": plan.graph.to_json(),
        "plan.json": plan.to_json(),
    }
    for name, document in documents.items():
        (path / name).write_text(json.dumps(document))
    (path / "plan.txt").write_text(plan_text(plan))
    rows = []
    spans: list[dict[str, Any]] = [{"origin": 1.7e9, "process": "main"}]
    for i in range(iterations):
        metrics = {"reward/mean": 0.2 + 0.1 * i, "actor.update/policy_loss": -0.0125 * i}
        metrics |= {"eval/reward": 0.25 + 0.1 * i} if i in (0, iterations - 1) else {}
        rows.append({"iteration": i, "metrics": metrics})
        spans += [
            {
                "action": action.id, "node": action.node or "", "kind": action.kind,
                "iteration": i, "chunk": 0, "pool": action.pool,
                "devices": list(action.devices), "start": i + 0.01 * n,
                "end": i + 0.01 * (n + 1), "predicted": action.cost.seconds,
                "bytes": action.cost.moved, "process": "main", "ok": True,
            }
            for n, action in enumerate(plan.actions)
        ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "spans" / "main.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in spans))
