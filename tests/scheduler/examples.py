"""Small pipelines and placements that tests of the scheduler draw and compile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import Compiled, compile_plan
from rlflow.scheduler.plan.plan import Backend
from tests.scheduler.strategies import PLENTY, cluster, exact, graph_of

COLOCATE = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
OWN = rf.Placement(
    pools={"all": 1},
    assign={"*": rf.on("all"), "actor.rollout": rf.on("all", weights="own")},
)
SPLIT = rf.Placement(
    pools={"train": 1, "gen": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")},
)
APART = rf.Placement(
    pools={"train": 1, "gen": 1, "look": 1, "judge": 1},
    assign={
        "actor": rf.on("train"),
        "actor.rollout": rf.on("gen"),
        "ref": rf.on("look"),
        "critic": rf.on("judge"),
    },
)
HYBRID = rf.Placement(
    pools={"train": [0, 1], "gen": [1, 2]},
    assign={"*": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")},
)
MESH = rf.Placement(
    pools={"all": 4, "cpus": 2},
    assign={
        "*": rf.on("all", fsdp=2, tp=2),
        "actor.rollout": rf.on("all", tp=2),
        "reward": rf.on("cpus"),
    },
)
TWICE = rf.Placement(
    pools={"train": 2, "gen": 2},
    assign={
        "*": rf.on("train", recompute=True),
        "actor.rollout": rf.on("gen", weights="own"),
        "actor.forward": rf.on("gen"),
        "ref": rf.on("gen", offload="layers"),
        "reward": rf.on("gen"),
    },
)
PAUSED = SPLIT.model_copy(update={"staleness": 2, "pause_at": 4})
WIDE = rf.Placement(
    pools={"train": 2, "gen": 2, "look": 1},
    assign={
        "actor": rf.on("train"),
        "actor.rollout": rf.on("gen"),
        "ref": rf.on("look"),
    },
    staleness=1,
    pause_at=3,
    stream=2,
)


def grpo(
    *,
    path: str = "models/mid",
    kl_coef: float = 0.1,
    epochs: int = 1,
    steps: int = 1,
    shuffle: bool = False,
    old: bool = False,
    every: int = 3,
    ignore_eos: bool = False,
    prompts: int = 8,
    n: int = 2,
) -> Graph:
    """GRPO with a reference, evaluated every few iterations unless `every` is 0."""

    def declare() -> None:
        actor = rf.Model("actor", path, optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", path)
        drawn = ops.prompts(rf.data.arithmetic(digits=2), batch=prompts)
        samples = ops.rollout(actor, drawn, n=n, max_new_tokens=8, ignore_eos=ignore_eos)
        reward = ops.reward(exact, samples)
        given = [ops.log_probs(ref, samples)]
        if old or epochs > 1:
            given.append(ops.log_probs(actor, samples))
        advantage = ops.advantage("grpo", samples, reward)
        loss = rf.PolicyLoss("ppo_clip", kl_coef=kl_coef)
        order = {"mini_batches": steps, "shuffle": shuffle or steps == 1}
        ops.update(actor, samples, advantage, *given, loss=loss, epochs=epochs, **order)
        if every:
            test = rf.data.arithmetic(digits=2, split="test")
            ops.evaluate(actor, test, exact, every=every, max_new_tokens=8, limit=16, name="eval")

    return graph_of(declare, "grpo")


def ppo(*, path: str = "models/mid", ignore_eos: bool = False) -> Graph:
    """PPO with a critic, and a KL term in the reward that reads a reference."""

    def declare() -> None:
        actor = rf.Model("actor", path, optimizer=rf.AdamW(lr=1e-3))
        critic = rf.Model("critic", path, head="value", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", path)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, max_new_tokens=8, ignore_eos=ignore_eos)
        reward = ops.reward(exact, samples)
        ref_lp = ops.log_probs(ref, samples)
        values = ops.values(critic, samples)
        advantage = ops.advantage("gae", samples, reward, values, ref_lp, kl_coef=0.05)
        ops.update(critic, samples, advantage, values, loss=rf.ValueLoss())
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"), epochs=2)

    return graph_of(declare, "ppo")


def compiled_with(
    graph: Graph,
    placement: rf.Placement,
    *,
    kind: str = "cpu",
    memory: float = PLENTY,
    share: float | None = None,
    name: str = "placement",
    backend: Backend | None = None,
) -> Compiled:
    """A plan; `share` is memory as a part of the peak that the plan has with plenty.

    It is compiled once for all tests of a process that say the same: a plan is a value.
    """
    home, hub = Path.cwd(), os.environ.get("HF_HUB_CACHE")
    key = (graph.hash, placement.model_dump_json(), kind, memory, share, name, backend, home, hub)
    # Functions of a user's own are no part of the hash.
    known, found = COMPILED.get(key, (None, None))
    if found is not None and known == graph:
        return found
    count = placement.num_devices()
    if share is not None:
        roomy = compile_plan(graph, placement, cluster(kind, count, PLENTY), backend=backend)
        memory = int(share * max(roomy.plan.peaks.values()))
    found = compile_plan(graph, placement, cluster(kind, count, memory), name=name, backend=backend)
    COMPILED[key] = (graph, found)
    return found


COMPILED: dict[tuple[object, ...], tuple[Graph, Compiled]] = {}
EXAMPLES: dict[str, Callable[[], Compiled]] = {
    "grpo_colocate": lambda: compiled_with(grpo(), COLOCATE, name="colocate"),
    "grpo_split": lambda: compiled_with(grpo(), SPLIT, name="split"),
    "grpo_own": lambda: compiled_with(grpo(epochs=2), OWN, name="own"),
    "grpo_pressure": lambda: compiled_with(
        grpo(path="models/wide", every=0), OWN, share=0.75, name="own"
    ),
    "ppo_apart": lambda: compiled_with(ppo(), APART, name="apart"),
    "ppo_pressure": lambda: compiled_with(
        ppo(path="models/wide"), COLOCATE, share=0.6, name="colocate"
    ),
    "ray_colocate": lambda: compiled_with(grpo(), COLOCATE, name="colocate", backend="ray"),
    "ray_split": lambda: compiled_with(grpo(), SPLIT, name="split", backend="ray"),
    "ray_mesh": lambda: compiled_with(grpo(), MESH, name="mesh"),
    "ray_twice": lambda: compiled_with(grpo(epochs=2), TWICE, name="twice"),
    "ray_pressure": lambda: compiled_with(grpo(path="models/wide"), MESH, share=0.8, name="mesh"),
    "grpo_paused": lambda: compiled_with(grpo(), PAUSED, name="split"),
    "ppo_streamed": lambda: compiled_with(
        ppo(ignore_eos=True), APART.model_copy(update={"stream": 2}), name="apart"
    ),
    "ray_wide": lambda: compiled_with(grpo(), WIDE, name="wide"),
    "grpo_gpus": lambda: compiled_with(grpo(), HYBRID, kind="h100", name="hybrid"),
}
