"""How rows lie over devices: what ops, layouts and pools make of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.plan.plan import HOST, Action, Plan, Spread
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import COLOCATE, compiled_with, grpo, ppo
from tests.scheduler.player import play
from tests.scheduler.strategies import exact, graph_of, judged

WHOLE_ON_HOST = Spread(parts=((HOST,),))


def balanced(*parts: tuple[int, ...]) -> Spread:
    return Spread(parts=parts, rule="balanced")


def generated(*parts: tuple[int, ...]) -> Spread:
    return Spread(parts=parts, rule="generated")


def on_pool(devices: int, actor: rf.On | None = None, **assign: rf.On) -> rf.Placement:
    """Everything on one pool; `judge_`, say, stands for the node `judge`."""
    named = {name.removesuffix("_"): where for name, where in assign.items()}
    return rf.Placement(pools={"all": devices}, assign={"*": actor or rf.on("all"), **named})


def judging(
    per: str, dispatch: str = "", uneven: str = "pad", after: str | None = None, batch: int = 8
) -> Graph:
    """GRPO whose rewards an op of one's own reads: `judge`, after `before` where that is said."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=batch)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        if after is not None:
            reward = judged("before", "row", after, "pad")(reward).rename(reward="before")
        made = judged("judge", per, dispatch, uneven)(reward, samples)
        advantage = ops.advantage("grpo", samples, made.rename(reward="judge"))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    return graph_of(declare, "judging")


def spreads(plan: Plan, node: str) -> tuple[Spread | None, Spread | None]:
    action = plan.action(node)
    return action.takes, action.makes


def transfers(plan: Plan) -> dict[str, Action]:
    return {action.id: action for action in plan.actions if action.kind == "transfer"}


def refused(make: Callable[[], object]) -> list[str]:
    with pytest.raises(PlanError) as found:
        make()
    return [finding.code for finding in found.value.findings]


def test_rows_are_split_over_ranks_and_shared_within_tensor_parallel_groups() -> None:
    """Six nodes on a pool of 4; `tp=2` leaves two row parts of two devices each."""
    layout = on_pool(4, rf.on("all", tp=2), reward=rf.on("all"), advantage=rf.on("all"))
    plan = compiled_with(grpo(), layout).plan

    parts = (0, 1), (2, 3)
    assert (None, WHOLE_ON_HOST) == spreads(plan, "prompts")
    assert (balanced(*parts), generated(*parts)) == spreads(plan, "actor.rollout")
    assert (balanced(*parts), balanced(*parts)) == spreads(plan, "ref.log_probs")
    assert (balanced(*parts), None) == spreads(plan, "actor.update")
    assert (None, None) == spreads(plan, "eval")
    each = tuple((device,) for device in range(4))
    assert (balanced(*each), balanced(*each)) == spreads(plan, "reward")


def test_a_pool_of_one_device_has_all_rows() -> None:
    plan = compiled_with(grpo(), COLOCATE, backend="ray").plan

    assert {Spread(parts=((0,),)), WHOLE_ON_HOST, None} == {
        rows for action in plan.actions for rows in (action.takes, action.makes)
    }


def test_one_tensor_parallel_group_has_all_rows_on_every_rank() -> None:
    plan = compiled_with(grpo(), on_pool(2, rf.on("all", tp=2))).plan

    everywhere = Spread(parts=((0, 1),))
    assert (everywhere, everywhere) == spreads(plan, "actor.rollout")
    assert (everywhere, None) == spreads(plan, "actor.update")


@pytest.mark.parametrize(
    ("per", "dispatch", "takes"),
    [
        ("row", "", balanced((0,), (1,))),
        ("group", "", balanced((0,), (1,))),
        ("batch", "", Spread(parts=((0,),))),
        ("row", "all", Spread(parts=((0, 1),))),
        ("batch", "all", Spread(parts=((0, 1),))),
        ("row", "first", Spread(parts=((0,),))),
        ("row", "long_first", Spread(parts=((0,), (1,)), rule="long_first")),
        ("batch", "long_first", Spread(parts=((0,), (1,)), rule="long_first")),
    ],
)
def test_rows_of_an_op_of_ones_own_lie_as_it_says(per: str, dispatch: str, takes: Spread) -> None:
    graph = judging(per, dispatch)
    plan = compiled_with(graph, on_pool(2, judge=rf.on("all"))).plan

    assert (takes, takes) == spreads(plan, "judge")
    on_host = compiled_with(graph, on_pool(2)).plan
    assert (WHOLE_ON_HOST, WHOLE_ON_HOST) == spreads(on_host, "judge")


def test_parts_stay_as_their_maker_left_them_and_nothing_is_carried() -> None:
    """before (rows split over 0, 1) -> judge (parts): one spread, no transfer between them."""
    graph = judging("group", "parts", after="split")
    nodes = tuple(
        replace(n, inputs=tuple(b for b in n.inputs if b.name != "group"))
        if n.name == "judge"
        else n
        for n in graph.nodes
    )
    where = {"before": rf.on("all"), "judge": rf.on("all")}
    plan = compiled_with(replace(graph, nodes=nodes), on_pool(2, **where)).plan

    assert balanced((0,), (1,)) == plan.action("judge").takes
    assert "before" in [dep.action for dep in plan.action("judge").after]
    assert not [a for a in transfers(plan).values() if a.node == "before" and "all" in a.pool]


def test_parts_that_lie_elsewhere_are_refused_with_where_they_lie() -> None:
    """The reward is made on the host, the samples on four devices, not on these two."""
    pools = {"all": 4, "cpus": 2}
    assign = {"*": rf.on("all"), "judge": rf.on("cpus")}
    with pytest.raises(PlanError) as found:
        compiled_with(judging("row", "parts"), rf.Placement(pools=pools, assign=assign))

    (finding,) = found.value.findings
    assert "E220" == finding.code
    assert "reward: whole on devices [-1]" in finding.got


def test_parts_of_two_makers_have_to_be_alike() -> None:
    """The reward of `judge` is balanced on the pool, the group of the samples is generated."""
    where = {"reward": rf.on("all"), "judge": rf.on("all")}
    assert ["E220"] == refused(
        lambda: compiled_with(judging("group", "parts"), on_pool(2, **where))
    )


def test_rows_by_a_rule_of_ones_own_are_dispatched_anew_for_every_op() -> None:
    """before -> judge, both by `long_first` on the same ranks: the function is asked twice."""
    where = {"before": rf.on("all"), "judge": rf.on("all")}
    graph = judging("row", "long_first", after="long_first")
    plan = compiled_with(graph, on_pool(2, **where)).plan

    assert plan.action("before").makes == plan.action("judge").takes
    moved = plan.action("transfer:before->all")
    assert (moved.makes, moved.takes) == (plan.action("judge").takes, plan.action("before").makes)
    assert 0 == moved.cost.moved
    assert ["E220"] == refused(
        lambda: compiled_with(judging("row", "parts", after="long_first"), on_pool(2, **where))
    )


@pytest.mark.parametrize(("devices", "codes"), [(1, 0), (2, 1)])
def test_a_name_that_is_not_registered_is_refused_wherever_it_runs(
    devices: int, codes: int
) -> None:
    for where in ({}, {"judge": rf.on("all")}):
        with pytest.raises(PlanError) as found:
            compiled_with(judging("row", "long_frist"), on_pool(devices, **where))

        (finding,) = found.value.findings
        assert "E219" == finding.code
        assert ("long_first",) == finding.near


def test_no_rank_of_a_sharded_model_is_left_out() -> None:
    graph = grpo()
    nodes = tuple(
        replace(n, op=replace(n.op, dispatch="first")) if n.name == "ref.log_probs" else n
        for n in graph.nodes
    )
    lonely = replace(graph, nodes=nodes)

    assert ["E221"] == refused(lambda: compiled_with(lonely, on_pool(2)))
    assert compiled_with(lonely, COLOCATE, backend="ray")


def test_a_model_op_that_cannot_be_cut_has_all_rows_on_every_rank() -> None:
    graph = grpo()
    nodes = tuple(
        replace(n, op=replace(n.op, per="batch")) if n.name == "ref.log_probs" else n
        for n in graph.nodes
    )
    plan = compiled_with(replace(graph, nodes=nodes), on_pool(2)).plan

    assert Spread(parts=((0, 1),)) == plan.action("ref.log_probs").takes


@pytest.mark.parametrize(
    ("per", "batch", "uneven", "codes"),
    [
        ("row", 8, "pad", []),
        ("row", 5, "pad", []),
        ("row", 4, "refuse", []),
        ("row", 5, "refuse", ["E214"]),
        ("row", 3, "refuse", ["E214"]),
        ("row", 3, "pad", []),
        ("row", 1, "pad", ["E214"]),
        ("group", 3, "pad", ["E214"]),
    ],
)
def test_prompts_are_refused_where_parts_would_be_empty_or_the_op_wants_them_even(
    per: str, batch: int, uneven: str, codes: list[str]
) -> None:
    """`batch` prompts with two samples on four ranks."""
    assign = {"*": rf.on("all"), "judge": rf.on("four")}
    placement = rf.Placement(pools={"all": 1, "four": 4}, assign=assign)
    graph = judging(per, uneven=uneven, batch=batch)

    if codes:
        assert codes == refused(lambda: compiled_with(graph, placement))
        return
    plan = compiled_with(graph, placement).plan
    taken, _ = spreads(plan, "judge")
    assert taken is not None
    assert ("balanced" if batch >= 4 else "balanced rows") == taken.rule
    assert [] == play(plan, seed=batch)


def on_trainers(graph: Graph) -> Plan:
    assign = {"*": rf.on("gen"), "actor.train": rf.on("train")}
    placement = rf.Placement(pools={"gen": 1, "train": 4}, assign=assign)
    return compiled_with(graph, placement).plan


def test_samples_of_a_prompt_lie_apart_where_an_update_has_more_ranks_than_prompts() -> None:
    plan = on_trainers(judging("row", batch=3))

    apart = Spread(parts=((1,), (2,), (3,), (4,)), rule="balanced rows")
    assert (apart, None) == spreads(plan, "actor.update")
    (carried,) = (
        a for a in transfers(plan).values() if (a.node, a.pool) == ("actor.rollout", "train")
    )
    assert "balanced by tokens, the samples of a prompt apart, over 4 ranks" in carried.reason.text
    assert [] == play(plan, seed=0)


def test_the_verifier_refuses_groups_that_are_cut_for_nothing() -> None:
    plan = on_trainers(judging("row", batch=8))

    def cut(spread: Spread | None) -> Spread | None:
        if spread is None or spread.rule != "balanced":
            return spread
        return replace(spread, rule="balanced rows")

    actions = (replace(a, takes=cut(a.takes), makes=cut(a.makes)) for a in plan.actions)
    (broken,) = verify(replace(plan, actions=tuple(actions)), "timing")
    assert "actor.update cuts groups over 4 parts, and there are 8 prompts" == broken


def test_the_verifier_refuses_samples_that_are_shared_out_wrongly() -> None:
    """Two prompts of four samples on four ranks lie in two pieces each."""
    gen = rf.Placement(
        pools={"train": 1, "gen": 4},
        assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")},
    )
    plan = compiled_with(grpo(prompts=2, n=4), gen).plan
    takes, makes = spreads(plan, "actor.rollout")
    assert ("balanced samples", 2) == (takes and takes.rule, takes and takes.pieces)
    assert generated((1,), (2,), (3,), (4,)) == makes

    for pieces, problem in (
        (3, "actor.rollout draws 4 samples of a prompt in 3 pieces"),
        (1, "actor.rollout has 2 prompts in 1 pieces for 4 parts"),
    ):
        wrong = replace(takes, pieces=pieces)
        actions = (
            replace(a, takes=wrong if a.takes == takes else a.takes)
            if a.kind == "run"
            else replace(a, makes=wrong if a.makes == takes else a.makes)
            for a in plan.actions
        )
        assert problem in verify(replace(plan, actions=tuple(actions)), "timing")
    assert takes == Spread(**takes.as_json())


def test_losses_that_compare_samples_have_them_on_one_rank() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=3)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        pairs = ops.pair(samples, ops.reward(exact, samples))
        ref = rf.Model("ref", "models/mid")
        ops.update(actor, samples, pairs, ops.log_probs(ref, samples), loss=rf.DPOLoss())

    assert ["E214"] == refused(lambda: on_trainers(graph_of(declare)))


def test_prompts_of_a_mini_batch_have_to_reach_every_rank() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        loss = rf.PolicyLoss("ppo_clip")
        ops.update(actor, samples, advantage, loss=loss, mini_batches=4)

    graph = graph_of(declare)
    with pytest.raises(PlanError) as found:
        compiled_with(graph, on_pool(8))

    (finding,) = found.value.findings
    assert ("E214", "8 prompts, 4 mini-batches of them") == (finding.code, finding.got)
    assert "actor.update: 4 rows do not split over 8 ranks" in finding.what
    for devices, rule in ((4, "balanced rows"), (2, "balanced")):
        taken, _ = spreads(compiled_with(graph, on_pool(devices)).plan, "actor.update")
        assert taken is not None
        assert rule == taken.rule


def test_one_transfer_serves_everybody_who_reads_rows_alike() -> None:
    r"""actor.rollout (gen) -> ref.log_probs, critic.values, both updates (train)."""
    pools = {"train": 2, "gen": 2}
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen")}
    plan = compiled_with(ppo(), rf.Placement(pools=pools, assign=assign)).plan

    to_train = [
        a for a in transfers(plan).values() if (a.node, a.pool) == ("actor.rollout", "train")
    ]
    (moved,) = to_train
    waiting = {a.id for a in plan.actions if any(dep.action == moved.id for dep in a.after)}
    assert {"ref.log_probs", "critic.values", "critic.update", "actor.update"} <= waiting
    assert (generated((2,), (3,)), balanced((0,), (1,))) == (moved.takes, moved.makes)
    read = {
        bound.field.name
        for node in plan.graph.nodes
        if node.name in waiting
        for bound in node.inputs
        if bound.source == "actor.rollout"
    }
    assert read == set(moved.fields)


def test_transfers_of_one_source_to_one_pool_are_told_apart() -> None:
    """`judge` wants all rows on each rank of the pool, `reward` its part of them."""
    where = {"reward": rf.on("all"), "judge": rf.on("all")}
    plan = compiled_with(judging("group", "all"), on_pool(2, **where)).plan

    names = [name for name in transfers(plan) if name.startswith("transfer:actor.rollout->all")]
    assert ["transfer:actor.rollout->all", "transfer:actor.rollout->all#2"] == sorted(names)


def test_in_one_process_nothing_is_carried() -> None:
    local, ray = (compiled_with(grpo(), COLOCATE, backend=b).plan for b in ("local", "ray"))

    assert {} == transfers(local)
    assert len(transfers(ray)) == 3
    assert any("edges cross pools within one process" in note.text for note in local.notes)


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        (WHOLE_ON_HOST, balanced((0,), (1,)), 1.0),
        (WHOLE_ON_HOST, Spread(parts=((0, 1),)), 1.0),
        (generated((0,), (1,)), balanced((0,), (1,)), 0.5),
        (generated((0,), (1,)), balanced((2,), (3,)), 1.0),
        (generated((0,), (1,)), Spread(parts=((0, 1),)), 0.5),
        (generated((0,), (1,)), Spread(parts=((0,),)), 0.5),
        (Spread(parts=((0, 1),)), balanced((0,), (1,)), 0.0),
        (generated((0, 1), (2, 3)), balanced((0,), (1,), (2,), (3,)), 0.5),
        (balanced((0,), (1,)), balanced((0,), (1,)), 0.0),
    ],
)
def test_what_moves_is_what_no_process_has(source: Spread, target: Spread, share: float) -> None:
    from rlflow.scheduler.passes.transfer import moved_share

    assert share == moved_share(source, target)
