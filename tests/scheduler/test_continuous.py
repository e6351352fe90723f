"""Rollouts that never drain in plans: what becomes of their nodes, how old rows get, seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.roles import Drawn, Recalling
from rlflow.scheduler.costs.lengths import ResponseLengths, full_lengths, stages
from rlflow.scheduler.costs.rows.steady import Undrained, drawn_length, drawn_lengths, steady
from rlflow.scheduler.passes.staleness import stale_rollouts
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.search.text import placement_source
from rlflow.scheduler.search.tune import SearchLimits, search_placements
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import COLOCATE, OWN, SPLIT, compiled_with, grpo
from tests.scheduler.mutants import with_action
from tests.scheduler.strategies import PLENTY, cluster, exact, graph_of

ROLLOUT = "actor.rollout"
ALONE = rf.Placement(
    pools={"train": 1, "gen": 1}, assign={"*": rf.on("train"), ROLLOUT: rf.on("gen")}
)


def lasting(placement: rf.Placement, staleness: int, **more: object) -> rf.Placement:
    said = {"continuous": True, "staleness": staleness, **more}
    return placement.model_copy(update=said)


def gen_of(devices: int, **said: object) -> rf.Placement:
    assign = {**SPLIT.assign, ROLLOUT: rf.on("gen", **said)}
    return SPLIT.model_copy(update={"pools": {"train": 1, "gen": devices}, "assign": assign})


def made(placement: rf.Placement, staleness: int, **options: object) -> Plan:
    return compiled_with(grpo(**options), lasting(placement, staleness)).plan


@pytest.mark.parametrize(
    ("placement", "staleness", "beside"),
    [(SPLIT, 2, 1), (SPLIT, 5, 1), (COLOCATE, 1, 0), (COLOCATE, 3, 0), (OWN, 2, 0)],
    ids=["split 2", "split 5", "colocate 1", "colocate 3", "own 2"],
)
def test_of_the_staleness_one_update_is_for_running_beside(placement, staleness, beside):
    plan = made(placement, staleness)
    node, span = plan.graph.node(ROLLOUT), staleness - beside
    assert span == node.as_a(Recalling).keep
    assert span == plan.graph.node("prompts").as_a(Drawn).ahead
    assert beside == largest_lag(plan)[ROLLOUT]
    assert {ROLLOUT: staleness} == stale_rollouts(plan.graph)
    assert [(ROLLOUT, 16 * span)] == [(kept.node, kept.rows) for kept in plan.kept]
    assert staleness == dict(plan.graph.node("actor.update").params)["staleness"]


def test_the_plan_says_what_is_in_flight_and_how_old_it_gets():
    plan = made(SPLIT, 3)
    (note,) = (note.text for note in plan.notes if note.rule == "continuous")
    assert "up to 2 iterations ahead" in note
    assert "the 8 groups that are complete first" in note
    assert "A row lives through 2 updates at the most" in note
    assert "read anew" in note
    assert "rows of actor.rollout at most 2 updates older" in plan_text(plan)


def test_replicas_have_all_rows_and_share_the_work():
    one, two = made(SPLIT, 3), made(gen_of(2), 3)
    assert one.graph.hash == two.graph.hash
    run = two.action(ROLLOUT)
    assert [run.devices] == list(run.takes.parts) == list(run.makes.parts)
    assert run.cost.seconds < one.action(ROLLOUT).cost.seconds
    assert one.kept == two.kept
    (note,) = (note.text for note in two.notes if note.rule == "continuous")
    assert "a prompt goes to that of 2 replicas with the fewest live rows" in note
    apart = replace(run.takes, parts=tuple((device,) for device in run.devices), rule="balanced")
    assert verify(with_action(two, ROLLOUT, takes=apart), stage="notes")


def test_without_the_word_nothing_changes():
    plain = SPLIT.model_copy(update={"staleness": 2})
    one = compiled_with(grpo(), plain).plan
    two = compiled_with(grpo(), lasting(SPLIT, 2, continuous=False)).plan
    assert one.hash == two.hash
    assert one.hash != made(SPLIT, 2).hash


def test_weights_that_rows_live_through_come_in_every_iteration_and_are_proven():
    plan = made(SPLIT, 3)
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    assert 1 == reshard.every
    late = with_action(plan, ROLLOUT, reads=(("actor@gen", 3),))
    assert verify(late, stage="notes")
    assert not verify(plan, stage="notes")


def refused(placement: rf.Placement, graph=None) -> tuple[str, str]:
    with pytest.raises(PlanError) as error:
        compiled_with(graph or grpo(), placement)
    (finding,) = error.value.findings
    return finding.code, finding.got


@pytest.mark.parametrize(
    ("placement", "staleness"), [(SPLIT, 0), (SPLIT, 1), (COLOCATE, 0)], ids=str
)
def test_too_little_staleness_is_refused(placement, staleness):
    assert ("E291", f"staleness={staleness}") == refused(lasting(placement, staleness))


def test_prompts_that_others_read_are_refused():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        greedy = ops.rollout(actor, prompts, n=1, max_new_tokens=8, temperature=0, name="greedy")
        ops.metrics(ops.reward(exact, greedy, name="seen"), name="look")
        reward = ops.reward(exact, samples)
        adv = ops.advantage("grpo", samples, reward)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    with pytest.raises(PlanError) as error:
        compiled_with(graph_of(declare, "both"), lasting(ALONE, 2))
    assert {"E292"} == {finding.code for finding in error.value.findings}


@pytest.mark.parametrize(
    ("placement", "got"),
    [
        (lasting(SPLIT, 2, pause_at=4), "pause_at says where it takes newer weights"),
        (
            lasting(SPLIT, 2, assign={**SPLIT.assign, ROLLOUT: rf.on("gen", engine="vllm")}),
            "its engine is vLLM",
        ),
        (lasting(gen_of(2, tp=2), 2), "ranks share its weights, tp=2"),
    ],
    ids=["pause", "process", "cut"],
)
def test_what_cannot_be_continuous_is_refused(placement, got):
    with pytest.raises(PlanError) as error:
        compiled_with(grpo(every=0), placement)
    assert ("E292", got) in {(each.code, each.got) for each in error.value.findings} or got in str(
        error.value
    )


@pytest.mark.parametrize(("devices", "ranks"), [(1, 1), (2, 2), (4, 2)])
def test_the_ranks_of_an_engine_in_a_process_of_its_own_have_its_rows_in_one_place(devices, ranks):
    engine = rf.on("gen", engine="sglang", tp=ranks)
    placement = ALONE.model_copy(
        update={"pools": {"train": 1, "gen": devices}, "assign": {**ALONE.assign, ROLLOUT: engine}}
    )
    plan = compiled_with(grpo(every=0), lasting(placement, 3), kind="h100").plan
    assert 2 == plan.graph.node(ROLLOUT).as_a(Recalling).keep
    assert devices // ranks == len(plan.action(ROLLOUT).takes.devices)


LENGTHS = ResponseLengths(2048, 256.0, 0.9)


def test_lengths_are_drawn_as_they_are_distributed():
    source = drawn_lengths(LENGTHS, 0)
    drawn = sorted(drawn_length(LENGTHS, source) for _ in range(20_000))
    assert 256 == pytest.approx(sum(drawn) / len(drawn), rel=0.03)
    assert LENGTHS.survival(600) == pytest.approx(
        sum(length > 600 for length in drawn) / len(drawn), abs=0.01
    )
    assert drawn[-1] <= 2048


@pytest.mark.parametrize("span", [1, 2, 4, 8])
def test_as_many_tokens_are_decoded_as_rows_have_in_fewer_steps(span):
    """Work is conserved, and an iteration waits for its share of the longest row only."""
    drained = stages(LENGTHS, 256, 1)
    steps = sum(stage.tokens * stage.goes_on for stage in drained)
    found = steady(Undrained(LENGTHS, 32, 8, 256, span))
    tokens = sum(stage.tokens * stage.live for stage in found.stages)
    assert 256 * 256 == pytest.approx(tokens, rel=0.08)
    assert sum(stage.tokens for stage in found.stages) < 1.15 * steps / (span + 1) + 256
    assert max(stage.live for stage in found.stages) <= 257


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_have_as_many_tokens_a_step_together_as_their_rates(replicas):
    """So many times the rows on so many replicas take about the steps of one.

    Each turn waits for the one with the most rows, an eighth more than in the mean for four.
    """
    one = steady(Undrained(LENGTHS, 16, 4, 64, 2))
    found = steady(Undrained(LENGTHS, 16 * replicas, 4, 64 * replicas, 2, replicas))
    steps, alone = (sum(stage.tokens for stage in each.stages) for each in (found, one))
    assert alone == pytest.approx(steps, rel=0.15)
    most = sum(stage.tokens * stage.live for stage in found.stages)
    assert 1 <= most / (256 * 64) < 1.2
    assert one.rows == pytest.approx(found.rows, rel=0.4)


def test_of_a_tail_more_columns_are_read_than_rows_have_tokens_but_not_those_of_the_oldest():
    """Rows of 100 tokens that begin and end together are as old as their mean; those of a tail not.

    Two bands leave little of what one would read, 2.3 times as much as rows have.
    """
    alike = steady(Undrained(full_lengths(100), 8, 2, 16, 1))
    assert [stage.age for stage in alike.stages] == pytest.approx(alike.widths)
    found = steady(Undrained(LENGTHS, 32, 8, 256, 2))
    assert all(s.age <= w for s, w in zip(found.stages, found.widths, strict=True))
    decoded = sum(stage.tokens for stage in found.stages)
    read = sum(s.tokens * w for s, w in zip(found.stages, found.widths, strict=True)) / decoded
    mean = sum(stage.tokens * stage.age for stage in found.stages) / decoded
    assert 1.05 * mean < read < 1.5 * mean


def test_rows_of_one_length_flow_at_the_rate_of_the_room():
    found = steady(Undrained(full_lengths(100), 8, 2, 16, 1))
    assert 100 == pytest.approx(sum(stage.tokens for stage in found.stages), rel=0.01)
    assert found == steady(Undrained(full_lengths(100), 8, 2, 16, 1))


def test_large_batches_are_played_as_smaller_ones():
    small, large = (steady(Undrained(LENGTHS, groups, 8, 8 * groups, 2)) for groups in (64, 640))
    steps = [sum(stage.tokens for stage in each.stages) for each in (small, large)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)
    assert large.rows == pytest.approx(10 * small.rows)


def test_in_the_plan_staleness_1_4_and_8_differ():
    """On an accelerator, where a step takes as long for few rows: the period follows from rates."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=1000)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss())

    tail = rf.Lengths(response=rf.Length(mean=125, p95=400, max=1000))
    graph = replace(graph_of(declare, "long"), lengths=tail)

    def seconds(staleness: int, *, continuous: bool) -> float:
        assign = {**ALONE.assign, ROLLOUT: rf.on("gen", engine=rf.SGLang())}
        placement = lasting(ALONE, staleness, continuous=continuous, assign=assign)
        return compiled_with(graph, placement, kind="h100").plan.action(ROLLOUT).cost.seconds

    drained = seconds(1, continuous=False)
    assert drained == seconds(4, continuous=False)
    flows = [seconds(staleness, continuous=True) for staleness in (2, 4, 8)]
    assert drained / 1.7 > flows[0] > 1.1 * flows[1] > 1.1**2 * flows[2]


def test_a_search_has_rollouts_go_on_where_staleness_is_allowed_and_that_is_shorter():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=1000)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss())

    tail = rf.Lengths(response=rf.Length(mean=125, p95=400, max=1000))
    graph = replace(graph_of(declare, "long"), lengths=tail)
    found = {}
    for staleness in (0, 4):
        limits = SearchLimits(plans=20, staleness=staleness)
        found[staleness] = search_placements(graph, {}, cluster("h100", 2, PLENTY), limits=limits)
    best = found[4].rows[0]
    assert best.placement.continuous
    assert "continuous=True" in placement_source(best.placement)
    assert not any(row.placement.continuous for row in found[0].rows)
    drained = [row.period for row in found[4].rows if not row.placement.continuous]
    assert best.period < min([*drained, found[0].rows[0].period])
