"""How old the weights can be that a node reads: proven from the order of actions alone.

shared      samples(i) after update(i - 1 - k)                               lag k
resharded   samples(i) after reshard(i - 1 - k), which is after update       lag k
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import rlflow as rf
from rlflow import ops
from rlflow.scheduler.passes.staleness import note_turns
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.plan import Action, Chunk, Dep, Instance, Plan, Reason
from tests.scheduler.examples import COLOCATE, OWN, SPLIT, compiled_with, grpo
from tests.scheduler.strategies import exact, graph_of

NOTHING: Any = None
REASON = Reason(rule="made", text="for a test")


def declare() -> None:
    actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", "models/tiny")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, name="samples")
    adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
    given = ops.log_probs(ref, samples, name="given")
    loss = rf.PolicyLoss(old="rollout", kl_coef=0.1)
    ops.update(actor, samples, adv, given, loss=loss, name="update")
    test = rf.data.arithmetic(digits=2, split="test")
    ops.evaluate(actor, test, exact, every=3, max_new_tokens=8, name="eval")


GRAPH = graph_of(declare, "lags")


def instance(name: str, *, device: int = 0, trained: bool = False) -> Instance:
    model, _, pool = name.partition("@")
    uses = ("train", "rollout") if trained else ("rollout",)
    return Instance(
        name=name, model=model, pool=pool, devices=(device,), uses=uses, trained=trained
    )


INSTANCES = (
    instance("actor@train", trained=True),
    instance("actor@gen", device=1),
    instance("ref@gen", device=1),
)


def run(name: str, where: str, *after: tuple[str, int], lag: int = 0, **options: Any) -> Action:
    deps = tuple(Dep(action=action, distance=distance, kind="order") for action, distance in after)
    writes = ((where, -1),) if name == "update" else ()
    return Action(
        id=options.pop("id", name),
        kind="run",
        node=name,
        instance=where,
        devices=next(i.devices for i in INSTANCES if i.name == where),
        pool=where,
        reason=REASON,
        after=deps,
        reads=((where, lag),),
        writes=writes,
        **options,
    )


def reshard(*after: tuple[str, int], **options: Any) -> Action:
    deps = tuple(Dep(action=action, distance=distance, kind="order") for action, distance in after)
    return Action(
        id="reshard",
        kind="reshard",
        instance="actor@train",
        targets=("actor@gen",),
        devices=(0, 1),
        pool="train+gen",
        reason=REASON,
        after=deps,
        **options,
    )


def plan_of(*actions: Action, staleness: int = 0) -> Plan:
    return Plan(
        graph=replace(GRAPH, staleness=staleness),
        placement="made",
        cluster="made",
        budgets={},
        backend="local",
        staleness=staleness,
        pools={"train": (0,), "gen": (1,)},
        instances=INSTANCES,
        actions=actions,
    )


@pytest.mark.parametrize("lag", range(4))
def test_a_reader_of_the_trained_instance(lag):
    update = run("update", "actor@train", ("samples", -lag), ("update", 1))
    plan = plan_of(run("samples", "actor@train", ("update", 1 + lag)), update)
    assert {"samples": lag} == largest_lag(plan)


@pytest.mark.parametrize("lag", range(4))
def test_a_reader_of_resharded_weights(lag):
    samples = run("samples", "actor@gen", ("reshard", 1 + lag))
    update = run("update", "actor@train", ("samples", 0), ("reshard", 1), ("update", 1))
    plan = plan_of(samples, update, reshard(("update", 0), ("samples", -lag)))
    assert {"samples": lag} == largest_lag(plan)


def test_a_way_around_may_prove_fresher_weights():
    """samples(i) after given(i) after update(i - 1), though it may wait for update(i - 3) only."""
    samples = run("samples", "actor@train", ("update", 3), ("given", 0))
    given = run("given", "ref@gen", ("update", 1))
    plan = plan_of(given, samples, run("update", "actor@train", ("samples", 0), ("update", 1)))
    assert {"samples": 0} == largest_lag(plan)


def test_models_that_nothing_updates_have_no_lag():
    plan = plan_of(run("given", "ref@gen"), run("update", "actor@train", ("update", 1)))
    assert {} == largest_lag(plan)


def test_a_reader_that_nothing_orders_has_no_bound():
    plan = plan_of(run("samples", "actor@train"), run("update", "actor@train", ("update", 1)))
    with pytest.raises(AssertionError, match="how old the weights are that samples reads"):
        largest_lag(plan)


@pytest.mark.parametrize(
    ("phase", "lag"),
    [(2, 0), (1, 1), (0, 2)],
)
def test_weights_that_come_every_few_iterations(phase, lag):
    """The evaluation of iterations 0, 3, ... reads what came in 2, 1 or 0 iterations before."""
    read = run("eval", "actor@gen", ("reshard", 1), every=3)
    moved = reshard(("update", 0), every=3, phase=phase)
    plan = plan_of(read, run("update", "actor@train", ("update", 1)), moved)
    assert {"eval": lag} == largest_lag(plan)


def test_the_oldest_of_all_iterations_counts():
    """What comes after 0, 3, ... is 2, 0 and 1 updates behind in iterations 3, 4 and 5."""
    read = run("samples", "actor@gen", ("reshard", 1))
    moved = reshard(("update", 0), every=3)
    plan = plan_of(read, run("update", "actor@train", ("update", 1)), moved)
    assert {"samples": 2} == largest_lag(plan)


def test_the_oldest_chunk_counts():
    chunks = [
        run(
            "samples",
            "actor@train",
            ("update", 2 - index),
            id=f"samples[{index + 1}/2]",
            chunk=Chunk(index=index, count=2),
        )
        for index in range(2)
    ]
    plan = plan_of(*chunks, run("update", "actor@train", ("update", 1)))
    assert {"samples": 1} == largest_lag(plan)


@given(st.integers(0, 3), st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_running_ahead_changes_what_a_turn_is_and_no_lag(lag, ahead):
    samples = run("samples", "actor@gen", ("reshard", 1 + lag))
    update = run("update", "actor@train", ("samples", 0), ("reshard", 1), ("update", 1))
    plan = plan_of(samples, update, reshard(("update", 0), ("samples", -lag)))
    turns = dict(zip(("samples", "update", "reshard"), ahead, strict=True))
    actions = [
        replace(
            action,
            ahead=turns[action.id],
            after=tuple(
                replace(dep, distance=dep.distance + turns[dep.action] - turns[action.id])
                for dep in action.after
            ),
        )
        for action in plan.actions
    ]
    assert {"samples": lag} == largest_lag(replace(plan, actions=tuple(actions)))


# --- plans of the compiler ------------------------------------------------------------------


def stale(placement: rf.Placement, staleness: int) -> rf.Placement:
    return rf.Placement(pools=placement.pools, assign=placement.assign, staleness=staleness)


@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("placement", [COLOCATE, OWN, SPLIT], ids=["colocate", "own", "split"])
def test_a_compiled_plan_has_the_lag_that_was_asked_for_and_no_other(placement, staleness):
    compiled = compiled_with(grpo(), stale(placement, staleness))
    assert {"actor.rollout": staleness, "eval": 0} == largest_lag(compiled.plan)
    ordered = dict(compiled.stages)["transfer"]
    assert largest_lag(ordered) == largest_lag(compiled.plan)


@pytest.mark.parametrize(
    ("where", "devices", "how"),
    [
        ("actor@train", (0,), "shares actor@train"),
        ("actor@gen", (0, 1), "takes turns with actor@train"),
        ("actor@gen", (1,), ""),
    ],
)
def test_a_rollout_that_cannot_run_ahead_is_noted(where, devices, how):
    samples = replace(run("samples", where, lag=1), devices=devices)
    plan = plan_of(samples, run("update", "actor@train"), staleness=1)
    notes = [note.text for note in note_turns(plan, NOTHING).notes]
    expected = f"samples {how}: nothing overlaps; a pool of its own lets it run ahead"
    assert ([expected] if how else []) == notes
    assert () == note_turns(replace(plan, graph=GRAPH), NOTHING).notes
