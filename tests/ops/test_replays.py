"""A replay buffer: what is declared and refused, which rows are drawn, how old they may be."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.batch import flat, make_batch, ragged_rows, strings, text
from rlflow.errors import PlanError
from rlflow.graph.rules.counts import Counts
from rlflow.ops.bodies.rows import replays
from rlflow.runtime.worker.memories import rows_of_tensors, tensors_of
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices import cluster
from rlflow.scheduler.plan.plan import HOST, KeptRows, Spread
from rlflow.scheduler.plan.saved import plan_from_json
from rlflow.scheduler.verify.row_sets import memories_are_in_order
from rlflow.scheduler.verify.verify import verify
from tests.ops.calls import call_of
from tests.ops.test_loops import traced
from tests.ops.test_rowsets import exact

pytestmark = pytest.mark.torch
CORRECTED = rf.PolicyLoss("ppo_clip", correction=rf.ImportanceSampling(cap=5.0))
PLACED = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})


def learning(kept, loss):
    """A pipeline that learns from what `kept` makes of 4 groups of 3 samples."""

    def declare():
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=3, max_new_tokens=4)
        reward = ops.reward(exact, samples)
        batch = kept(samples, reward)
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=loss)

    return declare


def compiled(kept, loss, **placed):
    graph, findings = traced(learning(kept, loss))
    assert {"E112"} >= {code for code, _, _ in findings}, findings
    where = PLACED.model_copy(update=placed)
    return compile_plan(graph, where, cluster.cpu_cluster(1, threads=1, memory=4e9)).plan


def buffer(*given):
    return ops.replay(*given, keep=2, sample=6)


def test_rows_that_may_be_old_are_refused_where_nothing_corrects():
    kind = rf.PolicyLoss("ppo_clip", old="current")
    with pytest.raises(PlanError, match=r"(?s)E402.*2 updates old.*rows of replay: kept for later"):
        compiled(buffer, kind)


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_age_of_rows_is_proven(staleness):
    plan = compiled(buffer, CORRECTED, staleness=staleness)
    params = dict(plan.graph.node("actor.update").params)
    assert 2 + staleness == params["staleness"]
    assert "version" in {bound.name for bound in plan.graph.node("actor.update").inputs}


def test_the_ratio_is_against_the_policy_that_sampled_where_it_may_be_chosen():
    plan = compiled(buffer, rf.PolicyLoss("ppo_clip"))
    assert "rollout" == dict(plan.graph.node("actor.update").params)["old"]


def test_rows_are_counted():
    graph, _ = traced(learning(buffer, CORRECTED))
    assert Counts(groups=6, rows=18, least=4) == graph.node("replay").counts
    few, _ = traced(learning(lambda *given: ops.replay(*given, keep=2, sample=3), CORRECTED))
    assert few.node("replay").counts.fixed


@pytest.mark.parametrize(
    "kept",
    [
        lambda *given: ops.replay(*given, keep=0, sample=3),
        lambda *given: ops.replay(*given, keep=2, sample=13),
        lambda *given: ops.replay(*given, keep=2, sample=0),
        lambda *given: ops.replay(keep=1, sample=1).node and given[0],
    ],
)
def test_misuse_is_told(kept):
    _, findings = traced(learning(kept, CORRECTED))
    assert "E156" in {code for code, _, _ in findings}


def test_a_loop_does_not_keep_rows():
    def looped(*_):
        actor = rf.Model("other", "models/tiny")

        def attempt():
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
            samples = ops.rollout(actor, prompts, n=3, max_new_tokens=4)
            reward = ops.reward(exact, samples)
            kept = ops.replay(samples, reward, keep=1, sample=2)
            return kept, ops.informative(kept)

        return ops.repeat(attempt, until="informative", groups=4, at_most=3)

    _, findings = traced(learning(looped, CORRECTED))
    assert "E125" in {code for code, _, _ in findings}


def test_the_verifier_wants_each_run_after_the_one_before():
    plan = compiled(buffer, CORRECTED)
    runs = {"replay": [plan.action("replay")]}
    ordered = SimpleNamespace(plan=plan, runs=runs, comes_before=lambda *_: True)
    assert [] == list(memories_are_in_order(ordered))
    (said,) = memories_are_in_order(
        SimpleNamespace(**vars(ordered) | {"comes_before": lambda *_: 0})
    )
    assert "before it has those of the iteration before" in said
    twice = {"replay": runs["replay"] * 2}
    (said,) = memories_are_in_order(SimpleNamespace(**vars(ordered) | {"runs": twice}))
    assert "several processes" in said


DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}
PROMPT, RESPONSE = 5, 4
"""Tokens of the longest prompt of two digits, `12+34`, and of `max_new_tokens`."""


def as_long_as_planned(node, rows):
    """So many rows of what a node reads, each field at the longest that a plan takes it to be."""
    fields = {}
    for bound in node.inputs:
        dtype = DTYPES[bound.field.dtype]
        length = PROMPT if bound.name.startswith("prompt") else RESPONSE
        tokens = ragged_rows([[1] * length] * rows, dtype)
        fields[bound.name] = tokens if bound.field.level == "token" else torch.zeros(rows).to(dtype)
    return make_batch(fields, rows)


def test_the_plan_counts_what_is_kept_to_the_byte():
    plan = compiled(buffer, CORRECTED)
    node, memory = plan.graph.node("replay"), None
    for iteration in range(3):
        call = call_of(
            inputs=as_long_as_planned(node, 12),
            params=dict(node.params),
            wanted={"group"},
            iteration=iteration,
        )
        memory = replays.replay(replace(call, memory=memory)).memory
    held = sum(tensor.nbytes for tensor in tensors_of(memory).values())
    assert (KeptRows(node="replay", rows=24, size=held),) == plan.kept
    assert held == plan.peaks[HOST]
    assert [] == verify(plan, "notes")


@pytest.mark.parametrize("assigned", [{}, {"replay": rf.on("all")}])
def test_a_host_too_small_for_what_is_kept_is_refused(monkeypatch, assigned):
    placed = {"assign": PLACED.assign | assigned}
    (kept,) = compiled(buffer, CORRECTED, **placed).kept
    for short in (0, 1):
        monkeypatch.setattr(cluster.Cluster, "host_memory", kept.size - short)
        if not short:
            assert kept.size == compiled(buffer, CORRECTED, **placed).peaks[HOST]
            continue
        with pytest.raises(PlanError, match=r"(?s)E405.*rows that replay keeps.*smaller keep="):
            compiled(buffer, CORRECTED, **placed)


def test_hosts_count_what_is_kept_beside_their_devices():
    """The controller may be on either host; a device is on its own, beside what sleeps there."""
    plan = compiled(buffer, CORRECTED)
    pair = replace(plan, hosts=2, budgets={HOST: 10**9, 0: 10**9, 1: 10**9})
    assert (0, 1) == pair.hosts_keeping(plan.kept[0])
    run = replace(plan.action("replay"), takes=Spread(parts=((1,),)))
    others = tuple(a for a in plan.actions if a.id != run.id)
    assert (1,) == replace(pair, actions=(*others, run)).hosts_keeping(plan.kept[0])


def test_the_verifier_counts_what_is_kept():
    plan = compiled(buffer, CORRECTED)
    (kept,) = plan.kept
    wrong = {
        "the plan states those of []": replace(plan, kept=()),
        "keeps 2 iterations of 12 rows": replace(plan, kept=(replace(kept, rows=12),)),
        "the plan states peaks of": replace(plan, kept=(replace(kept, size=kept.size - 1),)),
        f"a host holds {kept.size} bytes": replace(plan, budgets={**plan.budgets, HOST: 9}),
    }
    for said, mutant in wrong.items():
        assert any(said in text for text in verify(mutant, "notes")), said


def test_a_saved_plan_has_what_is_kept():
    plan = compiled(buffer, CORRECTED)
    document = {**json.loads(json.dumps(plan.to_json())), "declared": plan.graph.to_json()}
    assert plan.kept == plan_from_json(document).kept


def drawn(iterations, *, keep, sample, fresh=True, saved=False):
    """What is drawn in each iteration, of two groups of two rows: (made in, group) of each row."""
    memory, found = None, []
    for iteration in range(iterations):
        rows = {
            "made": torch.full((4,), iteration),
            "word": text([f"{iteration}", "", "é", "w"]),
            "version": ragged_rows([[iteration] * k for k in range(4)], torch.int64),
            "group": torch.tensor([7, 7, 9, 9]),
        }
        params = {"keep": keep, "sample": sample} | ({} if fresh else {"fresh": False})
        call = call_of(
            inputs=make_batch(rows, 4), params=params, wanted=set(rows), iteration=iteration
        )
        made = replays.replay(replace(call, memory=memory))
        memory = rows_of_tensors(tensors_of(made.memory)) if saved else made.memory
        found.append(made)
    return found


def test_groups_are_whole_apart_and_no_older_than_they_may_be():
    for iteration, made in enumerate(drawn(7, keep=2, sample=3)):
        ages = iteration - made.fields["made"]
        assert 0 <= int(ages.min()) <= int(ages.max()) <= 2
        assert {2} == set(Counter(made.fields["group"].tolist()).values())
        assert min(3, 2 * (iteration + 1)) * 2 == made.rows
        assert ages.tolist() == sorted(ages.tolist(), reverse=True)
        assert 4 * min(iteration + 1, 2) == made.metrics["held"]


def test_new_groups_fill_up_where_older_ones_are_wanted_and_too_few():
    for iteration, made in enumerate(drawn(5, keep=1, sample=2, fresh=False)):
        assert {max(iteration - 1, 0)} == set(made.fields["made"].tolist())


@pytest.mark.slow
def test_every_group_is_drawn_about_as_often():
    ages = [
        i - m for i, made in enumerate(drawn(300, keep=2, sample=2)) for m in made.fields["made"]
    ]
    counts = Counter(int(age) for age in ages[20:])
    assert all(0.25 < counts[age] / sum(counts.values()) < 0.42 for age in range(3))


def test_what_a_checkpoint_gives_back_is_what_was_kept():
    for one, other in zip(
        drawn(5, keep=2, sample=3), drawn(5, keep=2, sample=3, saved=True), strict=True
    ):
        assert strings(one.fields["word"]) == strings(other.fields["word"])
        assert flat(one.fields["version"]).equal(flat(other.fields["version"]))
        assert one.fields["group"].equal(other.fields["group"])
