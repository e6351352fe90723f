"""What staleness does to a graph: versions bound, ratios against the rollout, losses refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import Finding, GraphError, PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.passes.staleness import allowed, stale_rollouts, stamp
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.examples import COLOCATE
from tests.scheduler.strategies import graph_of

WEIGHTS = rf.ImportanceSampling()
NOTHING: Any = None


def planned(graph: Graph, staleness: int) -> Plan:
    return Plan(
        graph=replace(graph, staleness=staleness),
        placement="placement",
        cluster="none",
        budgets={},
        backend="local",
        staleness=staleness,
        pools={},
    )


def stamped(graph: Graph, staleness: int = 1) -> Plan:
    return stamp(planned(graph, staleness), NOTHING)


def refused(graph: Graph, staleness: int = 1) -> tuple[Finding, ...]:
    with pytest.raises(PlanError) as caught:
        stamped(graph, staleness)
    return tuple(caught.value.findings)


def learning(
    loss: Any, *, epochs: int = 1, recomputed: bool = False, samples_only: bool = False
) -> Graph:
    """prompts -> samples -> reward -> advantage -> update, with old log-probs where asked."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, name="samples")
        if isinstance(loss, rf.SFTLoss):
            ops.update(actor, samples, loss=loss)
            return
        adv = ops.advantage("grpo", samples, ops.reward(length, samples))
        given = [ops.log_probs(actor, samples, name="old")] if recomputed else []
        seen = (
            samples.only("prompt_tokens", "response_tokens", "response_mask", "group")
            if samples_only
            else samples
        )
        ops.update(actor, seen, adv, *given, loss=loss, epochs=epochs)

    return graph_of(declare, "learning")


def length(response: str) -> float:
    return float(len(response))


def read(node: Node) -> dict[str, str]:
    """What a node reads, and from whom."""
    return {bound.name: f"{bound.source}.{bound.field.name}" for bound in node.inputs}


def update_of(plan: Plan) -> Node:
    return plan.graph.updates("actor")[-1]


# --- versions and ratios --------------------------------------------------------------------


def test_without_staleness_a_plan_stays_as_it_is():
    for loss in (rf.PolicyLoss(), rf.PolicyLoss(old="current"), rf.SFTLoss()):
        plan = planned(learning(loss), 0)
        assert plan is stamp(plan, NOTHING)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_an_update_reads_the_version_of_every_token(staleness):
    node = update_of(stamped(learning(rf.PolicyLoss(old="rollout")), staleness))
    assert "samples.version" == read(node)["version"]
    assert staleness == node.param("staleness")
    wanted = next(wants for wants in node.op.inputs if wants.name == "version")
    assert "version:int64[token]" == str(wanted)
    assert [b.name for b in node.inputs] == [w.name for w in node.op.inputs]


@pytest.mark.parametrize(
    ("epochs", "recomputed"), [(1, False), (1, True), (2, True), (2, False), (3, True)]
)
@pytest.mark.parametrize("samples_only", [False, True])
def test_a_choice_left_open_is_the_rollouts_own_log_probs(epochs, recomputed, samples_only):
    if epochs > 1 and not recomputed and samples_only:
        return
    graph = learning(
        rf.PolicyLoss(), epochs=epochs, recomputed=recomputed, samples_only=samples_only
    )
    plan = stamped(graph)
    node = update_of(plan)
    assert "rollout" == node.param("old")
    assert "samples.rollout_log_probs" == read(node)["rollout_log_probs"]
    assert "old_log_probs" not in read(node)
    assert "old_log_probs" not in {wants.name for wants in node.op.inputs}
    assert all(w.required for w in node.op.inputs if w.name == "rollout_log_probs")
    reasons = {d.source: d.why for d in node.declined if d.field == "old_log_probs"}
    assert {"old"} == reasons.keys() if recomputed else not reasons
    assert all("up to 1 update old" in why for why in reasons.values())
    already = epochs > 1 and not recomputed
    texts = [note.text for note in plan.notes if note.rule == "staleness"]
    expected = (
        "actor.update takes its ratio against samples's own log-probs: its rows are up to 1 "
        "update old"
    )
    assert ([] if already else [expected]) == texts


@pytest.mark.parametrize(
    ("loss", "epochs", "old"),
    [
        (rf.PolicyLoss(correction=WEIGHTS), 1, "current"),
        (rf.PolicyLoss(old="current", correction=WEIGHTS), 2, "current"),
        (rf.PolicyLoss(correction=WEIGHTS), 2, "recomputed"),
        (rf.PolicyLoss(old="recomputed", correction=WEIGHTS), 1, "recomputed"),
    ],
)
def test_weights_leave_the_proximal_policy_as_it_is(loss, epochs, old):
    graph = learning(loss, epochs=epochs, recomputed=old == "recomputed")
    plan = stamped(graph)
    before, after = graph.updates("actor")[0], update_of(plan)
    assert old == after.param("old")
    assert read(before) | {"version": "samples.version"} == read(after)
    assert () == plan.notes


def test_a_critic_reads_versions_and_needs_no_correction():
    plan = stamped(_ppo(), 2)
    for name in ("actor", "critic"):
        node = plan.graph.updates(name)[0]
        assert "samples.version" == read(node)["version"]
        assert 2 == node.param("staleness")
    assert "old" not in dict(plan.graph.updates("critic")[0].params)


def _ppo() -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        critic = rf.Model("critic", "models/tiny", head="value", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, max_new_tokens=8, name="samples")
        values = ops.values(critic, samples)
        adv = ops.advantage("gae", samples, ops.reward(length, samples), values)
        ops.update(critic, samples, adv, values, loss=rf.ValueLoss())
        ops.update(actor, samples, adv, loss=rf.PolicyLoss(), epochs=2)

    return graph_of(declare, "ppo")


def test_the_graph_of_another_staleness_has_another_hash():
    graph = learning(rf.PolicyLoss(old="rollout"))
    hashes = {stamped(graph, k).graph.hash for k in range(3)}
    assert 3 == len(hashes)


# --- who is stale ---------------------------------------------------------------------------


def _two_samplers(trained: bool) -> Graph:
    """A student that learns from what another model writes, which may itself learn."""

    def declare() -> None:
        adam = rf.AdamW(lr=1e-3)
        teacher = rf.Model("teacher", "models/tiny", optimizer=adam if trained else None)
        student = rf.Model("student", "models/tiny", optimizer=adam)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(teacher, prompts, n=2, max_new_tokens=8, name="samples")
        ops.update(student, samples, loss=rf.SFTLoss())
        if trained:
            adv = ops.advantage("grpo", samples, ops.reward(length, samples))
            ops.update(teacher, samples, adv, loss=rf.PolicyLoss())

    return graph_of(declare, "distil")


def test_a_model_that_nothing_updates_is_never_stale():
    plan = stamped(_two_samplers(trained=False))
    assert {} == stale_rollouts(plan.graph)
    assert "version" not in read(plan.graph.updates("student")[0])
    texts = [note.text for note in plan.notes]
    assert ["staleness=1 does nothing: no rollout of a model that learns"] == texts


def test_what_another_model_wrote_may_be_imitated_at_any_age():
    plan = stamped(_two_samplers(trained=True), 3)
    assert {"samples": 3} == stale_rollouts(plan.graph)
    assert 3 == plan.graph.updates("student")[0].param("staleness")


def test_an_evaluation_is_no_rollout_that_somebody_learns_from():
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        data = rf.data.arithmetic(digits=2)
        rows = ops.tokenize(actor, ops.prompts(data, batch=4))
        ops.update(actor, rows, loss=rf.SFTLoss())
        ops.evaluate(actor, data, length, every=1, max_new_tokens=8)

    plan = stamped(graph_of(declare, "sft"))
    assert {} == stale_rollouts(plan.graph)
    assert "version" not in read(update_of(plan))


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "staleness", "got", "fix"),
    [
        (
            rf.PolicyLoss(old="current", kl_coef=0),
            1,
            "PolicyLoss(ppo_clip, old=current), on rows of samples: staleness=1",
            'loss=rf.PolicyLoss("ppo_clip", old="rollout")',
        ),
        (
            rf.PolicyLoss(old="recomputed", clip=(0.2, math.inf)),
            2,
            "PolicyLoss(ppo_clip, clip=(0.2, inf), old=recomputed), on rows of samples: "
            "staleness=2",
            'loss=rf.PolicyLoss("ppo_clip", clip=(0.2, math.inf), old="recomputed", '
            "correction=rf.ImportanceSampling())",
        ),
        (rf.SFTLoss(), 1, "SFTLoss(), on rows of samples: staleness=1", "staleness=0"),
    ],
)
def test_a_loss_without_a_correction_is_refused(loss, staleness, got, fix):
    recomputed = getattr(loss, "old", "") == "recomputed"
    (finding,) = refused(learning(loss, recomputed=recomputed), staleness)
    assert "E402" == finding.code
    updates = "update" if staleness == 1 else "updates"
    what = f"no correction for rows of weights that are up to {staleness} {updates} old"
    assert f"actor.update has {what}" == finding.what
    assert finding.where is not None
    assert finding.where.text.startswith("ops.update(actor, s")
    assert got == finding.got
    assert fix == finding.fix
    for line in ('rf.PolicyLoss("ppo_clip"', 'old="rollout"', "correction=rf.ImportanceSampling()"):
        assert line in finding.expected
    assert finding.expected.endswith("; or staleness=0")


@pytest.mark.parametrize("old", ["current", "recomputed"])
def test_the_fix_is_accepted(old):
    recomputed = old == "recomputed"
    (finding,) = refused(learning(rf.PolicyLoss(old=old), recomputed=recomputed))
    loss = eval(finding.fix.removeprefix("loss="), {"rf": rf, "math": math})
    node = update_of(stamped(learning(loss, recomputed=recomputed)))
    assert "samples.version" == read(node)["version"]


def test_every_loss_without_a_correction_is_named_at_once():
    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(length, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss(old="current"))
        ops.update(actor, samples, loss=rf.SFTLoss(), name="imitate")

    findings = refused(graph_of(declare, "two"))
    assert ["actor.update", "imitate"] == [f.what.split()[0] for f in findings]


def test_tokens_of_unknown_versions_are_refused():
    """The text of a stale response, made tokens again, has no versions."""

    def declare() -> None:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        student = rf.Model("student", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, name="samples")
        adv = ops.advantage("grpo", samples, ops.reward(length, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())
        again = ops.tokenize(student, samples, response="response")
        ops.update(student, again, loss=rf.SFTLoss())

    (finding,) = refused(graph_of(declare, "again"))
    assert "E228" == finding.code
    assert "which weights sampled the tokens that student.update learns from" in finding.what
    assert "response_tokens of tokenize, from rows of samples" in finding.got


# --- the word on a pipeline -----------------------------------------------------------------


def test_the_placements_staleness_wins_where_it_is_said():
    graph = learning(rf.PolicyLoss())
    stale = replace(graph, staleness=2)
    said = {k: rf.Placement(pools={"all": 1}, assign={}, staleness=k) for k in (0, 1)}
    assert (0, 2) == (allowed(graph, COLOCATE), allowed(stale, COLOCATE))
    assert (0, 1) == tuple(allowed(stale, said[k]) for k in (0, 1))
    assert 1 == allowed(graph, said[1])


def _declared(cfg: rf.Config) -> None:
    actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
    adv = ops.advantage("grpo", samples, ops.reward(length, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())


def test_a_pipeline_may_say_its_staleness():
    assert 0 == rf.pipeline()(_declared).trace().staleness
    graph = rf.pipeline(staleness=3)(_declared).trace()
    assert 3 == graph.staleness
    edge = next(e for e in graph.edges if e.target == "actor.rollout" and e.kind == "weights")
    assert 4 == edge.distance


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2", None])
def test_a_staleness_that_is_no_number_of_updates_is_refused(wrong):
    with pytest.raises(GraphError) as caught:
        rf.pipeline(staleness=wrong)(_declared)
    (finding,) = caught.value.findings
    assert "E227" == finding.code
    assert f"staleness={wrong!r}" in finding.what
    assert finding.where is not None
    assert finding.where.text.startswith("rf.pipeline(staleness=wrong)")
