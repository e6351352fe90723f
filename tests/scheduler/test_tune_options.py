"""Options that `tune` tries where everything lies already: drafts by n-grams, TF32."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import cpu_cluster, parse_cluster
from rlflow.scheduler.search.engines import with_ngrams
from rlflow.scheduler.search.text import placement_source, tuned_json, tuned_text
from rlflow.scheduler.search.tune import SearchLimits, by_tf32, search_placements
from tests.scheduler.examples import SPLIT, grpo
from tests.scheduler.test_engine_drafters import drafted
from tests.scheduler.test_engine_plans import split
from tests.scheduler.test_tune import big, large_batch

FEW = SearchLimits(plans=4, top=2)
H100S = parse_cluster("h100:2", 1)


def wide(graph):
    models = tuple(m.model_copy(update={"path": "shape:qwen2.5-1.5b"}) for m in graph.models)
    return replace(graph, models=models)


def test_what_tf32_would_save_is_told_beside_the_best():
    graph = wide(grpo(prompts=64, n=8))
    found = search_placements(graph, {"split": SPLIT}, H100S, limits=FEW)
    assert found.tf32 is not None
    assert found.tf32.period < found.best.period
    assert all("tf32" not in instance.layout() for instance in found.best.plan.instances)
    again = compile_plan(graph, found.tf32.placement, H100S).plan
    assert again.timing == found.tf32.plan.timing
    text = tuned_text(found)
    assert "not tried: compile=True" in text
    assert f"with tf32=True {1e3 * found.tf32.period:.1f} ms" in text
    assert ", tf32=True)" in text.splitlines()[-1]
    assert found.tf32.period == tuned_json(found)["tf32"]["period"]


@pytest.mark.parametrize(
    ("graph", "cluster"),
    [
        (big(grpo()), H100S),
        (wide(grpo()), parse_cluster("mi300x:2", 1)),
        (wide(grpo()), cpu_cluster(2, threads=1, memory=1e9)),
    ],
)
def test_tf32_is_no_matter_of_other_dtypes_and_devices(graph, cluster):
    assert by_tf32(graph, SPLIT, cluster) is None


def test_engines_have_no_tf32_and_what_is_said_stays():
    placement = split().model_copy(deep=True)
    (found,) = [by_tf32(wide(grpo()), placement, H100S)]
    assert 'engine="sglang")' in placement_source(found)
    assert found.assign["actor.rollout"].tf32 is None
    said = rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", tf32=False)})
    assert by_tf32(wide(grpo()), said, H100S) is None


def test_engines_draft_by_n_grams_unless_something_drafts():
    said = replace(grpo(), acceptance=0.5)
    assert [] == list(with_ngrams(said, SPLIT))
    assert [] == list(with_ngrams(grpo(), split()))
    tried = list(with_ngrams(said, split()))
    assert [3, 7] == [p.assign["actor.rollout"].options.speculative.draft_tokens for p in tried]
    assert [] == list(with_ngrams(said, tried[0]))
    assert [] == list(with_ngrams(replace(drafted(), acceptance=0.5), split()))


@pytest.mark.parametrize(("acceptance", "drafts"), [(0.01, False), (0.95, True)])
def test_drafts_are_taken_where_they_are_accepted_often_enough(acceptance, drafts):
    graph = replace(large_batch("grpo", prompts=2, n=2, tokens=1024), acceptance=acceptance)
    limits = SearchLimits(plans=1, top=1, engine="sglang")
    found = search_placements(graph, {"apart": split()}, H100S, limits=limits)
    pasted = placement_source(found.best.placement)
    assert drafts is ('speculative=rf.Speculative(algorithm="NGRAM"' in pasted.replace("'", '"'))
    assert found.best.placement == eval(pasted, {"rf": rf})
