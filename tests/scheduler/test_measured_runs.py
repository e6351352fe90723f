"""From spans to estimates: what a run took is what the next plan says, and the period with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.graph import Graph
from rlflow.scheduler import observed
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import TABLE, Costs
from rlflow.scheduler.costs.pieces import Piece
from rlflow.scheduler.devices.cluster import Cluster, cpu_cluster
from rlflow.scheduler.devices.measured import NOTHING, MeasuredCosts
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.plan.plan import HOST, Action, Plan
from tests.scheduler.examples import COLOCATE, SPLIT, grpo, ppo
from tests.scheduler.strategies import exact, graph_of

WAIT = 0.004


@dataclass(frozen=True)
class Seen:
    action: str
    iteration: int
    start: float
    end: float
    ok: bool = True


def seconds_of(action: Action) -> float:
    """Some seconds for each action, in no relation to the estimates."""
    return 0.01 * (1 + sum(map(ord, action.id)) % 13)


def played(plan: Plan, turns: int, wait: float = WAIT) -> list[Seen]:
    """Every action starts `wait` after all that it comes after is over."""
    over: dict[tuple[str, int], float] = {}
    spans = []
    ahead = max(action.ahead for action in plan.actions)
    for turn in range(-ahead, turns):
        for action in plan.actions:
            iteration = turn + action.ahead
            ends = [over.get((dep.action, turn - dep.distance), 0.0) for dep in action.after]
            ready = max(ends, default=0.0)
            if 0 <= iteration < turns and action.due(iteration):
                start = ready + wait
                spans.append(Seen(action.id, iteration, start, start + seconds_of(action)))
                ready = spans[-1].end
            over[action.id, turn] = ready
    return sorted(spans, key=lambda span: span.start)


def costs_of(graph: Graph, plan: Plan, cluster: Cluster) -> Costs:
    return Costs(
        graph=graph,
        cluster=cluster,
        shapes={model.name: model_shape(model) for model in graph.models},
        backend=plan.backend,
        staleness=plan.staleness,
    )


def learned(
    graph: Graph, plan: Plan, cluster: Cluster, spans: list[Seen], **options: object
) -> MeasuredCosts:
    settings = {"begun": 0, "origin": "run", **options}
    found = observed.samples(plan, costs_of(graph, plan, cluster), spans, [], **settings)
    return NOTHING.adding(found)


def stale_grpo() -> Graph:
    """GRPO whose loss compares with the policy that sampled, so that rollouts may run ahead."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip", old="rollout"))

    return graph_of(declare, "grpo")


CASES = {"split": (grpo, SPLIT), "colocate": (grpo, COLOCATE), "ppo": (ppo, COLOCATE)}


@pytest.mark.parametrize("case", CASES)
def test_the_next_plan_says_what_the_run_took(case: str) -> None:
    declare, placement = CASES[case]
    graph = declare(every=0) if declare is grpo else declare()
    cluster = cpu_cluster(placement.num_devices(), threads=1, memory=4e9)
    first = compile_plan(graph, placement, cluster).plan
    spans = played(first, 8)
    known = replace(cluster, measured=learned(graph, first, cluster, spans))

    second = compile_plan(graph, placement, known).plan

    for action in second.actions:
        assert action.cost.source == "measured, 1 run", action.id
        alike = [a for a in first.actions if a.cost.moved == action.cost.moved != 0] or [action]
        times = {round(seconds_of(a) + WAIT, 9) for a in alike}
        assert min(times) - 1e-9 <= action.cost.seconds <= max(times) + 1e-9
    assert second.timing is not None
    measured = observed.period_of(played(second, 12), 0)
    assert second.timing.period == pytest.approx(measured, rel=0.02)


def one_learned(**options: object) -> tuple[Graph, Plan, Cluster, MeasuredCosts]:
    graph, cluster = grpo(every=0), cpu_cluster(2, threads=1, memory=4e9)
    plan = compile_plan(graph, SPLIT, cluster).plan
    found = learned(graph, plan, cluster, played(plan, 6), **options)
    return graph, plan, cluster, found


def test_the_first_iteration_is_left_out() -> None:
    graph, plan, cluster, _ = one_learned()
    slow = [
        replace(span, end=span.end + 100) if span.iteration == 0 else span
        for span in played(plan, 6)
    ]
    found = learned(graph, plan, cluster, slow)

    assert max(record.seconds for record in found.records) < 1
    assert {5} == {record.samples[0].count for record in found.records} - {
        record.samples[0].count for record in found.records if "dispatch" in record.key
    }


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_short_run_is_better_than_none_and_goes_when_there_is_a_longer(iterations: int) -> None:
    graph, plan, cluster, _ = one_learned()
    slow = [replace(s, end=s.end + 100 * (not s.iteration)) for s in played(plan, 2)]
    short = learned(graph, plan, cluster, [s for s in slow if s.iteration < iterations])
    longer = observed.samples(
        plan, costs_of(graph, plan, cluster), played(plan, 3), [], begun=0, origin="run"
    )

    sources = {record.source for record in short.records}
    assert {"measured, 1 short run"} == sources
    assert (iterations == 1) == (max(record.seconds for record in short.records) > 1)
    known = replace(cluster, measured=short)
    planned = compile_plan(graph, SPLIT, known).plan
    assert {"measured, 1 short run"} == {action.cost.source for action in planned.actions}
    assert {"measured, 1 run"} == {record.source for record in short.adding(longer).records}
    again = short.adding(longer).adding(
        (record.key, record.setting, record.samples[-1]) for record in short.records
    )
    assert {"measured, 1 run"} == {record.source for record in again.records}


def test_a_resumed_run_counts_its_own_iterations() -> None:
    graph, plan, cluster, _ = one_learned()
    spans = played(plan, 6)

    late = learned(graph, plan, cluster, spans, begun=4).records
    assert {"measured, 1 short run"} == {record.source for record in late}
    (count,) = {
        record.samples[0].count
        for record in learned(graph, plan, cluster, spans, begun=2).records
        if "dispatch" not in record.key
    }
    assert 3 == count


def test_spans_of_another_plan_do_not_count() -> None:
    graph, plan, cluster, found = one_learned()
    spans = [*played(plan, 6), *(Seen("of another placement", n, 0.0, 9.0) for n in range(9))]

    assert found == learned(graph, plan, cluster, spans)


def test_failed_spans_do_not_count() -> None:
    graph, plan, cluster, _ = one_learned()
    spans = [
        replace(s, ok=False, end=s.start + 50) if s.action == "reward" and s.iteration == 3 else s
        for s in played(plan, 6)
    ]
    record = next(r for r in learned(graph, plan, cluster, spans).records if "| reward" in r.key)

    assert 4 == record.samples[0].count
    assert record.seconds == pytest.approx(seconds_of(plan.action("reward")))


def test_waits_are_measured_over_what_is_not_due() -> None:
    """The evaluation of every third iteration stands between others on its device."""
    graph, cluster = grpo(every=3), cpu_cluster(2, threads=1, memory=4e9)
    plan = compile_plan(graph, SPLIT, cluster).plan
    spans = played(plan, 9)

    found = observed.start_waits(plan, spans, observed.window(spans, 0))

    assert {WAIT} == {round(wait, 9) for wait in found.values()}
    assert any(name == "eval" for name, _ in found)


def test_waits_are_measured_where_rollouts_run_ahead() -> None:
    graph, cluster = stale_grpo(), cpu_cluster(2, threads=1, memory=4e9)
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    placement = rf.Placement(pools={"train": 1, "gen": 1}, assign=assign, staleness=1)
    plan = compile_plan(graph, placement, cluster).plan
    spans = played(plan, 9)

    found = observed.start_waits(plan, spans, observed.window(spans, 0))

    assert max(action.ahead for action in plan.actions) > 0
    assert {WAIT} == {round(wait, 9) for wait in found.values()}


def test_the_wait_is_added_to_what_is_only_estimated() -> None:
    graph, plan, cluster, found = one_learned()
    unknown = tuple(r for r in found.records if "| reward" not in r.key)
    known = replace(cluster, measured=replace(found, records=unknown))
    node = graph.node("reward")
    before, after = (
        costs_of(graph, plan, devices).run(node, None, 1) for devices in (cluster, known)
    )

    assert after.seconds == pytest.approx(before.seconds + WAIT)
    assert f"{before.source}; dispatch measured, 1 run" == after.source


def test_a_chunk_takes_its_share_of_what_was_measured_whole() -> None:
    graph, plan, cluster, found = one_learned()
    costs = costs_of(graph, plan, replace(cluster, measured=found))
    node, instance = graph.node("ref.log_probs"), plan.instance("ref@gen")
    whole, half = (costs.run(node, instance, 1, Piece(count=n)) for n in (1, 2))
    halved = costs.table(node, instance, 1, Piece(count=2)).seconds
    share = halved / costs.table(node, instance, 1).seconds

    assert half.seconds - WAIT == pytest.approx(share * (whole.seconds - WAIT))
    assert "measured, 1 run, a chunk's share of it" == half.source


def test_another_setting_is_named() -> None:
    graph, plan, cluster, found = one_learned()
    four = replace(cluster, count=4, measured=found)
    costs = replace(costs_of(graph, plan, four), staleness=1)

    cost = costs.run(graph.node("reward"), None, 1)

    assert "measured, 1 run on 2 devices at staleness 0" == cost.source


@pytest.mark.parametrize("changed", ["rows", "threads", "backend", "epochs"])
def test_other_work_or_hardware_is_not_what_was_measured(changed: str) -> None:
    graph, plan, cluster, found = one_learned()
    if changed == "rows":
        nodes = (
            replace(n, params=tuple((k, 16 if k == "batch" else v) for k, v in n.params))
            for n in graph.nodes
        )
        graph = replace(graph, nodes=tuple(nodes))
    if changed == "epochs":
        graph = grpo(every=0, epochs=2)
    if changed == "threads":
        cluster = replace(cluster, threads=2)
    costs = costs_of(graph, plan, replace(cluster, measured=found))
    if changed == "backend":
        costs = replace(costs, backend="ray")

    cost = costs.run(graph.node("actor.update"), plan.instance("actor@train"), 1)

    assert cost.source.startswith(TABLE)


def test_measured_lengths_shape_what_is_not_measured_itself() -> None:
    graph, plan, cluster, _ = one_learned()
    figures = [
        (n, {"actor.rollout/length": 2.0, "actor.rollout/length_max": 4.0}) for n in range(6)
    ]
    costs = costs_of(graph, plan, cluster)
    found = observed.samples(plan, costs, played(plan, 6), figures, begun=0, origin="run")
    lengths = [entry for entry in found if entry[0].startswith("lengths")]
    known = replace(costs, cluster=replace(cluster, measured=NOTHING.adding(lengths)))
    node = graph.node("actor.rollout")

    assert (2.0, 8) == (known.lengths(node).mean, known.lengths(node).longest)
    assert known.lengths(node).expected_longest(16) == pytest.approx(4.0, rel=0.3)
    assert 4.0 == costs.lengths(node).mean
    instance = plan.instance("actor@gen")
    assert known.run(node, instance, 1).seconds < costs.run(node, instance, 1).seconds


def test_plans_are_the_same_for_the_same_measurements() -> None:
    graph, _, cluster, found = one_learned()
    known = replace(cluster, measured=found)
    plans = [compile_plan(graph, SPLIT, known).plan for _ in range(2)]

    assert plans[0].hash == plans[1].hash
    assert plans[0].hash != compile_plan(graph, SPLIT, cluster).plan.hash


def test_keys_name_no_address_and_no_time() -> None:
    _, _, _, found = one_learned()

    assert not any(re.search(r"0x[0-9a-f]{6}", record.key) for record in found.records)
    assert HOST == -1
