"""Rollouts that drop groups that are late, in plans: rows, refusals, order statistics, seconds."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.roles import Oversampled
from rlflow.graph.rules.check import most_rows, num_prompts
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import ResponseLengths, full_lengths, stages
from rlflow.scheduler.costs.measurement_keys import lengths_key
from rlflow.scheduler.costs.rows.oversampled import fewer, first_stages, of_first
from rlflow.scheduler.costs.rows.steady import drawn_length
from rlflow.scheduler.plan.saved import graph_from_json
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import SPLIT, compiled_with
from tests.scheduler.mutants import with_action
from tests.scheduler.strategies import PLENTY, cluster, exact, graph_of

ROLLOUT = "actor.rollout"
LENGTHS = ResponseLengths(2048, 256.0, 0.9)


def oversampled(first: int | None = 8, begun: int = 12, **options: object) -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=begun)
        said = {"n": 2, "max_new_tokens": 8} | options
        samples = ops.rollout(actor, prompts, first_groups=first, **said)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss(), mini_batches=4)

    return graph_of(declare, "oversampled")


def gen_of(devices: int, **said: object) -> rf.Placement:
    pools, on = {"train": 1, "gen": devices}, rf.on("gen", **said)
    return rf.Placement(pools=pools, assign={"*": rf.on("train"), ROLLOUT: on})


def test_who_reads_it_has_the_rows_of_the_first_groups():
    graph = oversampled()
    counted = {n.name: (num_prompts(graph, n), most_rows(graph, n)) for n in graph.nodes}
    assert (12, 12) == counted.pop("prompts")
    assert {(8, 16)} == set(counted.values())
    assert graph.hash != oversampled(first=4).hash
    assert oversampled(first=None).hash == oversampled(first=12).hash


def test_the_plan_says_what_is_dropped_and_who_is_favoured():
    plan = compiled_with(oversampled(), gen_of(1)).plan
    (note,) = (note.text for note in plan.notes if note.rule == "oversample")
    assert "begins 12 groups and makes the 8 that are complete first" in note
    assert "Short responses are favoured: 3.3" in note
    assert "of 4 that are sampled" in note
    alike = compiled_with(oversampled(ignore_eos=True), gen_of(1)).plan
    assert any("all have one length" in note.text for note in alike.notes)
    plain = compiled_with(oversampled(first=None), gen_of(1)).plan
    assert not any(note.rule == "oversample" for note in plain.notes)


def test_replicas_know_all_rows_and_a_rollout_is_not_streamed():
    plan = compiled_with(oversampled(), gen_of(2)).plan
    run = plan.action(ROLLOUT)
    assert [run.devices] == list(run.takes.parts) == list(run.makes.parts)
    apart = replace(run.takes, parts=tuple((device,) for device in run.devices), rule="balanced")
    assert verify(with_action(plan, ROLLOUT, takes=apart), stage="notes")
    chunks = compiled_with(oversampled(), gen_of(1).model_copy(update={"stream": 2})).plan
    assert chunks.action(ROLLOUT).chunk is None


def test_the_verifier_counts_the_groups():
    plan = compiled_with(oversampled(), gen_of(1)).plan
    assert not verify(plan, stage="notes")
    for wrong in (0, 12, 13):
        node = plan.graph.node(ROLLOUT)
        params = tuple((k, wrong if k == "first_groups" else v) for k, v in node.params)
        nodes = tuple(replace(n, params=params) if n is node else n for n in plan.graph.nodes)
        other = replace(plan, graph=replace(plan.graph, nodes=nodes))
        assert any(
            f"the first {wrong} of 12 groups" in each for each in verify(other, stage="notes")
        )


@pytest.mark.parametrize(
    ("placement", "got"),
    [
        (gen_of(2, tp=2), "ranks share its weights, tp=2"),
        (gen_of(1, engine="vllm"), "its engine is vLLM"),
        (gen_of(1, engine=rf.SGLang(deterministic=True)), "is a matter of time"),
    ],
    ids=["cut", "vllm", "deterministic"],
)
def test_who_cannot_end_with_the_first_groups_is_refused(placement, got):
    with pytest.raises(PlanError) as error:
        compiled_with(oversampled(), placement, kind="h100")
    (finding,) = error.value.findings
    assert "E293" == finding.code
    assert got in finding.got


@pytest.mark.parametrize("replicas", [1, 2])
def test_engines_in_processes_of_their_own_can(replicas):
    plan = compiled_with(oversampled(), gen_of(replicas, engine="sglang"), kind="h100").plan
    run = plan.action(ROLLOUT)
    assert "sglang" == plan.instance(run.instance).engine
    assert [run.devices] == list(run.takes.parts)


def test_it_goes_not_together_with_rows_that_never_drain():
    lasting = SPLIT.model_copy(
        update={"continuous": True, "staleness": 2, "assign": gen_of(1).assign}
    )
    with pytest.raises(PlanError) as error:
        compiled_with(oversampled(), lasting)
    assert ("E292", "it drops groups that are late") in {
        (each.code, each.got) for each in error.value.findings
    }


@pytest.mark.parametrize("first", [0, 13])
def test_as_many_groups_as_prompts_are_the_most(first):
    with pytest.raises(AssertionError, match=f"E118.*first_groups={first}"):
        oversampled(first=first)


def test_responses_of_a_rollout_are_no_groups_of_another():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        again = ops.rollout(actor, samples, n=2, max_new_tokens=8, first_groups=3, name="again")
        ops.metrics(ops.reward(exact, again), name="look")

    with pytest.raises(AssertionError, match="prompts, a group each"):
        graph_of(declare, "again")


def test_a_loop_draws_as_many_as_it_needs():
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))

        def trip():
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, first_groups=3)
            return samples, good(ops.reward(exact, samples))

        rows = ops.repeat(trip, until="good", groups=4, at_most=3)
        ops.update(actor, rows, loss=rf.SFTLoss())

    @rf.op(per="row")
    def good(reward: rf.Row[float]) -> rf.Row[bool]:
        return reward > 0

    with pytest.raises(AssertionError, match="it drops groups that are complete late"):
        graph_of(declare, "looped")


def test_a_graph_that_is_saved_has_the_role():
    graph = graph_from_json(compiled_with(oversampled(), gen_of(1)).plan.graph.to_json())
    assert [(ROLLOUT, 8)] == [
        (n.name, int(some.first_groups)) for n, some in graph.having(Oversampled)
    ]


def test_fewer_is_the_sum_of_binomial_probabilities():
    assert 0.5**10 * (1 + 10 + 45) == pytest.approx(fewer(3, 10, 0.5))
    assert [1.0, 1.0, 0.0] == [fewer(3, 2, 0.9), fewer(1, 5, 0.0), fewer(3, 5, 1.0)]
    assert 0.5 == pytest.approx(fewer(5000, 10_000, 0.5), abs=0.005)


def drawn_runs(groups: int, n: int, wanted: int, runs: int) -> tuple[float, float, float]:
    """Of drawn lengths: steps, tokens decoded, and tokens of a row that stays, in the mean."""
    source, steps, tokens, kept = random.Random(1), 0.0, 0.0, 0.0
    for _ in range(runs):
        drawn = [[drawn_length(LENGTHS, source) for _ in range(n)] for _ in range(groups)]
        stay = sorted(drawn, key=max)[:wanted]
        end = max(stay[-1])
        steps += end
        tokens += sum(min(length, end) for rows in drawn for length in rows)
        kept += sum(map(sum, stay)) / wanted / n
    return steps / runs, tokens / runs, kept / runs


@pytest.mark.parametrize(("groups", "n", "wanted"), [(40, 8, 32), (6, 2, 4), (20, 1, 5)])
def test_order_statistics_are_those_of_drawn_lengths(groups, n, wanted):
    steps, tokens, kept = drawn_runs(groups, n, wanted, 300)
    found = first_stages(LENGTHS, groups, n, wanted)
    assert steps == pytest.approx(sum(s.tokens * s.goes_on for s in found), rel=0.05)
    assert tokens == pytest.approx(sum(s.tokens * s.goes_on * s.live for s in found), rel=0.05)
    assert kept == pytest.approx(of_first(LENGTHS, groups, n, wanted).mean, rel=0.04)


def test_with_little_room_it_is_played_to_the_same_end():
    """Where the room is just enough both agree; with a quarter it takes longer."""
    whole = first_stages(LENGTHS, 40, 8, 32)
    steps = [
        sum(s.tokens * s.goes_on for s in first_stages(LENGTHS, 40, 8, 32, room))
        for room in (319, 80)
    ]
    assert sum(s.tokens * s.goes_on for s in whole) == pytest.approx(steps[0], rel=0.1)
    assert steps[1] > 1.3 * steps[0]
    assert all(s.live <= 81 for s in first_stages(LENGTHS, 40, 8, 32, 80))


def test_a_quarter_more_groups_end_long_before_the_longest_row():
    drained = sum(s.tokens * s.goes_on for s in stages(LENGTHS, 256, 1))
    dropped = sum(s.tokens * s.goes_on for s in first_stages(LENGTHS, 40, 8, 32))
    assert drained > 1.5 * dropped
    fixed = first_stages(full_lengths(100), 12, 2, 8)
    assert 100 == pytest.approx(sum(s.tokens * s.goes_on for s in fixed))


def test_in_a_plan_the_tail_is_cut():
    """On an accelerator, where a step takes as long for few rows."""
    tail = rf.Lengths(response=rf.Length(mean=125, p95=400, max=1000))
    seconds = {}
    for first, begun in ((None, 8), (8, 12)):
        graph = replace(oversampled(first, begun, max_new_tokens=1000), lengths=tail)
        plan = compiled_with(graph, gen_of(1), kind="h100").plan
        seconds[begun] = [plan.action(name).cost.seconds for name in (ROLLOUT, "actor.update")]
    assert seconds[8][0] > 1.3 * seconds[12][0]
    assert seconds[8][1] > seconds[12][1]


@pytest.mark.parametrize("first", [None, 8])
def test_lengths_that_were_measured_are_of_all_rows_or_of_those_that_were_kept(first, monkeypatch):
    """A run that kept all rows tells what is sampled, one that dropped some what is left of it."""
    graphs = {each: oversampled(each, max_new_tokens=1000) for each in (None, 8)}
    made = {
        each: Costs(graph=graph, cluster=cluster("cpu", 2, PLENTY), shapes={})
        for each, graph in graphs.items()
    }
    seen = lengths_key(graphs[first], graphs[first].node(ROLLOUT), 1000)
    record = SimpleNamespace(
        setting=SimpleNamespace(pipeline="oversampled"),
        chosen=(SimpleNamespace(length=200.0, longest=600.0),),
    )
    monkeypatch.setattr(Costs, "record_of", lambda self, key: record if key == seen else None)
    costs = made[8]
    sampled, kept = (costs.lengths(graphs[8].node(name)).mean for name in (ROLLOUT, "actor.update"))
    assert 200 == pytest.approx(sampled if first is None else kept)
    assert sampled > 1.1 * kept
    assert costs.lengths_from(graphs[8].node(ROLLOUT)) is record
    plain = made[None].lengths(graphs[None].node(ROLLOUT)).mean
    assert plain == pytest.approx(200 if first is None else 500)
