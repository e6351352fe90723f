"""An optimizer's state that stays on the host, and visits devices in a step: plans with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.modelfiles.visits import visiting_bytes, widened_bytes
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.distributions import VISITING, at_least
from rlflow.scheduler.costs.roofline import ROUNDED
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.efficiency import slowest
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.plan.plan import Part, Plan
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.strategies import exact, graph_of

HOSTED = {"offload": "optimizer"}
PARAMETERS = 7_615_616_512


def of_7b(
    longest: int, *, dtype: str = "bfloat16", moments: str = "float32", batch: int = 8
) -> Graph:
    def declare() -> None:
        adam = rf.AdamW(lr=1e-6, moments=moments)
        actor = rf.Model("actor", "shape:qwen2.5-7b", dtype=dtype, optimizer=adam)
        ref = rf.Model("ref", "shape:qwen2.5-7b", dtype=dtype)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=batch)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=longest)
        ref_lp = ops.log_probs(ref, samples)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.01)
        ops.update(actor, samples, advantage, ref_lp, loss=loss)

    return graph_of(declare)


def planned(longest: int, devices: int = 2, moments: str = "float32", **on: object) -> Plan:
    where = rf.on("all", **on)
    placement = rf.Placement(pools={"all": devices}, assign={"*": where})
    cluster = parse_cluster(f"h100:{devices}", 1)
    return compile_plan(of_7b(longest, moments=moments), placement, cluster, name="p").plan


def optimizer_of(plan: Plan) -> Part:
    return plan.part(plan.trained_instance("actor").optimizer)


def test_a_state_that_fits_is_resident() -> None:
    plan = planned(512)
    assert plan.trained_instance("actor").offload is None
    assert optimizer_of(plan).size == PARAMETERS // 2 * 8
    assert not any(note.rule == "offload" for note in plan.notes)


def test_seven_billion_parameters_train_on_two_devices() -> None:
    """Where no micro-batch fits beside the moments, they stay on the host, and the plan says so."""
    plan = planned(6000, recompute=False)
    actor, part = plan.trained_instance("actor"), optimizer_of(plan)
    assert actor.offload == "optimizer"
    assert "offload=optimizer" in actor.layout()
    assert (part.size, part.on_host) == (0, PARAMETERS // 2 * 8)
    assert plan.peaks[-1] >= PARAMETERS * 8
    assert not [action for action in plan.actions if action.part == part.name]
    (note,) = (note for note in plan.notes if note.rule == "offload")
    assert "actor@all/optimizer" in note.text
    assert "30.5 GB" in note.text
    assert plan.instance("ref@all").offload is None


def test_a_placement_says_it_of_the_models_that_are_trained() -> None:
    plan = planned(512, offload="optimizer")
    assert plan.trained_instance("actor").offload == "optimizer"
    assert plan.instance("ref@all").offload is None
    assert not any(note.rule == "offload" for note in plan.notes)
    assert plan.instance("ref@all").fsdp == plan.instance("actor@all").fsdp == 2


def test_a_step_takes_as_long_as_its_states_travel() -> None:
    resident, visiting = (
        planned(512, devices=4, **on).action("actor.update").cost
        for on in ({}, {"offload": "optimizer"})
    )
    kind = KINDS["h100"]
    there = PARAMETERS // 4 * 8 / (kind.host_link * kind.reached)
    updated = PARAMETERS // 4 * 32 / (kind.bandwidth * kind.reached)
    assert visiting.seconds - resident.seconds == pytest.approx(
        (there - updated) * slowest(4), rel=1e-3
    )


def test_one_process_has_master_weights_on_the_host_too() -> None:
    plan = planned(64, devices=1, offload="optimizer", recompute=True)
    part = optimizer_of(plan)
    assert (part.size, part.on_host) == (0, PARAMETERS * 12)


def test_what_visits_counts_where_it_is_the_most() -> None:
    assert at_least((("activations", 5),), 4) == (("activations", 5),)
    assert at_least((("activations", 5),), 6) == ((VISITING, 6),)
    plan = planned(512, offload="optimizer")
    cost = plan.action("actor.update").cost
    assert cost.transient >= visiting_bytes(PARAMETERS // 2, 8)


@pytest.mark.parametrize(
    "change", [{"size": 8}, {"on_host": 8 * (PARAMETERS // 2) - 8}, {"on_host": 0}]
)
def test_another_size_is_refused(change: dict[str, int]) -> None:
    plan = planned(512, offload="optimizer")
    assert not verify(plan, "notes")
    part = optimizer_of(plan)
    parts = tuple(replace(p, **change) if p.name == part.name else p for p in plan.parts)
    assert any(part.name in found for found in verify(replace(plan, parts=parts), "notes"))


def test_low_moments_take_half_wherever_they_are() -> None:
    """Of a state of one process its float32 weights stay as they are."""
    resident, visiting = (planned(512, moments="bfloat16", **on) for on in ({}, HOSTED))
    assert optimizer_of(resident).size == PARAMETERS // 2 * 4
    assert (optimizer_of(visiting).size, optimizer_of(visiting).on_host) == (0, PARAMETERS // 2 * 4)
    for plan in (resident, visiting):
        assert not verify(plan, "notes")
        assert [saved.size for saved in plan.saved] == [PARAMETERS // 2 * 8]
    wide = planned(512)
    update, kind = resident.action("actor.update"), KINDS["h100"]
    micros = {plan.trained_instance("actor").micro_tokens for plan in (resident, wide)}
    assert min(micros) == wide.trained_instance("actor").micro_tokens
    alone = planned(64, devices=1, moments="bfloat16", recompute=True, **HOSTED)
    assert optimizer_of(alone).on_host == PARAMETERS * 8
    rounding = PARAMETERS // 4 * ROUNDED / (kind.bandwidth * kind.reached)
    four = [
        planned(64, devices=4, moments=m).action("actor.update") for m in ("float32", "bfloat16")
    ]
    assert four[1].cost.seconds - four[0].cost.seconds == pytest.approx(
        rounding * slowest(4), rel=1e-3
    )
    assert update.cost.transient >= widened_bytes(PARAMETERS // 2, 2)


def test_wide_moments_are_not_said_in_a_graph() -> None:
    """So plans and runs from before the option stay what they are."""
    assert "moments" not in rf.AdamW(lr=1e-6).model_dump(mode="json")
    low = rf.AdamW(lr=1e-6, moments="bfloat16")
    assert low.model_dump(mode="json")["moments"] == "bfloat16"
    assert "moments=bfloat16" in low.describe()
    assert rf.AdamW.model_validate(low.model_dump(mode="json")) == low
