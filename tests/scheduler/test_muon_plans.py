"""Plans of models that Muon trains: one moment of matrices, and the time of their updates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import RlflowError
from rlflow.graph.model import Model
from rlflow.graph.text import graph_text
from rlflow.modelfiles.orthogonal import orthogonal_bytes, orthogonal_flops
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.distributions import ORTHOGONAL, VISITING
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.strategies import exact, graph_of

ADAM, MUON = rf.AdamW(lr=1e-6), rf.Muon(lr=1e-6)
# Of Qwen2.5-7B: queries and outputs, keys and values, feed-forward; 28 layers.
MATRICES = 28 * (2 * 3584 * 3584 + 2 * 512 * 3584 + 3 * 18944 * 3584)
LARGEST = (18944, 3584)


def planned(
    optimizer: object, devices: int = 4, path: str = "shape:qwen2.5-7b", **on: object
) -> Plan:
    def declare() -> None:
        actor = rf.Model("actor", path, dtype="bfloat16", optimizer=optimizer)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=64)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(pools={"all": devices}, assign={"*": rf.on("all", **on)})
    cluster = parse_cluster(f"h100:{devices}", 1)
    return compile_plan(graph_of(declare), placement, cluster, name="p").plan


def moments(plan: Plan) -> tuple[int | None, int]:
    part = plan.part(plan.trained_instance("actor").optimizer)
    return part.size, part.on_host


@pytest.mark.parametrize(
    "on", [{"fsdp": 4}, {"fsdp": 2, "tp": 2}, {"fsdp": 4, "offload": "optimizer"}]
)
def test_matrices_have_one_moment_wherever_they_are(on: dict[str, object]) -> None:
    one, other = (moments(planned(optimizer, **on)) for optimizer in (ADAM, MUON))
    place = 1 if "offload" in on else 0
    assert (one[place] or 0) - (other[place] or 0) == 4 * MATRICES // 4
    assert one[1 - place] == other[1 - place] == 0


def test_a_checkpoint_is_so_much_smaller() -> None:
    one, other = (planned(optimizer, fsdp=4).saved[0].size for optimizer in (ADAM, MUON))
    assert one - other == MATRICES


def test_owners_share_the_orthogonal_updates() -> None:
    """Beyond AdamW's a step has the products of a rank's matrices, and their way there and back."""
    seconds = {
        (name, devices): planned(optimizer, devices, fsdp=devices).action("actor.update").cost
        for (name, optimizer), devices in product({"adam": ADAM, "muon": MUON}.items(), (4, 8))
    }
    flops = 28 * sum(
        count * orthogonal_flops(rows, columns)
        for rows, columns, count in ((3584, 3584, 2), (512, 3584, 2), (18944, 3584, 3))
    )
    assert flops == pytest.approx(5.03e14, rel=0.1)
    for devices in (4, 8):
        more = (seconds["muon", devices].seconds or 0) - (seconds["adam", devices].seconds or 0)
        alone = flops / devices / (989e12 * 1.0)
        assert alone < more < 4 * alone


def test_what_a_step_makes_is_counted() -> None:
    """What states on the host take comes before; neither is beside what a backward holds."""
    made = orthogonal_bytes([LARGEST], 2, gathered=True)
    assert made == 2 * (3 * 18944 * 3584 + 3584**2)
    shape = known_shape("qwen2.5-7b")
    assert shape.in_matrices == MATRICES
    plan = planned(MUON, fsdp=4)
    assert ORTHOGONAL not in dict(plan.action("actor.update").cost.holds)
    assert VISITING != ORTHOGONAL


def test_the_verifier_knows_how_much_may_be_missing() -> None:
    plan = planned(MUON, fsdp=4)
    assert not verify(plan, "notes")
    name = plan.trained_instance("actor").optimizer
    size = plan.part(name).size or 0
    for wrong in (size + MATRICES, size - 2, size - 8 * MATRICES // 4):
        parts = tuple(replace(p, size=wrong) if p.name == name else p for p in plan.parts)
        saved = tuple(replace(s, size=s.size - size + wrong) for s in plan.saved)
        assert any(
            name in found for found in verify(replace(plan, parts=parts, saved=saved), "notes")
        )


def test_a_plan_says_which_optimizer() -> None:
    plan = planned(rf.Muon(lr=1e-3, momentum=0.9))
    assert "muon(lr=0.001, momentum=0.9)" in graph_text(plan.graph)
    assert "trained by muon" in plan_text(plan)
    assert "adamw(lr=1e-06)" in graph_text(planned(ADAM).graph)


def test_muon_is_declared_and_read_back() -> None:
    model = rf.Model("actor", "x", optimizer=rf.Muon(lr=1e-3, weight_decay=0.1))
    read = Model(**model.model_dump(mode="json"))
    assert read.optimizer == model.optimizer
    assert isinstance(
        Model(**rf.Model("actor", "x", optimizer=ADAM).model_dump()).optimizer, rf.AdamW
    )
    with pytest.raises(ValidationError, match="Extra inputs"):
        rf.Muon(lr=1e-3, moments="bfloat16")
    with pytest.raises(ValidationError, match="less than 1"):
        rf.Muon(lr=1e-3, momentum=1.0)
    with pytest.raises(ValidationError, match=r"orthogonal factors.*rf\.AdamW"):
        rf.Model("actor", "x", optimizer=rf.Muon(lr=1e-3), lora=rf.LoRA())


def test_experts_are_refused() -> None:
    with pytest.raises(RlflowError, match="E527"):
        planned(MUON, 1, "shape:mixtral-8x7b")
