"""Rollouts whose replicas move rows to each other: who can, what the plan says, what it counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.roles import Balanced
from rlflow.graph.rules.check import most_rows, num_prompts
from rlflow.scheduler.costs.lengths import Load, ResponseLengths
from rlflow.scheduler.costs.rows.balanced import MovedRow, balanced_stages, staying_stages
from rlflow.scheduler.costs.rows.steady import drawn_length
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import SPLIT, compiled_with
from tests.scheduler.strategies import exact, graph_of
from tests.scheduler.test_oversample import ROLLOUT, gen_of

LENGTHS = ResponseLengths(1000, 125.0, 1.0)


def moving(every: int | None = 4, **options: object) -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=12)
        said = {"n": 2, "max_new_tokens": 8} | options
        samples = ops.rollout(actor, prompts, balance=every, **said)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss())

    return graph_of(declare, "moving")


def test_every_replica_knows_all_rows_and_the_plan_says_how_they_move():
    plan = compiled_with(moving(), gen_of(2)).plan
    run = plan.action(ROLLOUT)
    assert [run.devices] == list(run.takes.parts) == list(run.makes.parts)
    (note,) = (note.text for note in plan.notes if note.rule == "oversample")
    assert "evens the rows of its 2 replicas after every 4 turns" in note
    assert "by cache (" in note
    assert " 0 us by cache" not in note
    graph = plan.graph
    assert (12, 24) == (
        num_prompts(graph, graph.node(ROLLOUT)),
        most_rows(graph, graph.node(ROLLOUT)),
    )
    assert graph.node(ROLLOUT).as_a(Balanced).moves in ("cache", "reread")
    assert not verify(plan, stage="notes")
    alone = compiled_with(moving(), gen_of(1)).plan
    assert any("one replica, so no row moves" in note.text for note in alone.notes)


def test_the_verifier_asks_how_often_rows_move():
    plan = compiled_with(moving(), gen_of(2)).plan
    node = plan.graph.node(ROLLOUT)
    other = node.being(replace(node.as_a(Balanced), every=0))
    nodes = tuple(other if each is node else each for each in plan.graph.nodes)
    wrong = replace(plan, graph=replace(plan.graph, nodes=nodes))
    assert any("they do not move" in each for each in verify(wrong, stage="notes"))


@pytest.mark.parametrize(
    ("placement", "got"),
    [
        (gen_of(2, tp=2), "ranks share its weights, tp=2"),
        (gen_of(2, engine=rf.SGLang(deterministic=True)), "is a matter of time"),
        (gen_of(1, engine="vllm"), "its engine is vLLM"),
    ],
    ids=["cut", "deterministic", "vllm"],
)
def test_who_cannot_move_rows_is_refused(placement, got):
    with pytest.raises(PlanError) as error:
        compiled_with(moving(), placement, kind="h100")
    (finding,) = error.value.findings
    assert "E296" == finding.code
    assert got in finding.got
    assert "SGLang" in finding.expected


def test_rows_of_sglang_are_read_again_and_the_plan_says_what_that_takes():
    plan = compiled_with(moving(), gen_of(2, engine="sglang"), kind="h100").plan
    assert "reread" == plan.graph.node(ROLLOUT).as_a(Balanced).moves
    (note,) = (note.text for note in plan.notes if note.rule == "oversample")
    assert "evens the rows of its 2 replicas after every 4 turns; they move and are read" in note
    assert "SGLang gives no keys and values out" in note
    run = plan.action(ROLLOUT)
    assert [run.devices] == list(run.takes.parts) == list(run.makes.parts)
    assert not verify(plan, stage="notes")


@pytest.mark.parametrize(("engine", "moves"), [("sglang", "cache"), ("torch", "")])
def test_the_verifier_asks_in_which_way_rows_move(engine, moves):
    plan = compiled_with(moving(), gen_of(2, engine=engine), kind="h100").plan
    node = plan.graph.node(ROLLOUT)
    other = node.being(replace(node.as_a(Balanced), moves=moves))
    nodes = tuple(other if each is node else each for each in plan.graph.nodes)
    wrong = replace(plan, graph=replace(plan.graph, nodes=nodes))
    assert any("rows of actor.rollout move by" in each for each in verify(wrong, stage="notes"))


def test_the_verifier_knows_whose_samples_are_exact():
    plan = compiled_with(moving(), gen_of(2, engine="sglang"), kind="h100").plan
    instance = plan.instance(plan.action(ROLLOUT).instance)
    exact = instance.options.model_copy(update={"deterministic": True})
    others = tuple(
        replace(each, options=exact) if each is instance else each for each in plan.instances
    )
    wrong = verify(replace(plan, instances=others), stage="notes")
    assert any("by the clock of" in each for each in wrong)


def test_a_row_that_an_engine_gives_no_cache_of_is_priced_by_what_is_read_again():
    seconds = {}
    for every in (1, 16):
        graph = moving(every, max_new_tokens=64)
        run = compiled_with(graph, gen_of(2, engine="sglang"), kind="h100").plan.action(ROLLOUT)
        seconds[every] = run.cost.seconds
    assert seconds[1] > seconds[16], "fewer rows move, and what they read again is counted"
    row = MovedRow(cache=None, reread=2e-3, size=100, tokens=7)
    assert ("reread", 2e-3) == (row.shorter, row.seconds)
    assert ("cache", 1e-3) == (replace(row, cache=1e-3).shorter, replace(row, cache=1e-3).seconds)
    assert 2e-3 == replace(row, cache=3e-3).seconds


def test_rows_wait_where_a_replica_has_no_room_for_them():
    load = Load(rows=32, prompts=8, prompt=8, lengths=LENGTHS, peers=2)
    free, full = balanced_stages(load, 8), balanced_stages(load, 8, room=8)
    assert all(most <= 8 for _, most, _ in full)
    turns = [sum(s.tokens * s.goes_on for s, *_ in found) for found in (free, full)]
    assert turns[1] > turns[0]
    made = sum(s.tokens * s.goes_on * s.live for s, *_ in full)
    assert made == pytest.approx(64 * LENGTHS.mean, rel=0.1)


def test_it_goes_not_together_with_rows_that_never_drain():
    lasting = {"continuous": True, "staleness": 2, "assign": gen_of(1).assign}
    with pytest.raises(PlanError) as error:
        compiled_with(moving(), SPLIT.model_copy(update=lasting))
    assert ("E292", "its replicas move rows to each other") in {
        (each.code, each.got) for each in error.value.findings
    }


def test_a_number_of_turns_is_one_at_least():
    with pytest.raises(AssertionError, match=r"E118.*balance=0"):
        moving(0)


def played(rows: int, ranks: int, every: int, draws: int) -> tuple[float, float]:
    """The live rows of the fullest replica summed over turns, and rows that move, in the mean."""
    source, turns, moved = random.Random(3), 0, 0
    for _ in range(draws):
        live = [[drawn_length(LENGTHS, source) for _ in range(rows)] for _ in range(ranks)]
        now = 0
        while any(live):
            turns += max(map(len, live))
            now += 1
            live = [[length for length in each if length > now] for each in live]
            if now % every == 0:
                while len(most := max(live, key=len)) - len(least := min(live, key=len)) > 1:
                    least.append(most.pop())
                    moved += 1
    return turns / draws, moved / draws


@pytest.mark.parametrize(("rows", "ranks", "every"), [(32, 2, 8), (16, 4, 16), (8, 2, 1)])
def test_the_fullest_replica_has_as_many_rows_as_drawn_lengths_say(rows, ranks, every):
    load = Load(rows=rows, prompts=rows / 4, prompt=8, lengths=LENGTHS, peers=ranks)
    turns, moved = played(rows, ranks, every, 40)
    found = balanced_stages(load, every)
    assert turns == pytest.approx(sum(s.tokens * s.goes_on * most for s, most, _ in found), rel=0.1)
    counted = sum(s.tokens * s.goes_on * moves for s, _, moves in found)
    assert counted == pytest.approx(moved, rel=0.35)
    stays, _ = played(rows, ranks, 10_000, 40)
    assert stays == pytest.approx(sum(s.tokens * most for s, most in staying_stages(load)), rel=0.1)
    assert stays > turns
