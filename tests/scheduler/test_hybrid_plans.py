"""Pools that overlap in part: a replica beside training sleeps, and one by itself does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import rlflow as rf
from rlflow.scheduler.compile import Compiled, dump_plan
from rlflow.scheduler.plan.plan import HOST, Plan
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import compiled_with, grpo
from tests.scheduler.mutants import asleep_everywhere, mutants
from tests.scheduler.player import play
from tests.scheduler.test_engine_plans import hybrid

ENGINES = {"torch": "torch", "sglang": rf.SGLang(max_total_tokens=4000)}


def planned(engine: str, share: float | None = 0.8, placement: object = None) -> Compiled:
    return compiled_with(
        grpo(path="models/wide", every=0), placement or hybrid(ENGINES[engine]), share=share
    )


def rollout_of(plan: Plan):
    (found,) = (i for i in plan.instances if i.uses == ("rollout",))
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_one_reshard_fills_all_replicas(engine: str) -> None:
    plan = planned(engine).plan
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    assert (rollout_of(plan).name,) == reshard.targets
    assert (0, 1, 2) == reshard.devices
    assert (1, 2) == rollout_of(plan).devices
    assert ((1,), (2,)) == plan.action("actor.rollout").takes.parts


@pytest.mark.parametrize("engine", ENGINES)
def test_the_replica_beside_training_sleeps_and_the_other_stays(engine: str) -> None:
    plan = planned(engine).plan
    held = rollout_of(plan)
    moves = [a for a in plan.actions if a.instance == held.name and a.part is not None]
    assert {"sleep", "wake"} == {a.kind for a in moves}
    assert {(1,)} == {a.devices for a in moves}
    assert {(2,)} == {plan.part(str(a.part)).stays for a in moves}
    assert {(1,)} == {plan.part(str(a.part)).leaves for a in moves}
    roomy = planned(engine, None).plan
    assert roomy.peaks[2] == plan.peaks[2]
    assert [] == [a.id for a in roomy.actions if a.part is not None]
    assert not any(part.stays for part in roomy.parts)


@pytest.mark.rows(1)
@pytest.mark.parametrize(("engine", "share"), [("torch", 0.8), ("sglang", 0.7)])
def test_hybrid_plans_hold_play_and_refuse_mutants(
    engine: str, share: float, tmp_path: Path
) -> None:
    plan = planned(engine, share).plan
    assert [] == verify(plan, "timing")
    for seed in range(4):
        assert [] == play(plan, seed)
    assert [] == [name for name, wrong in mutants(plan) if not verify(wrong, "timing")]
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert plan.hash == read_plan(path).hash


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replica_that_sleeps_for_nothing_is_rejected(engine: str) -> None:
    plan = planned(engine).plan
    kept = [part for part in plan.parts if part.stays]
    assert kept
    for part in kept:
        said = verify(asleep_everywhere(plan, part), "timing")
        assert [f"{part.name} sleeps on {[*part.stays]}, where it would have fitted"] == said


@pytest.mark.slow
def test_a_replica_sleeps_as_a_whole() -> None:
    """Two replicas of two ranks: the first rank of the first one is beside training."""
    placement = hybrid(ENGINES["sglang"], tp=2)
    pools = {"train": [0, 1], "gen": [1, 2, 3, 4]}
    plan = planned("sglang", 0.8, placement.model_copy(update={"pools": pools})).plan
    held = plan.part("actor@gen/sglang/weights")
    assert ((1, 2), (3, 4)) == (held.leaves, held.stays)
    assert [] == play(plan, 1)
    cut = (replace(p, stays=(2, 3, 4)) if p == held else p for p in plan.parts)
    said = verify(replace(plan, parts=tuple(cut)), "timing")
    assert any("which is no whole replica" in text for text in said)
    assert [] == [name for name, wrong in mutants(plan) if not verify(wrong, "timing")]


def test_what_stays_has_no_copy_on_the_host() -> None:
    """A reference on both pools' devices is offloaded where memory is short: 63 MB, not 126."""
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("gen")}
    placement = rf.Placement(pools={"train": [0, 1], "gen": [1, 2]}, assign=assign)
    plan = planned("torch", 0.7, placement).plan
    ref = plan.part("ref@gen/weights")
    assert ((1,), (2,)) == (ref.leaves, ref.stays)
    assert ref.size == plan.peaks[HOST]
    assert {ref.size} == {a.cost.moved for a in plan.actions if a.part == ref.name}


def test_a_part_that_never_sleeps_says_nothing_of_it() -> None:
    plan = planned("torch").plan
    told = {part["name"] for part in plan.to_json()["parts"] if "stays" in part}
    assert "actor@gen/weights" in told
    assert "actor@train/weights" not in told
    assert told == {part.name for part in plan.parts if part.stays}
