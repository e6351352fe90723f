"""Which version of the weights a picture says that each node reads."""

from __future__ import annotations

from dataclasses import replace

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.report.diagrams.graph_dot import graph_digraph
from rlflow.report.diagrams.mermaid import graph_mermaid
from rlflow.report.diagrams.versions import versions_of
from tests.scheduler.strategies import exact, graph_of


def two_updates() -> Graph:
    def declare() -> None:
        adam = rf.AdamW(lr=1e-3)
        actor = rf.Model("actor", "models/tiny", optimizer=adam)
        ref = rf.Model("ref", "models/tiny", optimizer=rf.Average())
        drafter = rf.Model("drafter", "models/tiny", optimizer=adam)
        frozen = rf.Model("frozen", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, drafter=drafter)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss(), name="first")
        ops.metrics(ops.log_probs(actor, samples, name="below"))
        ops.metrics(ops.log_probs(frozen, samples), name="fixed")
        given = ops.log_probs(ref, samples)
        ops.update(actor, samples, advantage, given, loss=rf.PolicyLoss(kl_coef=0.1), name="second")
        ops.train_drafter(drafter, samples)
        ops.average(ref, actor, name="follow")

    return graph_of(declare)


def test_what_is_declared_below_an_update_reads_the_weights_of_before_it():
    found = versions_of(two_updates().to_json())
    assert ["reads v[i]"] == found["below"]
    assert ["v[i] to v[i+1], update 1 of 2"] == found["first"]
    assert ["v[i] to v[i+1], update 2 of 2"] == found["second"]


def test_other_models_are_named_and_frozen_ones_have_no_version():
    found = versions_of(two_updates().to_json())
    assert ["reads v[i]", "reads drafter v[i-1] or newer"] == found["actor.rollout"]
    assert ["reads actor v[i+1]", "v[i] to v[i+1]"] == found["follow"]
    assert "frozen.log_probs" not in found


def test_under_staleness_a_rollout_reads_older_weights():
    found = versions_of(replace(two_updates(), staleness=2).to_json())
    assert "reads v[i-2] or newer" in found["actor.rollout"]
    assert ["reads v[i]"] == found["below"]


def test_pictures_say_it_on_the_nodes():
    graph = two_updates().to_json()
    assert "reads drafter v[i-1] or newer" in graph_digraph(graph, "TB").source
    assert "reads drafter v#91;i-1#93; or newer" in graph_mermaid(graph, "TB")
