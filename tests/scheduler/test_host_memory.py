"""What hosts of accelerators hold: whole pages, that processes keep, and what loading takes."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rlflow.errors import PlanError
from rlflow.modelfiles.host_memory import LOADING_PIECE, PAGE, made_whole, pinned_bytes
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.memory.on_hosts import kept_in_place
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import HOST, LoadedState
from rlflow.scheduler.plan.saved import plan_from_json
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.memory import memory_fits
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.paged import line, part, plan_of, planned, random_plan
from tests.scheduler.test_saves import planned as of_devices

PLAIN = {"model_type": "qwen2", "tie_word_embeddings": False}
NAMES = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]


def test_what_sleeps_takes_whole_pages() -> None:
    plan = planned(replace(line(49), pinned=True))
    assert pinned_bytes(20) == PAGE == plan.peaks[HOST]
    assert not list(memory_fits(Facts(plan=plan)))
    wrong = replace(plan, pinned=False)
    assert list(memory_fits(Facts(plan=wrong)))


def test_each_process_keeps_the_most_that_it_has_lent() -> None:
    """One process has them at different times and needs the larger; two keep one each."""
    one, two, other = part("a", 3 * PAGE, 0), part("b", 2 * PAGE, 0), part("c", PAGE + 1, 1)
    plan = plan_of(10 * PAGE, [one, two, other], [])
    size, when, held = kept_in_place(plan, {"sleep:a": [one], "sleep:b": [two]}, {})
    assert (3 * PAGE, "sleep:a", ((3 * PAGE, "a"),)) == (size, when, held)
    size, when, _ = kept_in_place(plan, {"sleep:a": [one], "sleep:c": [other]}, {0: [(7, "rows")]})
    assert (5 * PAGE + 7, "") == (size, when)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(20), deadline=None)
def test_passes_and_verifier_agree_on_what_is_kept(seed: int) -> None:
    try:
        plan = planned(replace(random_plan(seed), pinned=True))
    except PlanError:
        return
    assert not list(memory_fits(Facts(plan=plan)))


def test_every_process_has_a_piece_while_it_loads() -> None:
    plan = of_devices(8)
    assert {i.name for i in plan.instances} == {load.instance for load in plan.loads}
    assert {LOADING_PIECE} == {load.size for load in plan.loads}
    assert not verify(plan, "notes")
    again = plan_from_json(json.loads(dump_plan(plan)))
    assert (again.loads, again.pinned) == (plan.loads, True)
    more = LoadedState(instance="ref@all", size=plan.peaks[HOST])
    assert any("states peaks" in text for text in verify(replace(plan, loads=(more,)), "notes"))


def test_a_model_that_is_made_whole_takes_its_weights_of_each_process() -> None:
    """One that ranks share is filled by pieces; one that each has whole is there eight times."""
    plan = of_devices(8)
    shape = replace(known_shape("qwen2.5-7b"), made_whole=True)
    costs = Costs(
        graph=plan.graph,
        cluster=parse_cluster("h100:8", 1),
        shapes=dict.fromkeys(("actor", "ref"), shape),
    )
    shared = plan.instance("ref@all")
    assert LOADING_PIECE == costs.loading(shared)
    alone = replace(shared, devices=(0,), fsdp=1, tp=1)
    assert 2 * shape.parameters == costs.loading(alone)
    model = plan.graph.model("ref").model_copy(update={"init": "random"})
    models = tuple(model if each.name == "ref" else each for each in plan.graph.models)
    drawn = replace(costs, graph=replace(plan.graph, models=models))
    # The embedding, in bfloat16, while it is drawn and as it is.
    assert 2 * 2 * shape.vocab * shape.hidden == drawn.loading(shared)


@pytest.mark.parametrize(
    ("config", "more", "whole"),
    [
        (PLAIN, [], False),
        (PLAIN, ["lm_head.weight"], False),
        (PLAIN | {"tie_word_embeddings": True}, [], False),
        (PLAIN | {"tie_word_embeddings": True}, ["lm_head.weight"], True),
        (PLAIN | {"quantization_config": {"quant_method": "fp8"}}, [], True),
        ({"model_type": "mixtral"}, [], False),
        ({"model_type": "gpt_oss"}, [], False),
    ],
)
def test_which_models_are_made_whole(
    config: dict[str, object], more: list[str], whole: bool
) -> None:
    assert made_whole(config, [*NAMES, *more]) is whole
