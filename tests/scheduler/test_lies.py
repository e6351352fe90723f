"""The verifier against plans that lie, and agree with themselves in what follows from the lie."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

import rlflow as rf
from rlflow.graph.graph import Graph
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.verify import MEANING, SHAPE, verify
from tests.scheduler import test_engine_drafters, test_engine_plans
from tests.scheduler.examples import COLOCATE, EXAMPLES, MESH, compiled_with, grpo
from tests.scheduler.lies import KINDS, lies
from tests.scheduler.looping import TWO, dapo, fitting
from tests.scheduler.test_averages import ema
from tests.scheduler.test_engine_plans import adapted
from tests.scheduler.test_episode_plans import planned as episodes

SIZES = ("tiny", "mid")
ON_GPUS = rf.Placement(
    pools={"all": 8}, assign={"*": rf.on("all"), "actor.rollout": rf.on("all", tp=2)}
)
APART_ON_GPUS = rf.Placement(
    pools={"train": 4, "gen": 4},
    assign={"*": rf.on("gen"), "actor.train": rf.on("train", recompute=True)},
    stream=2,
)


def big(dtype: str = "float32") -> Graph:
    """GRPO of a public model of seven billion parameters, known by its shape."""
    graph = grpo(path="shape:qwen2.5-7b")
    models = (model.model_copy(update={"dtype": dtype}) for model in graph.models)
    return replace(graph, models=tuple(models))


def looping() -> Plan:
    graph = dapo(at_most=3)
    return compiled_with(graph, fitting(graph, TWO), backend="ray").plan


PLANS: dict[str, Callable[[], Plan]] = {
    "mesh": lambda: EXAMPLES["ray_mesh"]().plan,
    "pressure": lambda: EXAMPLES["ppo_pressure"]().plan,
    "wide": lambda: EXAMPLES["ray_wide"]().plan,
    "streamed": lambda: EXAMPLES["ppo_streamed"]().plan,
    "engine": lambda: test_engine_plans.EXAMPLES["tight"]().plan,
    "drafter": lambda: test_engine_drafters.EXAMPLES["gpus"]().plan,
    "adapters": lambda: compiled_with(adapted(), ON_GPUS, kind="h100").plan,
    "average": lambda: compiled_with(ema(), MESH, kind="h100").plan,
    "loop": looping,
    "episodes": lambda: episodes(gen=2, engine="sglang"),
    "big": lambda: compiled_with(big("bfloat16"), ON_GPUS, kind="h100", memory=80e9).plan,
    "big apart": lambda: compiled_with(big(), APART_ON_GPUS, kind="h100", memory=80e9).plan,
}


@cache
def plan_of(name: str) -> Plan:
    return PLANS[name]()


# What no plan says twice: lies about that are accepted, each for its reason.
UNTOLD = {
    r"(pool|cache) x": "bytes of keys and values for a token",
    r"weights x": "parameters of a model that lies nowhere else, or of what adapters adapt",
    r"weights has \d+ on its host": "on a CPU so much of an engine's process as was measured",
    r"transfer:(prompts|actor.rollout|enough).* moves \d+": "how long prompts are",
    r"\[\d/\d\] works in twice": "what rows that end late hold",
    r"of the latency": "when exactly an iteration's first run starts",
}


def refusing(plan: Plan) -> list[str]:
    """The rules that a plan breaks; those of its shape alone where it breaks such."""
    facts = Facts(plan=plan)
    shape = [rule.__name__ for _, rule in SHAPE if any(rule(facts))]
    return shape or [rule.__name__ for _, rule in MEANING if any(rule(facts))]


def some(plan: Plan, count: int = 6) -> list[tuple[str, Callable[[], Plan]]]:
    """A few lies of each kind, always the same."""
    chance, found = random.Random(0), []
    for kind in KINDS.values():
        every = list(kind(plan))
        found += chance.sample(every, min(count, len(every)))
    return found


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", PLANS)
def test_lies_are_refused_but_about_what_is_told_once(name: str) -> None:
    plan = plan_of(name)
    assert [] == verify(plan, "notes")
    accepted = [what for what, lie in some(plan) if not verify(lie(), "notes")]
    assert [] == [what for what in accepted if not any(re.search(why, what) for why in UNTOLD)]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_lie_is_refused_but_about_what_is_told_once(name: str) -> None:
    accepted = [what for what, lie in lies(plan_of(name)) if not verify(lie(), "notes")]
    assert [] == [what for what in accepted if not any(re.search(why, what) for why in UNTOLD)]


@pytest.mark.parametrize(
    ("rule", "name", "what"),
    [
        ("sizes_agree", "mesh", "actor@all/optimizer x 2"),
        ("sizes_agree", "mesh", "ref@all/weights x 2"),
        ("sizes_agree", "big", "actor@all/gradients x 0.5"),
        ("sizes_agree", "adapters", "actor@all/optimizer x 2"),
        ("sizes_agree", "drafter", "actor@gen/sglang/weights x 2"),
        ("leftovers_are_right", "engine", "actor@all/sglang/pool leaves 16384000"),
        ("leftovers_are_right", "big", "actor@all/weights has "),
        ("sleeps_copy_their_parts", "pressure", "sleep:actor@all/optimizer moves 0"),
        ("sleeps_copy_their_parts", "engine", "sleep:ref@all/weights moves 1048576"),
        (
            "reshards_bring_what_lacks",
            "big apart",
            "reshard:actor@train->actor@gen moves 60924932096",
        ),
        ("rows_take_their_bytes", "mesh", "transfer:reward->host moves 128"),
        ("rows_take_their_bytes", "loop", "transfer:actor.rollout#2->host works in a byte"),
        ("costs_are_formed", "average", "ref.average works in a byte"),
        ("costs_are_formed", "mesh", "actor.update holds nothing of it"),
        ("costs_are_formed", "drafter", "actor.rollout works in a byte"),
        ("pieces_cost_alike", "streamed", "actor.rollout[1/2] works in twice as much"),
        ("chances_are_those_of_trips", "loop", "reward#2 with a chance of 0.25"),
        ("bounds_are_right", "mesh", "more slack of prompts"),
        ("bounds_are_right", "big", "nothing is busiest"),
        ("kinds_are_kept", "drafter", "actor@gen/sglang passes no tokens"),
        ("kinds_are_kept", "pressure", "wake:actor@all/optimizer of critic@all"),
    ],
)
def test_a_lie_that_one_rule_alone_refuses(rule: str, name: str, what: str) -> None:
    lie = next(lie for told, lie in lies(plan_of(name)) if told.startswith(what))
    assert [rule] == refusing(lie())


def test_two_sizes_that_are_lied_about_alike_agree() -> None:
    """What no plan can say of itself: that all of a model are larger than they are."""
    small, large = (compiled_with(grpo(path=f"models/{size}"), COLOCATE).plan for size in SIZES)
    assert small.peaks != large.peaks
    assert [] == refusing(replace(large, graph=small.graph))
