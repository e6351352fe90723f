"""Plans of backwards in two halves: what ranks wait for and hold, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.pipeline import validation_findings
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.devices.cluster import KINDS, Cluster
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.search.candidates import Moves
from rlflow.scheduler.search.search import Search
from rlflow.scheduler.search.space import placed_uses
from tests.scheduler.test_virtual_stages import note, planned, update

SPLIT = {"schedule": "zero-bubble", "pp": 4, "tp": 2, "micro": 4096}


def waits(text: str) -> int:
    found = re.search(r"actor.update passes .* wait (\d+)%", text)
    assert found is not None, text
    return int(found[1])


def test_ranks_wait_for_less_and_hold_about_as_much() -> None:
    """F = B = W but for attention, so that a third of a bubble is left: Qi et al., table 1."""
    whole, split = (planned(**{**SPLIT, "schedule": s}) for s in ("1f1b", "zero-bubble"))
    assert "pp=4 schedule=zero-bubble tp=2" in split.trained_instance("actor").layout()
    assert "schedule" not in whole.trained_instance("actor").layout()
    seconds = [update(plan).cost.seconds or 0 for plan in (whole, split)]
    assert 0.6 < seconds[1] / seconds[0] < 1
    assert waits(note(split)) < 0.6 * waits(note(whole))
    assert "gradients of weights fill the bubble" in note(split)
    held = [dict(update(plan).cost.holds)["activations"] for plan in (whole, split)]
    # The fullest has something of four micro-batches in both.
    assert 1 <= held[1] / held[0] < 1.35


def test_what_is_kept_for_weights_counts_where_layers_are_computed_again() -> None:
    whole, split = (
        planned(**{**SPLIT, "schedule": s, "recompute": True}) for s in ("1f1b", "zero-bubble")
    )
    held = [dict(update(plan).cost.holds)["activations"] for plan in (whole, split)]
    assert held[1] > 2 * held[0]


MIXED = "shape:qwen3-30b-a3b"


def test_mixtures_keep_pairs_of_tokens_and_experts_for_their_weights() -> None:
    """What the all-to-all brings back is none of what fills the bubble."""
    on = {"pp": 4, "ep": 2, "micro": 4096, "gradient_sync": "last"}
    whole, split = (planned(MIXED, "h200", **on, schedule=s) for s in ("1f1b", "zero-bubble"))
    seconds = [update(plan).cost.seconds or 0 for plan in (whole, split)]
    assert 0.6 < seconds[1] / seconds[0] < 1
    assert waits(note(split)) < waits(note(whole))
    before, after = (dict(update(plan).cost.holds) for plan in (whole, split))
    assert after["activations"] > before["activations"]
    # Experts lie whole where tokens go to them: those of two ranks are all there are.
    waiting = "gradients that wait for the last micro-batch"
    assert before[waiting] == after[waiting] < 1e9


@settings(max_examples=8)
@given(
    ranks=st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]),
    apart=st.booleans(),
    again=st.sampled_from([False, True, "selective", 3]),
    micro=st.sampled_from([1024, 2048]),
)
def test_what_halves_keep_is_there_and_costs_no_time(ranks, apart, again, micro) -> None:  # type: ignore[no-untyped-def]
    """Beside the verifier, which every plan passes: of a last rank inputs and gradients of experts.

    Widths are those of Qwen3-30B-A3B: a token's 8 experts of 48 layers read and make 2048 numbers,
    with gate, up and product of 768 between.
    """
    pp, tp = ranks
    ep = 8 // (pp * tp) if apart else 1
    on = {"pp": pp, "tp": tp, "ep": ep, "recompute": again, "micro": micro}
    if pp * tp < 8:
        on |= {"gradient_sync": "last", "reshard_after_forward": True}
    whole, split = (planned(MIXED, "h200", **on, schedule=s) for s in ("1f1b", "zero-bubble"))
    assert {plan.trained_instance("actor").micro_tokens for plan in (whole, split)} == {micro}
    before, after = (update(plan).cost for plan in (whole, split))
    assert (after.seconds or 0) <= (before.seconds or 0)
    # The moment at which a rank has the most may be another: with logits, or before them.
    assert sum(dict(after.holds).values()) >= sum(dict(before.holds).values())
    kept = dict(after.holds)["activations"]
    layers = split.trained_instance("actor").stages[-1]
    assert kept > (pp - 1) * layers * micro * 8 * (2 * 2048 + 3 * 768) * 2 / tp


def test_tune_tries_halves_of_what_has_stages() -> None:
    graph, cluster = planned(**SPLIT).graph, Cluster(kind=KINDS["h100"], count=8)
    moves = SimpleNamespace(roles=placed_uses(graph), staleness=0)
    search = Search(
        graph=graph,
        moves=cast("Moves", moves),
        compiler=lambda where, name, _: compile_plan(graph, where, cluster, name=name).plan,
        budget=0,
        top=1,
    )
    train = rf.on("all", pp=4, tp=2, micro=4096)
    assign = {"*": train, "actor.rollout": rf.on("all", tp=2)}
    for where in (assign, {"*": rf.on("all")}):
        search.compile_written({"staged": rf.Placement(pools={"all": 8}, assign=where)}, 8)
    before = search.compiled
    search.compile_staged()

    assert 3 == search.compiled - before
    tried = [rf.Placement.model_validate_json(text) for text, _ in search.seen]
    said = [on for where in tried for on in where.assign.values() if on.schedule is not None]
    assert [train.model_copy(update={"schedule": "zero-bubble"})] == said


def test_a_plan_with_halves_is_read_back(tmp_path: Path) -> None:
    plan = planned(**SPLIT)
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert read_plan(path).trained_instance("actor") == plan.trained_instance("actor")
    assert '"schedule": "1f1b"' not in dump_plan(planned(pp=4, tp=2, micro=4096))


def test_ranks_that_share_weights_sum_gradients_once() -> None:
    instance = planned(pp=2, schedule="zero-bubble").trained_instance("actor")
    assert instance.fsdp == 4
    assert instance.reduces_last


@pytest.mark.parametrize(
    ("model", "on", "what"),
    [
        ("shape:qwen2.5-7b", {}, "two halves.*pp=1"),
        ("shape:qwen2.5-7b", {"pp": 2, "virtual": 2}, "two halves.*virtual=2"),
        ("shape:gpt-oss-20b", {"pp": 2}, "two halves.*experts"),
        ("shape:qwen2.5-7b", {"pp": 2, "gradient_sync": "each"}, 'each".*gradient_sync="last"'),
    ],
)
def test_what_cannot_be_in_halves_is_refused(model: str, on: dict[str, object], what: str) -> None:
    with pytest.raises(PlanError, match=f"(?s)E531.*{what}"):
        planned(model, schedule="zero-bubble", **on)


def test_a_rollout_apart_has_no_schedule_and_one_beside_the_rest_leaves_it_alone() -> None:
    graph, cluster = planned(**SPLIT).graph, Cluster(kind=KINDS["h100"], count=8)
    own = rf.on("all", schedule="zero-bubble", virtual=2)
    where = rf.Placement(pools={"all": 8}, assign={"*": rf.on("all"), "actor.rollout": own})
    what = r"E248.*a rollout has no (schedule=zero-bubble|virtual=2) and no"
    with pytest.raises(PlanError, match=what):
        compile_plan(graph, where, cluster)


def test_a_schedule_that_is_not_known_is_told_the_nearest() -> None:
    with pytest.raises(ValidationError) as caught:
        rf.on("all", pp=2, schedule="zero-buble")
    (found,) = validation_findings(caught.value, "E301")
    assert found.what == "schedule: Input should be '1f1b' or 'zero-bubble'"
    assert found.near == ("zero-bubble",)
