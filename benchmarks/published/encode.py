"""A published setting as a pipeline, a placement and options; and what its plan predicts.

Goes through the public door: `rf.compile` and `rf.simulate`. Lengths are given as a user gives
them; the tail of responses is the one that plans assume. Knows nothing of what was measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import rlflow as rf
from published.rows import Setting
from rlflow import ops
from rlflow.cli.commands import Target, declare
from rlflow.errors import PlanError
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.models.mixtures import Experts
from rlflow.scheduler.search.tune import SearchLimits, Tuned, search_placements

# vLLM as rlflow starts it has its ranks on one host.
ENGINE, OVER_HOSTS = "vllm", "sglang"
# Lengths of GSM8K: a sync moves the same bytes whatever responses are.
SYNC_ROWS: Mapping[str, int] = {
    "prompts": 64,
    "samples": 8,
    "prompt_tokens": 100,
    "response_mean": 256,
    "response_limit": 512,
}
# Measurements of this machine, and the kernels of rlflow's head: the systems that are compared
# compute log-probs and entropies by torch's operators.
VARIABLES = ("RLFLOW_COSTS", "RLFLOW_HEAD_KERNEL")
TOO_LARGE = "E401"
PUBLISHED = "published"
# A quarter of what `rlflow tune` compiles at most, for dozens of searches.
PLANS = 60


class Config(rf.Config):
    """One setting; `mean` below the limit makes responses end by themselves."""

    iterations: int = 1
    model: str = "shape:qwen2.5-7b"
    prompts: int = 64
    samples: int = 8
    prompt_tokens: int = 100
    limit: int = 512
    fixed: bool = False
    mini_batches: int = 1
    old_log_probs: bool = True
    reference: bool = False
    train: bool = True
    stale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan says of a setting: seconds by quantity, or why there is no plan."""

    seconds: Mapping[str, float]
    span: tuple[float, float] | None = None
    """Seconds of an iteration in 90 % of the plan's worlds."""
    refused: str = ""
    too_large: bool = False

    def of(self, what: str) -> float | None:
        """The prediction of a quantity; None where the plan has none."""
        if what == "memory":
            return 0.0 if self.too_large else None if self.refused else 1.0
        return self.seconds.get(what)


def nothing(response: str) -> float:
    """A reward that takes no time."""
    return 0.0


def prompt_of(length: int) -> rf.data.DataSource:
    """Prompts that plans take to have as many tokens as they have characters."""

    def row(index: int) -> dict[str, Any]:
        return {"prompt": "x" * length}

    return rf.data.generator(row, size=1024, columns=("prompt",))


@rf.pipeline(
    staleness=1,
    placements={"one": rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})},
)
def published(cfg: Config) -> None:
    """GRPO with what the setting has of it, or a rollout alone."""
    trained = rf.AdamW(lr=1e-6) if cfg.train else None
    actor = rf.Model("actor", cfg.model, dtype="bfloat16", optimizer=trained)
    prompts = ops.prompts(prompt_of(cfg.prompt_tokens), batch=cfg.prompts)
    samples = ops.rollout(
        actor, prompts, n=cfg.samples, max_new_tokens=cfg.limit, ignore_eos=cfg.fixed
    )
    reward = ops.reward(nothing, samples)
    if not cfg.train:
        ops.metrics(reward)
        return
    scored = [ops.log_probs(actor, samples)] if cfg.old_log_probs else []
    if cfg.reference:
        ref = rf.Model("ref", cfg.model, dtype="bfloat16")
        scored.append(ops.log_probs(ref, samples))
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, *scored, loss=loss_of(cfg), mini_batches=cfg.mini_batches)


def loss_of(cfg: Config) -> rf.PolicyLoss:
    """The clipped loss, with the corrections that its samples need."""
    return rf.PolicyLoss(
        "ppo_clip",
        old="recomputed" if cfg.old_log_probs else "rollout",
        kl_coef=0.01 if cfg.reference else 0.0,
        correction=rf.ImportanceSampling(cap=5.0) if cfg.stale and cfg.old_log_probs else None,
    )


def config_of(setting: Setting) -> Config:
    """The setting's numbers."""
    said = {**SYNC_ROWS, **setting.said} if setting.said["algorithm"] == "sync" else setting.said
    return Config(
        model=f"shape:{said['shape']}",
        prompts=said["prompts"],
        samples=said["samples"],
        prompt_tokens=said["prompt_tokens"],
        limit=said["response_limit"],
        fixed=said.get("response_mean") == said["response_limit"],
        mini_batches=said.get("mini_batches", 1),
        old_log_probs=said.get("old_log_probs", True),
        reference=said.get("reference", False),
        train=said["algorithm"] != "generate",
        stale=said["placement"].get("staleness", 0) > 0,
    )


def placement_of(setting: Setting) -> rf.Placement:
    """The setting's placement."""
    said = setting.said["placement"]
    degrees = {axis: said.get(f"train_{axis}", 1) for axis in ("tp", "cp", "ep", "pp")}
    layout = {name: ranks for name, ranks in degrees.items() if ranks > 1}
    layout |= {"micro": setting.said["micro"]} if "micro" in setting.said else {}
    training = {"recompute": True} if setting.said.get("recompute") else {}
    hosts = setting.said["nodes"] * said["rollout_tp"] / devices_of(setting)
    rollout = {"tp": said["rollout_tp"], "engine": ENGINE if hosts <= 1 else OVER_HOSTS}
    if setting.said["algorithm"] == "generate":
        everything = {"*": rf.on("all", **rollout)}
        return rf.Placement(pools={"all": devices_of(setting)}, assign=everything)
    if said["kind"] == "colocate":
        pools, train, gen = {"all": devices_of(setting)}, "all", "all"
    else:
        pools, train, gen = {"train": said["train"], "gen": said["rollout"]}, "train", "gen"
    assign = {
        "*": rf.on(train, **layout),
        "actor.train": rf.on(train, **layout, **training),
        "actor.rollout": rf.on(gen, **rollout),
    }
    return rf.Placement(pools=pools, assign=assign, staleness=said.get("staleness", 0))


def devices_of(setting: Setting) -> int:
    """How many devices the setting has."""
    return int(setting.said["devices"].rpartition(":")[2])


def compiled(setting: Setting) -> rf.CompiledPlan:
    """The plan of a setting; PlanError where there is none."""
    config, said = config_of(setting), setting.said
    mean = None if config.fixed else said.get("response_mean")
    with unmeasured(), dispatched(said.get("dispatch", "rank")):
        return rf.compile(
            published,
            placement=placement_of(setting),
            config=config,
            devices=said["devices"],
            model_shape=said["shape"],
            lengths=rf.Lengths(prompt=config.prompt_tokens, response=mean),
        )


def predicted(setting: Setting) -> Prediction:
    """What the plan of a setting says."""
    try:
        plan = compiled(setting)
    except PlanError as error:
        first = error.findings[0]
        return Prediction(seconds={}, refused=first.what, too_large=first.code == TOO_LARGE)
    span = None if plan.range is None else (plan.range.low, plan.range.high)
    return Prediction(seconds=seconds_of(plan), span=span)


def tuned(setting: Setting) -> Tuned:
    """What a search finds on a setting's devices that has its placement to beat, no more stale."""
    placement, config, said = placement_of(setting), config_of(setting), setting.said
    mean = None if config.fixed else said.get("response_mean")
    target = Target(
        pipeline=published,
        config=config,
        model_shape=said["shape"],
        lengths=rf.Lengths(prompt=config.prompt_tokens, response=mean),
    )
    limits = SearchLimits(staleness=placement.staleness, top=1, plans=PLANS)
    with unmeasured():
        graph = declare(target).graph
        cluster = parse_cluster(said["devices"], 1)
        return search_placements(graph, {PUBLISHED: placement}, cluster, limits=limits)


def seconds_of(plan: rf.CompiledPlan) -> dict[str, float]:
    """Seconds of an iteration and of its parts, as sources tell them apart."""
    runs = {a.node: a.cost.seconds or 0.0 for a in plan.actions if a.kind == "run" and a.node}
    old, ref = (runs.get(f"{model}.log_probs", 0.0) for model in ("actor", "ref"))
    found = {
        "generation": runs.get("actor.rollout", 0.0),
        "training": runs.get("actor.update", 0.0),
        "old_log_probs": old,
        "reference": ref,
        "log_probs": old + ref,
        "sync": sync_of(plan),
        "iteration": rf.simulate(plan).period,
    }
    return {what: seconds for what, seconds in found.items() if seconds}


def sync_of(plan: rf.CompiledPlan) -> float:
    """Seconds from the trained weights to the engines': the reshard, and their waking for it."""
    reshards = [a for a in plan.actions if a.kind == "reshard"]
    filled = {target for a in reshards for target in a.targets}
    wakes = [
        a for a in plan.actions if a.kind == "wake" and a.instance in filled and a.part == "weights"
    ]
    return sum(a.cost.seconds or 0.0 for a in (*reshards, *wakes))


@contextmanager
def unmeasured() -> Iterator[None]:
    """Have plans take nothing from earlier runs, and a head as those systems compute it."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, "off"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def sent_to_each_expert(experts: Experts) -> float:
    """Numbers of a token that go one way where it goes once for each of its experts.

    As Megatron's alltoall dispatcher has it, whose ranks along tp have a part of the tokens each.
    """
    return experts.shape.chosen * experts.shape.hidden / experts.tp if experts.ep > 1 else 0.0


def dispatched(once_for_each: str) -> AbstractContextManager[object]:
    """Have plans send tokens once for each "expert" of theirs; for each "rank", as rlflow does."""
    if once_for_each == "rank":
        return nullcontext()
    return patch.object(Experts, "sent", property(sent_to_each_expert))
