"""Ranks that share the tokens between blocks that `tp` cuts: what plans choose, say and count."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.collectives import group_of
from rlflow.scheduler.models.activations import LayerBytes
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.explain import explain
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.test_visiting_plans import of_7b

H100 = "h100:8"


def planned(devices: str = H100, longest: int = 512, **on: object) -> Plan:
    placement = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all", **{"tp": 2, **on})})
    return compile_plan(of_7b(longest), placement, parse_cluster(devices, 8), name="p").plan


def test_accelerators_share_the_sequence_by_themselves_and_say_so() -> None:
    plan, plain = planned(), planned(sequence=False)
    actor, ref = plan.trained_instance("actor"), plan.instance("ref@all")
    assert actor.sequence
    assert ref.sequence
    assert actor.layout().startswith("fsdp=4 tp=2 sequence")
    assert not any(instance.sequence for instance in plain.instances)
    notes = [note.text for note in plan.notes if note.rule == "sequence"]
    for instance, note in zip((actor, ref), notes, strict=True):
        assert note.startswith(f"ranks of {instance.name} share the tokens")
    assert "that tp=2 cuts (sequence=True): " in notes[0]
    assert notes[0] in explain(plan, plan.action("actor.update"))
    assert notes[1] in explain(plan, plan.action("ref.log_probs"))
    assert not any(note.rule == "sequence" for note in plain.notes)
    assert plan.timing is not None
    assert plain.timing is not None
    assert plan.timing.period < plain.timing.period
    assert planned(sequence=True).actions == plan.actions


def test_an_update_holds_norms_and_residuals_of_a_part_of_the_tokens() -> None:
    """Of 7B in bfloat16: two inputs of norms, and their float32 copies, on half of the tokens."""
    shape = known_shape("qwen2.5-7b")
    whole = LayerBytes(shape=shape, size=2, ranks=2)
    shared = LayerBytes(shape=shape, size=2, ranks=2, sequence=2)
    assert whole.kept - shared.kept == (2 * 2 + 2 * 4) * 3584 / 2
    assert whole.passing - shared.passing == 2 * 2 * 3584 / 2
    assert whole.left(10, True) == 2 * shared.left(10, True) == 28 * 3584 * 2 * 10
    assert shared.worked_on(10, True) == shared.left(10, True) + 10 * shared.kept
    held = [
        dict(p.action("actor.update").cost.holds)["activations"]
        for p in (planned(longest=16_384, recompute=True, sequence=said) for said in (False, True))
    ]
    assert held[0] > 1.25 * held[1]


def test_a_block_sends_as_many_bytes_as_a_sum_does() -> None:
    """Around a ring an all-reduce is a reduce-scatter and an all-gather, begun once."""
    group = group_of(parse_cluster("h100:8", 8), range(8))
    size = 32_768 * 3584 * 2
    apart = group.reduce_scatter(size) + group.all_gather(size)
    assert apart == pytest.approx(group.all_reduce(size) + group.start)


def test_a_cpu_does_so_where_it_is_told_to() -> None:
    plan, told = planned("cpu:8@128GB"), planned("cpu:8@128GB", sequence=True)
    assert not any(instance.sequence for instance in plan.instances)
    assert told.trained_instance("actor").sequence
    assert "sequence" not in plan.trained_instance("actor").as_json()


def test_rollouts_and_ranks_alone_have_no_sequence_to_share() -> None:
    assert not planned(tp=1, sequence=True).trained_instance("actor").sequence
    assign = {"*": rf.on("train", tp=2), "actor.rollout": rf.on("gen", tp=2, sequence=True)}
    placement = rf.Placement(pools={"train": 4, "gen": 4}, assign=assign)
    plan = compile_plan(of_7b(512), placement, parse_cluster(H100, 8), name="p").plan
    assert not plan.instance("actor@gen").sequence
    assert plan.trained_instance("actor").sequence


def test_uses_that_share_weights_have_to_agree() -> None:
    assign = {"*": rf.on("all", tp=2), "ref": rf.on("all", tp=2, sequence=True)}
    placement = rf.Placement(pools={"all": 8}, assign=assign)
    plan = compile_plan(of_7b(512), placement, parse_cluster("cpu:8@128GB", 8), name="p").plan
    assert plan.instance("ref@all").sequence
    assert not plan.trained_instance("actor").sequence
    assign["actor.rollout"] = rf.on("all", engine="sglang", tp=2, sequence=True)
    wrong = rf.Placement(pools={"all": 8}, assign=assign)
    with pytest.raises(PlanError, match=r"E248.*sequence=True"):
        compile_plan(of_7b(512), wrong, parse_cluster(H100, 8), name="p")


def test_a_plan_that_shares_it_is_read_back(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    saved.write_text(dump_plan(planned()))
    assert read_plan(saved).trained_instance("actor").sequence


def test_where_memory_is_short_sharing_the_sequence_keeps_larger_micro_batches(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('devices = "mine:8"\n[kinds.mine]\nbase = "h100"\nmemory = 31e9\n')
    plans = (planned(str(file), 16_384, recompute=True, sequence=s) for s in (None, False))
    chosen, plain = (plan.trained_instance("actor") for plan in plans)
    assert chosen.sequence
    assert chosen.micro_tokens > plain.micro_tokens
