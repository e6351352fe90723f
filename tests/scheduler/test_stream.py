"""Pass `stream`: what is cut and what waits, what is refused, and how many chunks are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.passes.stream.chains import crossing_chains
from rlflow.scheduler.passes.stream.stream import choose_chunks
from rlflow.scheduler.plan.plan import Action, Chunk, Plan, Timing
from rlflow.scheduler.plan.text import duration, plan_text
from tests.scheduler.examples import APART, MESH, SPLIT, compiled_with, grpo, ppo
from tests.scheduler.strategies import (
    PLENTY,
    cluster,
    exact,
    graph_of,
    judged,
)

THREE = rf.Placement(
    pools={"train": 1, "gen": 1, "look": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("look")},
)
ONE_PLACE = rf.Placement(
    pools={"all": 1},
    assign={"*": rf.on("all"), "reward": rf.on("all"), "advantage": rf.on("all")},
)


def learning(plan: Plan) -> list[Node]:
    nodes = [node for node in plan.graph.nodes if node.op.use == "train"]
    return [node for node in nodes if "background" not in dict(node.params)]


def unordered() -> None:
    actor = rf.Model("actor", "pipelines/assets/arith-tiny", optimizer=rf.AdamW(lr=1e-3))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
    ops.update(actor, samples, loss=rf.SFTLoss(), shuffle=False)


def streamed(placement: rf.Placement, count: int | str) -> rf.Placement:
    return placement.model_copy(update={"stream": count})


def cut(graph: Graph, placement: rf.Placement, count: int | str, **options: object) -> Plan:
    return compiled_with(graph, streamed(placement, count), **options).plan


def runs(plan: Plan, node: str) -> list[Action]:
    return [a for a in plan.actions if a.kind == "run" and a.node == node]


def chunked(plan: Plan) -> set[str]:
    return {str(a.node) for a in plan.actions if a.kind == "run" and a.chunk is not None}


def read(action: Action) -> set[str]:
    return {dep.action for dep in action.after if dep.kind == "data"}


def notes(plan: Plan) -> str:
    return " ".join(note.text for note in plan.notes if note.rule == "stream")


def order_before(action: Action) -> set[str]:
    return {dep.action for dep in action.after if dep.kind == "order"}


def test_rows_that_end_first_go_to_row_ops_and_group_ops_wait():
    plan = cut(grpo(epochs=2), THREE, 4)
    assert {"actor.rollout", "reward", "ref.log_probs", "actor.log_probs"} == chunked(plan)
    for index in range(4):
        piece = f"[{index + 1}/4]"
        rollout = plan.action(f"actor.rollout{piece}")
        assert {"prompts"} == read(rollout)
        assert (index > 0) is (f"actor.rollout[{index}/4]" in order_before(rollout))
        assert ("actor@gen/weights", "actor.rollout/cache") == rollout.needs
        assert Chunk(index=index, count=4, by="finish") == rollout.chunk
        assert rollout.begins
        assert rollout.piece_read is None
        for node in ("reward", "ref.log_probs", "actor.log_probs"):
            action = plan.action(f"{node}{piece}")
            assert {f"actor.rollout{piece}"} == read(action)
            assert rollout.chunk == action.chunk == action.piece_read
            assert not action.begins
    (advantage,), (update,) = runs(plan, "advantage"), runs(plan, "actor.update")
    every = {f"{node}[{n}/4]" for node in ("actor.rollout", "reward") for n in (1, 2, 3, 4)}
    assert every == read(advantage)
    assert {"advantage", *(f"ref.log_probs[{n}/4]" for n in (1, 2, 3, 4))} < read(update)


def test_what_a_rollout_keeps_between_its_pieces_is_a_part():
    whole, plan = cut(grpo(), SPLIT, 1), cut(grpo(), SPLIT, 2)
    (one,) = runs(whole, "actor.rollout")
    part, held = plan.part("actor.rollout/cache"), dict(one.cost.holds)["KV cache"]
    assert ("cache", "actor@gen", (1,)) == (part.kind, part.instance, part.devices)
    assert held == part.size == part.residual
    assert part.name in plan.awake_at_start
    assert all("KV cache" not in dict(a.cost.holds) for a in runs(plan, "actor.rollout"))
    assert not any(a.part == part.name for a in plan.actions)
    assert not any(p.kind == "cache" for p in cut(grpo(ignore_eos=True), SPLIT, 2).parts)


def test_row_and_group_ops_are_cut_by_prompts_and_batch_ops_wait_for_all():
    plan = cut(grpo(epochs=2, ignore_eos=True), THREE, 4)
    assert chunked(plan) == {
        "actor.rollout",
        "reward",
        "ref.log_probs",
        "actor.log_probs",
        "advantage",
    }
    for index in range(4):
        piece = f"[{index + 1}/4]"
        rollout = plan.action(f"actor.rollout{piece}")
        assert {"prompts"} == read(rollout)
        before = {dep.action for dep in rollout.after if dep.kind == "order"}
        assert (index > 0) is (f"actor.rollout[{index}/4]" in before)
        assert {f"actor.rollout{piece}"} == read(plan.action(f"ref.log_probs{piece}"))
        assert {f"actor.rollout{piece}", f"reward{piece}"} == read(plan.action(f"advantage{piece}"))
        assert Chunk(index=index, count=4) == plan.action(f"reward{piece}").chunk
    (update,) = runs(plan, "actor.update")
    wanted = {
        f"{node}[{n}/4]"
        for node in ("actor.rollout", "advantage", "ref.log_probs", "actor.log_probs")
        for n in (1, 2, 3, 4)
    }
    assert wanted == read(update)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_estimator_over_the_batch_is_not_cut(ignore_eos):
    plan = cut(ppo(ignore_eos=ignore_eos), APART, 2)
    assert {"actor.rollout", "reward", "ref.log_probs", "critic.values"} == chunked(plan)
    (advantage,) = runs(plan, "advantage")
    assert {f"critic.values[{n}/2]" for n in (1, 2)} < read(advantage)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_reads_other_rows_too_is_not_cut(ignore_eos):
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, ignore_eos=ignore_eos)
        reward = ops.reward(exact, samples)
        whole = judged("whole", "batch", "", "pad")(reward)
        after = judged("after", "row", "", "pad")(whole.rename(reward="whole"))
        advantage = ops.advantage("grpo", samples, after.rename(reward="after"))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    plan = cut(graph_of(declare), SPLIT_NO_REF, 2)
    assert {"actor.rollout", "reward"} == chunked(plan)


SPLIT_NO_REF = rf.Placement(
    pools={"train": 1, "gen": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen")},
)


@pytest.mark.parametrize(("ignore_eos", "what"), [(False, "5 rows that end"), (True, "4 groups")])
def test_a_chunk_costs_its_share_and_says_what_it_is_for(ignore_eos, what):
    whole, plan = (cut(ppo(ignore_eos=ignore_eos), APART, n) for n in (1, 2))
    first = plan.action("actor.rollout[1/2]")
    assert "streamed" == first.reason.rule
    assert f"critic.values can start on the first {what}" in first.reason.text
    (one,) = runs(whole, "actor.rollout")
    assert 0 < first.cost.seconds < one.cost.seconds
    assert 0 < first.cost.transient < one.cost.transient


def test_without_chunks_nothing_is_touched():
    compiled = compiled_with(ppo(), APART)
    stages = dict(compiled.stages)
    assert stages["stream"] is stages["bind"]
    assert all(action.chunk is None for action in compiled.plan.actions)


@pytest.mark.parametrize("count", [4, "auto"])
def test_one_place_gains_nothing(count):
    plan = cut(grpo(every=0), ONE_PLACE, count)
    assert set() == chunked(plan)
    assert "one piece" in notes(plan)


@pytest.mark.parametrize("count", [2, "auto"])
def test_a_pipeline_without_a_rollout_is_left_alone(count):
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        written = ops.tokenize(actor, ops.prompts(rf.data.arithmetic(digits=2), batch=8))
        ops.update(actor, written, loss=rf.SFTLoss())

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    plan = cut(graph_of(declare), placement, count)
    assert set() == chunked(plan)
    assert "one piece" in notes(plan)


@pytest.mark.parametrize(
    ("count", "fix"),
    [(3, "stream=2 or stream=4"), (5, "stream=4 or stream=8"), (16, "stream=8")],
)
def test_chunks_are_whole_prompts_where_all_end_together(count, fix):
    with pytest.raises(PlanError) as caught:
        cut(grpo(ignore_eos=True), SPLIT, count)
    (finding,) = caught.value.findings
    assert ("E224", fix) == (finding.code, finding.fix)
    assert f"stream={count} does not divide the 8 prompts of an iteration" in finding.what


@pytest.mark.parametrize("count", [3, 5, 16])
def test_chunks_of_rows_that_end_need_not_divide(count):
    plan = cut(grpo(), SPLIT, count)
    assert count == len(runs(plan, "actor.rollout")) == len(runs(plan, "reward"))


def test_a_chunk_has_a_row():
    with pytest.raises(PlanError) as caught:
        cut(grpo(), SPLIT, 17)
    (finding,) = caught.value.findings
    assert ("E224", "stream=16") == (finding.code, finding.fix)
    assert "stream=17 is more chunks than there are rows in an iteration, 16" in finding.what


def judging(per: str, dispatch: str, uneven: str, *, ignore_eos: bool) -> Graph:
    """GRPO whose reward goes through an op of its own."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, ignore_eos=ignore_eos)
        reward = ops.reward(exact, samples)
        given = (reward, samples) if per == "group" else (reward,)
        made = judged("judge", per, dispatch, uneven)(*given)
        advantage = ops.advantage("grpo", samples, made.rename(reward="judge"))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    return graph_of(declare)


JUDGED = rf.Placement(
    pools={"train": 1, "many": 4}, assign={"*": rf.on("train"), "judge": rf.on("many")}
)


@pytest.mark.parametrize(
    ("per", "uneven", "follows"),
    [("row", "pad", True), ("row", "refuse", False), ("group", "pad", False)],
)
def test_rows_that_end_first_are_of_no_even_number(per, uneven, follows):
    plan = cut(judging(per, "split", uneven, ignore_eos=False), JUDGED, 4)
    assert follows is ("judge" in chunked(plan))
    assert {"actor.rollout", "reward"} <= chunked(plan)


def test_a_rollout_of_what_another_one_made_waits_for_all_of_it():
    def declare(ignore_eos: bool) -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8, ignore_eos=ignore_eos)
        again = ops.rollout(ref, samples, n=2, max_new_tokens=4, name="again")
        ops.metrics(ops.reward(exact, again, name="again.reward"), name="again.metrics")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    by_finish, by_prompts = (
        cut(graph_of(lambda eos=eos: declare(eos)), THREE, 2) for eos in (False, True)
    )
    assert {"actor.rollout", "reward"} == chunked(by_finish)
    assert {"again", "again.reward"} <= chunked(by_prompts)
    assert ["actor.rollout"] == sorted({str(a.node) for a in by_prompts.actions if a.begins})


def test_an_op_that_refuses_uneven_parts_refuses_small_chunks():
    placement, graph = JUDGED, judging("group", "split", "refuse", ignore_eos=True)
    assert {2} == {a.chunk.count for a in cut(graph, placement, 2).actions if a.chunk}
    with pytest.raises(PlanError) as caught:
        cut(graph, placement, 4)
    assert ["E225"] == [finding.code for finding in caught.value.findings]
    assert "the 2 prompts of a chunk do not split over 4 ranks" in caught.value.findings[0].what
    assert all(a.chunk is None or a.chunk.count == 2 for a in cut(graph, placement, "auto").actions)


def test_fewer_prompts_than_ranks_leave_some_without_rows():
    plan = cut(grpo(), MESH, 8)
    assert 8 == len(runs(plan, "ref.log_probs"))


def bound(graph: Graph, placement: rf.Placement) -> Plan:
    return dict(compiled_with(graph, placement).stages)["bind"]


def timed(plan: Plan, period: float | None) -> Plan:
    if period is None:
        return replace(plan, timing=None)
    found = Timing(
        resource_bound=0.0,
        recurrence_bound=0.0,
        period=period,
        busiest="gen[0]",
        binding="order",
    )
    return replace(plan, timing=found)


@pytest.mark.parametrize(
    ("periods", "chosen", "said"),
    [
        (
            {1: 2.6, 2: 2.4, 4: 2.1, 8: 2.05},
            4,
            "4 chunks, 2.10 s an iteration against 2.60 s in one",
        ),
        ({1: 1.0, 2: 0.96, 4: 0.94, 8: 0.93}, 4, "4 chunks, 940.0 ms an iteration"),
        (
            {1: 1.0, 2: 0.97, 4: 1.2, 8: 3.0},
            1,
            "one piece, 1.00 s an iteration; 2 chunks would take 970.0 ms",
        ),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}, 1, "one piece"),
        ({1: None, 2: None, 4: None, 8: None}, 1, "is not known"),
        (
            {2: 2.0, 4: 1.0, 8: 1.0},
            4,
            "4 chunks, 1.00 s an iteration: in one piece it does not fit",
        ),
        ({1: 2.0}, 1, "no plan with chunks fits"),
    ],
)
def test_more_chunks_are_taken_where_they_save_enough(periods, chosen, said):
    plan = bound(grpo(), SPLIT)

    def planned(count: int) -> Plan:
        if count not in periods:
            raise PlanError()
        return timed(plan, periods[count])

    count, why = choose_chunks(plan, planned)
    assert chosen == count
    assert said in why


def test_if_nothing_fits_the_first_refusal_is_raised():
    def planned(count: int) -> Plan:
        raise PlanError(summary=f"{count} pieces")

    with pytest.raises(PlanError, match="1 pieces"):
        choose_chunks(bound(grpo(), SPLIT), planned)


def test_the_choice_is_noted_and_is_no_slower():
    whole, best = cut(ppo(), APART, 1), cut(ppo(), APART, "auto")
    assert best.timing.period <= whole.timing.period
    assert "an iteration" in notes(best)


def test_steps_in_the_order_of_the_rows_follow_the_rollout():
    plan = cut(grpo(steps=4), SPLIT, 2)
    first, second = runs(plan, "actor.update")
    assert "prompts" == first.chunk.by
    assert {"advantage[1/2]", "actor.rollout[1/2]", "ref.log_probs[1/2]"} == read(first)
    assert first.id in order_before(second)
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    assert [second.id] == [dep.action for dep in reshard.after if dep.kind == "weights"]
    assert (("actor@train", 0),) == first.reads == second.reads
    assert "cut into 2 steps a chunk, of the rows that actor.rollout has made by then" in (
        first.reason.text
    )
    whole = cut(grpo(steps=4), SPLIT, 1)
    assert first.cost.seconds == pytest.approx(runs(whole, "actor.update")[0].cost.seconds / 2)
    assert plan.timing.period < whole.timing.period


@pytest.mark.parametrize(
    ("epochs", "steps", "count", "pieces"),
    [(1, 4, 2, 2), (1, 4, 4, 4), (1, 2, 4, 1), (2, 4, 2, 1)],
)
def test_an_update_is_cut_where_each_chunk_has_whole_steps(epochs, steps, count, pieces):
    plan = cut(grpo(epochs=epochs, steps=steps), SPLIT, count)
    assert pieces == len(runs(plan, "actor.update"))


def test_one_step_adds_up_gradients_of_groups_as_they_are_complete():
    graph = grpo(prompts=64, n=8)
    plan, whole = cut(graph, SPLIT, 4), cut(graph, SPLIT, 1)
    runs_of = {name: runs(plan, name) for name in ("actor.rollout", "advantage", "actor.update")}
    assert {"groups"} == {a.chunk.by for found in runs_of.values() for a in found}
    assert [4] * 3 == [len(found) for found in runs_of.values()]
    *adding, last = runs_of["actor.update"]
    assert [((), (("actor@train", 0),))] * 3 == [(a.writes, a.reads) for a in adding]
    assert (("actor@train", -1),) == last.writes
    for number, a in enumerate(adding, 1):
        assert {f"advantage[{number}/4]", f"actor.rollout[{number}/4]"} <= read(a)
        assert a.id in order_before(runs_of["actor.update"][number])
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    assert [last.id] == [dep.action for dep in reshard.after if dep.kind == "weights"]
    gradients = plan.part("actor@train/gradients")
    assert 0 < gradients.residual == gradients.size
    assert "proven on-policy" in plan_text(plan)
    parts = sum(a.cost.seconds for a in runs_of["actor.update"])
    assert parts >= whole.action("actor.update").cost.seconds
    assert plan.timing.period < whole.timing.period


def rows_first(loss: rf.PolicyLoss, **options: object) -> tuple[set[str], str]:
    """By what a plan's rollout is cut whose update has such a loss, or options; and why."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=64)
        samples = ops.rollout(actor, prompts, n=8, max_new_tokens=200)
        reward = ops.reward(exact, samples)
        adv = ops.advantage("grpo", samples, reward)
        ops.update(actor, samples, adv, loss=loss, **options)

    plan = cut(graph_of(declare), SPLIT_ACTOR, 4)
    by = {a.chunk.by for a in runs(plan, "actor.rollout") if a.chunk is not None}
    return by, notes(plan)


SPLIT_ACTOR = rf.Placement(
    pools={"train": 1, "gen": 1}, assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")}
)


@pytest.mark.parametrize(
    ("loss", "options", "why"),
    [
        (rf.PolicyLoss(top_entropy=0.2), {}, "chooses or averages over all rows before its step"),
        (rf.PolicyLoss(), {"mini_batches": 2}, "makes 2 steps, each of rows drawn from all"),
        (rf.PolicyLoss(), {"epochs": 2}, "goes over its rows in 2 epochs"),
    ],
)
def test_what_needs_all_rows_waits_for_them(loss, options, why):
    by, said = rows_first(loss, **options)
    assert {"finish"} == by
    assert said.endswith(f"instead of complete groups: actor.update {why}")


def test_nothing_is_to_be_told_where_groups_go_on():
    by, said = rows_first(rf.PolicyLoss())
    assert {"groups"} == by
    assert "instead of complete groups" not in said


def test_an_update_on_the_rollouts_own_devices_waits():
    together = rf.Placement(
        pools={"all": 1, "look": 1},
        assign={"*": rf.on("all"), "ref": rf.on("look")},
    )
    plan = cut(grpo(), together, 2)
    assert {"finish"} == {a.chunk.by for a in runs(plan, "actor.rollout")}
    assert 1 == len(runs(plan, "actor.update"))


def test_rows_go_on_one_by_one_where_forwards_that_follow_make_it_shorter():
    """The last groups would be long in coming, and few rows cost an update as much as more do."""
    plan = cut(grpo(), SPLIT, 4)
    assert {"finish"} == {a.chunk.by for a in runs(plan, "actor.rollout")}


@pytest.mark.parametrize(("groups", "by"), [(True, "groups"), (False, "finish")])
def test_what_a_run_began_with_is_kept_whatever_is_shorter(groups, by):
    plan = compile_plan(grpo(), streamed(SPLIT, 4), cluster("cpu", 2, PLENTY), groups=groups).plan
    assert {by} == {a.chunk.by for a in runs(plan, "actor.rollout")}


def test_rows_go_on_one_by_one_where_there_are_fewer_groups_than_chunks():
    plan = cut(grpo(), SPLIT, 9)
    assert {"finish"} == {a.chunk.by for a in runs(plan, "actor.rollout")}


def test_shuffled_steps_wait_for_the_batch():
    plan = cut(grpo(steps=4, shuffle=True), SPLIT, 2)
    assert 1 == len(runs(plan, "actor.update"))
    assert 2 == len(runs(plan, "actor.rollout"))


def test_the_old_policy_is_read_whole_before_the_first_step():
    """Log-probs of the trained weights are of the version that the first step begins with."""
    plan = cut(grpo(steps=4, old=True), SPLIT, 4)
    first = runs(plan, "actor.update")[0]
    assert {f"actor.log_probs[{n}/4]" for n in (1, 2, 3, 4)} <= {d.action for d in first.after}


def test_no_order_of_one_mini_batch():
    with pytest.raises(AssertionError, match="there is nothing to shuffle"):
        graph_of(unordered)


def test_chains_that_cross_are_found():
    for ignore_eos, by in ((False, "finish"), (True, "prompts")):
        (chain,) = crossing_chains(bound(ppo(ignore_eos=ignore_eos), APART), 2)
        assert ("actor.rollout", 8, 8) == (chain.root.name, chain.prompts, chain.rows)
        assert by == chain.by


def batch_scored() -> Graph:
    """GRPO whose update reads what an op of the whole batch makes."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        adv = ops.advantage(
            "grpo", samples, judged("whole", "batch", "", "pad")(reward).rename(reward="whole")
        )
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))

    return graph_of(declare)


COLOCATED = rf.Placement(
    pools={"all": 1, "look": 1}, assign={"*": rf.on("all"), "ref": rf.on("look")}
)
BY_ROWS = "actor.rollout hands on rows in order of their end instead of complete groups: "


@pytest.mark.parametrize(
    ("graph", "placement", "count", "why"),
    [
        (
            grpo(steps=2),
            SPLIT,
            4,
            BY_ROWS + "actor.update makes 2 steps, which 4 chunks do not share out evenly",
        ),
        (
            grpo(),
            COLOCATED,
            2,
            BY_ROWS + "actor.update has 1 device of the rollout, and could not run beside it",
        ),
        (grpo(), SPLIT, 9, BY_ROWS + "there are fewer groups than 9 chunks"),
        (
            grpo(ignore_eos=True),
            SPLIT,
            2,
            "actor.rollout hands on prompts, decoded chunk by chunk, instead of complete groups: "
            "all responses end together (ignore_eos=True)",
        ),
    ],
)
def test_a_plan_says_why_no_groups_are_handed_on(graph, placement, count, why):
    plan = cut(graph, placement, count)
    assert why == notes(plan)
    assert f"  stream: {why}\n" in plan_text(plan)


def test_a_plan_says_what_between_rollout_and_update_takes_all_rows():
    plan = cut(batch_scored(), SPLIT_ACTOR, 2)
    assert BY_ROWS + "actor.update reads whole of all rows" in notes(plan)


def test_a_plan_says_the_seconds_of_rows_and_of_groups():
    told = compile_plan(grpo(), streamed(SPLIT, 4), cluster("cpu", 2, PLENTY)).plan
    rows, groups = (
        compile_plan(grpo(), streamed(SPLIT, 4), cluster("cpu", 2, PLENTY), groups=by).plan
        for by in (False, True)
    )
    assert rows.timing.period < groups.timing.period
    both = f"{duration(rows.timing.period)} an iteration by estimate, "
    assert both + duration(groups.timing.period) in notes(told)
