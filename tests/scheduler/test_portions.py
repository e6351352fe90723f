"""Pass `portions`: a rollout that two pools share out, its versions, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError, PlanError
from rlflow.graph.cut.whole import whole_rollouts
from rlflow.graph.graph import Graph, Node
from rlflow.graph.placement import On
from rlflow.scheduler.passes.portions import with_shares_found
from rlflow.scheduler.passes.staleness import stale_rollouts
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.examples import SPLIT, compiled_with, grpo, ppo
from tests.scheduler.player import play
from tests.scheduler.strategies import PLENTY, exact, graph_of

GEN, TRAIN = "actor.rollout@gen", "actor.rollout@train"


def helped(
    *, share: int | str | None = 2, train: int = 1, gen: int = 1, staleness: int = 0, **also: object
) -> rf.Placement:
    where = rf.on("gen", also=rf.on("train", **also), share=share)
    return rf.Placement(
        pools={"train": train, "gen": gen},
        assign={"*": rf.on("train"), "actor.rollout": where, "ref": rf.on("gen")},
        staleness=staleness,
    )


def parts(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if "portion_of" in dict(node.params)]


def test_both_parts_have_their_prompts_and_the_rollout_its_rows() -> None:
    graph = compiled_with(grpo(), helped()).plan.graph
    gen, train = parts(graph)
    whole = graph.node("actor.rollout")

    assert (GEN, TRAIN) == (gen.name, train.name) == whole.sources
    assert [(0, 6), (6, 8)] == [
        graph.node(part.sources[0]).param("groups") for part in (gen, train)
    ]
    assert "8 groups, 16 rows" == (whole.counts and whole.counts.describe())
    assert {"actor.rollout"} == {
        b.source
        for node in graph.nodes
        for b in node.inputs
        if b.field.name == "response_tokens" and node is not whole
    }


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
@pytest.mark.parametrize("weights", [None, "own"])
def test_who_helps_reads_weights_of_one_update_more(staleness: int, weights: str | None) -> None:
    plan = compiled_with(grpo(), helped(staleness=staleness, weights=weights)).plan
    newer = max(staleness - 1, 0)
    home = "actor@train" if weights is None else "actor@train/rollout"

    assert (("actor@gen", staleness),) == plan.action(GEN).reads
    assert ((home, newer),) == plan.action(TRAIN).reads
    found = largest_lag(plan)
    assert (staleness, newer, 0) == (found[GEN], found[TRAIN], found["eval"])
    stale = {GEN: staleness, TRAIN: newer, "actor.rollout": staleness}
    assert {name: lag for name, lag in stale.items() if lag} == stale_rollouts(plan.graph)
    assert play(plan, staleness) == []


def test_of_the_newest_weights_the_graph_is_the_declared_one() -> None:
    plain = compiled_with(grpo(), SPLIT).plan.graph

    assert plain.hash == whole_rollouts(compiled_with(grpo(), helped()).plan.graph).hash
    stale = compiled_with(grpo(), helped(staleness=1)).plan.graph
    assert stale is whole_rollouts(stale)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Graph, rf.Placement, float]:
    prompts = draw(st.integers(2, 9))
    make = {"prompts": prompts, "path": draw(st.sampled_from(["models/mid", "models/wide"]))}
    where = helped(
        share=draw(st.integers(1, prompts - 1)),
        train=draw(st.sampled_from([1, 1, 2])),
        gen=draw(st.sampled_from([1, 1, 2])),
        staleness=draw(st.integers(0, 3)),
        weights=draw(st.sampled_from([None, "own"])),
    )
    where = where.model_copy(update={"stream": draw(st.sampled_from([1, 1, 2]))})
    return grpo(**make), where, draw(st.sampled_from([1.0, 0.8, 0.6]))


@settings(max_examples=examples(12))
@given(case=cases(), seed=st.integers(0, 999))
def test_any_share_keeps_what_is_proven_in_every_interleaving(
    case: tuple[Graph, rf.Placement, float], seed: int
) -> None:
    """The verifier looks after each pass; the monitor at one interleaving, memory included."""
    graph, placement, room = case
    try:
        plan = compiled_with(graph, placement, share=None if room == 1.0 else room).plan
    except PlanError as error:
        if {"E401"} != {finding.code for finding in error.findings}:
            raise
        return
    drawn = [range(*plan.graph.node(part.sources[0]).param("groups")) for part in parts(plan.graph)]
    total = graph.node("prompts").param("batch")
    assert list(range(total)) == [number for part in drawn for number in part]
    assert play(plan, seed) == []


def test_replicas_of_the_trainer_sleep_while_it_trains() -> None:
    where = helped(weights="own", staleness=1)
    plan = compiled_with(grpo(path="models/wide", every=0), where, share=0.8).plan
    moved = {a.part for a in plan.actions if a.kind in ("sleep", "wake")}

    assert "actor@train/rollout/weights" in moved
    assert all(set(a.devices) == {0} for a in plan.actions if a.kind in ("sleep", "wake"))


def changed(plan: Plan, name: str, **said: object) -> Plan:
    """The plan whose graph has other options of a node."""
    nodes = tuple(
        replace(n, params=tuple({**dict(n.params), **said}.items())) if n.name == name else n
        for n in plan.graph.nodes
    )
    return replace(plan, graph=replace(plan.graph, nodes=nodes))


@pytest.mark.parametrize(
    ("name", "said", "found"),
    [
        (f"{TRAIN}.prompts", {"groups": (5, 8)}, "prompt 6 is due"),
        (f"{TRAIN}.prompts", {"groups": (6, 7)}, "numbers its prompts"),
        (TRAIN, {"from_prompt": 5}, "numbers its prompts from 5, not 6"),
        (TRAIN, {"to_prompt": 7}, "draws prompts to 7, it has those to 8"),
        (TRAIN, {"of_prompts": 9}, "differ, or draw 8"),
        (TRAIN, {"temperature": 0.5}, "differ, or draw 8"),
        (GEN, {"portion_of": "nobody"}, "nobody puts the parts of nobody together"),
    ],
)
def test_the_verifier_sees_prompts_that_are_drawn_twice_or_never(
    name: str, said: dict[str, object], found: str
) -> None:
    compiled = compiled_with(grpo(), helped(staleness=1))
    plan = dict(compiled.stages)["portions"]

    assert [] == verify(plan, "portions")
    assert any(found in text for text in verify(changed(plan, name, **said), "portions"))


def test_the_verifier_sees_a_reader_of_a_part_and_a_part_that_is_missing() -> None:
    plan = dict(compiled_with(grpo(), helped()).stages)["portions"]
    (whole,) = (node for node in plan.graph.nodes if node.name == "actor.rollout")
    some = replace(whole, inputs=tuple(b for b in whole.inputs if b.part == 0))
    (reward,) = (node for node in plan.graph.nodes if node.name == "reward")
    early = replace(reward, inputs=tuple(replace(b, source=GEN) for b in reward.inputs))
    for node, found in ((some, f"{TRAIN} draws"), (early, f"{GEN} draws a part")):
        nodes = tuple(node if node.name == n.name else n for n in plan.graph.nodes)
        broken = replace(plan, graph=replace(plan.graph, nodes=nodes))
        assert any(text.startswith(found) for text in verify(broken, "portions"))


def test_a_share_that_is_left_out_is_that_of_the_shortest_plan() -> None:
    graph = grpo(prompts=8, n=64)
    plan = compiled_with(graph, helped(share=None)).plan
    periods = {
        share: compiled_with(graph, helped(share=share)).plan.timing.seconds  # type: ignore[union-attr]
        for share in range(1, 8)
    }
    taken = 8 - int(parts(plan.graph)[1].param("from_prompt"))

    assert periods[taken] == min(periods.values())
    told = [note.text for note in plan.notes if note.rule == "portions"]
    assert f"actor.rollout: {taken} of 8 prompts on train make an iteration of" in told[1]
    assert "gen alone one of" in told[1]


def test_where_no_plan_is_accepted_the_share_is_an_eighth() -> None:
    placement, texts = with_shares_found(grpo(prompts=32), helped(share=None), lambda _: None)

    assert (4, []) == (placement.assign["actor.rollout"].share, texts)


@pytest.mark.parametrize("alone", [None, 5.0])
def test_help_without_room_is_not_looked_for_further_unless_it_alone_makes_room(
    alone: float | None,
) -> None:
    """Devices of the rollout that hold no more than 8 of 32 prompts need the others' help."""
    asked = []

    def period(placement: rf.Placement) -> float | None:
        shares = [on.share for on in placement.assign.values() if on.also is not None]
        asked.extend(shares)
        if not shares:
            return alone
        return 7.0 if alone is None and int(str(shares[0])) >= 24 else None

    placement, _ = with_shares_found(grpo(prompts=32), helped(share=None), period)
    found = [on.share for on in placement.assign.values() if on.also is not None]
    assert found == ([24] if alone is None else [4])
    assert (asked == [4, 8]) is (alone is not None)


def test_both_are_where_the_nodes_name_says() -> None:
    placement = rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={"*": rf.on("train"), "actor.rollout": rf.on("gen", also="train", share="1/4")},
    )
    plan = compiled_with(grpo(), placement).plan

    assert ["gen", "train", "host"] == [
        plan.action(name).pool for name in (GEN, TRAIN, "actor.rollout")
    ]
    assert "prompts 7 to 8 of 8" in plan_text(plan)
    assert ", prompt 8 of 8" in plan_text(compiled_with(grpo(), helped(share=1)).plan)


def test_the_engine_beside_is_that_of_the_rollout() -> None:
    engine = rf.SGLang(mem_fraction_static=0.5)
    assert engine == rf.on("gen", engine=engine, also="train").also.engine  # type: ignore[union-attr]
    assert rf.on("gen", engine=engine, also=rf.on("train")).also.engine is None  # type: ignore[union-attr]


@pytest.mark.parametrize("staleness", [0, 1])
def test_engines_of_both_pools_get_the_weights_of_their_part(staleness: int) -> None:
    engine = rf.SGLang(max_total_tokens=4096)
    where = helped(staleness=staleness, engine=engine)
    gen = rf.on("gen", engine=engine, also=rf.on("train", engine=engine), share=2)
    where = where.model_copy(update={"assign": {**where.assign, "actor.rollout": gen}})
    plan = compiled_with(grpo(every=0), where).plan
    reads = {name: plan.action(name).reads for name in (GEN, TRAIN)}

    assert {
        GEN: (("actor@gen/sglang", staleness),),
        TRAIN: (("actor@train/sglang", 0),),
    } == reads
    filled = {target for a in plan.actions if a.kind == "reshard" for target in a.targets}
    assert {"actor@gen/sglang", "actor@train/sglang"} == filled
    assert play(plan, staleness) == []


def refused(placement: rf.Placement, graph: Graph | None = None) -> tuple[str, str, str]:
    with pytest.raises(PlanError) as caught:
        compiled_with(graph or grpo(), placement)
    finding = caught.value.findings[0]
    return finding.code, finding.got, finding.fix


@pytest.mark.parametrize(
    ("share", "got", "fix"),
    [("1/3", "2.66667 of 8 on train", 3), (8, "8 of 8 on train", 7), (9, "9 of 8 on train", 7)],
)
def test_shares_are_whole_numbers_of_prompts(share: int | str, got: str, fix: int) -> None:
    line = f'rf.on("gen", also="train", share={fix})'
    assert ("E295", got, line) == refused(helped(share=share))


def test_a_pool_where_nothing_trains_does_not_help() -> None:
    where = helped().model_copy(
        update={
            "pools": {"train": 1, "gen": 1, "idle": 1},
            "assign": {**helped().assign, "actor.rollout": rf.on("gen", also="idle")},
        }
    )
    line = 'rf.on("gen", also="train")'
    assert ("E294", "nothing trains on pool idle", line) == refused(where)


def test_what_cannot_be_shared_out_is_refused() -> None:
    overlapping = helped().model_copy(update={"pools": {"train": [0, 1], "gen": [1, 2]}})
    assert "pools gen and train have devices in common" == refused(overlapping)[1]
    assert (
        "pause_at says where" in refused(helped(staleness=1).model_copy(update={"pause_at": 4}))[1]
    )
    assert "never drain" in refused(helped(staleness=2).model_copy(update={"continuous": True}))[1]
    one = grpo(prompts=1)
    assert "it draws of 1" == refused(helped(share=1), one)[1]


@pytest.mark.parametrize(
    ("key", "on"),
    [("ref", rf.on("gen", also="train")), ("actor.update", rf.on("train", also="gen"))],
)
def test_a_pool_that_helps_with_no_rollout_is_refused_with_a_line_of_one_there_is(
    key: str, on: On
) -> None:
    alone = {**helped().assign, "actor.rollout": rf.on("gen"), key: on}
    code, got, fix = refused(helped().model_copy(update={"assign": alone}))
    assert ("E294", f"no rollout is placed by '{key}'") == (code, got)
    assert '"actor.rollout": rf.on("gen", also="train")' == fix


def test_losses_have_to_correct_for_the_older_part() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("reinforce"))

    pools = {"actor": rf.on("train"), "actor.rollout": helped().assign["actor.rollout"]}
    where = helped(staleness=1).model_copy(update={"assign": pools})
    assert "E402" == refused(where, graph_of(declare))[0]


@pytest.mark.parametrize(
    "said",
    [
        {"share": "1/4"},
        {"also": "gen"},
        {"also": {"pool": "train", "also": "look"}},
        {"also": "train", "share": "half"},
        {"also": "train", "share": "1/1"},
        {"also": "train", "share": 0},
    ],
)
def test_a_placement_refuses_what_makes_no_sense(said: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"also|share"):
        rf.on("gen", **said)


def test_a_pool_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(GraphError) as caught:
        rf.Placement(pools={"train": 1, "gen": 1}, assign={"*": rf.on("gen", also="trian")})
    (finding,) = caught.value.findings
    assert ("E134", '"*": rf.on("gen", also="train")') == (finding.code, finding.fix)


def test_a_critics_devices_help_too() -> None:
    where = rf.Placement(
        pools={"train": 1, "gen": 1, "judge": 1},
        assign={
            "*": rf.on("train"),
            "critic": rf.on("judge"),
            "actor.rollout": rf.on("gen", also="judge", share=2),
        },
    )
    plan = compiled_with(ppo(), where, memory=PLENTY).plan
    assert "actor@judge" == plan.action("actor.rollout@judge").instance
