"""Pass `pause`: a rollout in two, the order and versions that follow, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.cli.config import load_pipeline
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.passes.bind.bind import assignment
from rlflow.scheduler.passes.staleness import stale_rollouts
from rlflow.scheduler.plan.lags import largest_lag
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.conftest import PIPELINES
from tests.scheduler.examples import COLOCATE, OWN, SPLIT, compiled_with, grpo, ppo
from tests.scheduler.mutants import with_action
from tests.scheduler.player import play
from tests.scheduler.strategies import exact, graph_of

BEGUN, RESUMED = "actor.rollout", "actor.rollout.resumed"
MADE_ANEW = ("response_tokens", "response_mask", "rollout_log_probs", "response", "version")
THREE = rf.Placement(
    pools={"train": 1, "gen": 1, "look": 1},
    assign={"actor": rf.on("train"), "actor.rollout": rf.on("gen"), "ref": rf.on("look")},
)


def paused(placement: rf.Placement, *, at: int = 4, staleness: int = 1, stream: int = 1):
    update = {"pause_at": at, "staleness": staleness, "stream": stream}
    return placement.model_copy(update=update)


def cut(graph: Graph, placement: rf.Placement = SPLIT, **options: int) -> Plan:
    return compiled_with(graph, paused(placement, **options)).plan


def notes(plan: Plan) -> list[str]:
    return [note.text for note in plan.notes if note.rule == "pause"]


def sources(node: Node) -> dict[str, str]:
    return {bound.name: bound.source for bound in node.inputs}


def test_what_a_rollout_makes_anew_is_read_of_the_one_that_goes_on() -> None:
    graph = cut(grpo(epochs=2), SPLIT).graph

    assert {"prompts"} == set(sources(graph.node(BEGUN)).values())
    assert {BEGUN} == set(sources(graph.node(RESUMED)).values())
    for node in graph.nodes:
        for bound in node.inputs:
            if node.name != RESUMED and bound.field.name in MADE_ANEW:
                assert bound.source != BEGUN
            if bound.field.name in ("prompt_tokens", "group", "answer"):
                assert bound.source != RESUMED
    update = sources(graph.node("actor.update"))
    assert (BEGUN, RESUMED) == (update["prompt_tokens"], update["response_tokens"])
    assert RESUMED == update["version"] == update["rollout_log_probs"]


def test_it_stands_behind_the_rollout_with_its_options_and_model() -> None:
    graph = cut(grpo()).graph
    begun, resumed = graph.node(BEGUN), graph.node(RESUMED)
    names = [node.name for node in graph.nodes]

    assert names.index(RESUMED) == names.index(BEGUN) + 1
    assert begun.op.resumed == resumed.op
    assert BEGUN == resumed.resumes == resumed.rows_of
    assert 4 == begun.param("until") == resumed.param("first")
    shared = {"n", "max_new_tokens", "temperature"}
    assert all(begun.param(name) == resumed.param(name) for name in shared)
    assert (begun.model, begun.where, begun.every) == (resumed.model, resumed.where, resumed.every)
    assert begun.resumes is None


def test_it_runs_where_the_rollout_does() -> None:
    graph = cut(grpo()).graph
    for name in ("actor.rollout", "actor", "*"):
        placement = rf.Placement(
            pools={"here": 1, "there": 1}, assign={"*": rf.on("here"), name: rf.on("there")}
        )
        on = [assignment(graph.node(node), placement) for node in (BEGUN, RESUMED)]
        assert [rf.on("there"), rf.on("there")] == on

    named = rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={"*": rf.on("train"), BEGUN: rf.on("gen")},
    )
    plan = cut(grpo(), named)
    assert plan.action(BEGUN).instance == plan.action(RESUMED).instance == "actor@gen"


@pytest.mark.parametrize(
    ("staleness", "said"),
    [
        (1, "1 update behind, then 0 updates behind"),
        (2, "2 updates behind, then 1 update behind"),
        (3, "3 updates behind, then 2 updates behind"),
    ],
)
@pytest.mark.parametrize("placement", [SPLIT, COLOCATE, OWN], ids=["split", "shared", "own"])
def test_it_reads_weights_of_one_update_more(
    placement: rf.Placement, staleness: int, said: str
) -> None:
    plan = cut(grpo(), placement, staleness=staleness)
    begun, resumed = plan.action(BEGUN), plan.action(RESUMED)

    assert ((str(begun.instance), staleness),) == begun.reads
    assert ((str(begun.instance), staleness - 1),) == resumed.reads
    wanted = {BEGUN: staleness, RESUMED: staleness - 1, "eval": 0}
    assert wanted == {name: lag for name, lag in largest_lag(plan).items() if name in wanted}
    assert {BEGUN: staleness, RESUMED: staleness} == stale_rollouts(plan.graph)
    assert [f"{BEGUN} pauses after 4 tokens, takes weights that are one update newer and goes on "
            f"as {RESUMED}: {said}"] == notes(plan)  # fmt: skip
    for seed in range(4):
        assert [] == play(plan, seed)


@pytest.mark.parametrize(("staleness", "ahead"), [(1, (1, 0)), (2, (2, 1))])
def test_both_halves_run_ahead_of_the_update_that_learns(
    staleness: int, ahead: tuple[int, int]
) -> None:
    """By as many iterations as they are behind; new weights come between the two."""
    plan = cut(grpo(every=0), staleness=staleness)
    turn = plan.action("actor.update").ahead

    assert ahead == tuple(plan.action(name).ahead - turn for name in (BEGUN, RESUMED))
    (reshard,) = (a for a in plan.actions if a.kind == "reshard")
    assert {(reshard.id, "weights")} <= {(d.action, d.kind) for d in plan.action(RESUMED).after}


def test_an_engine_of_its_own_samples_while_the_model_learns() -> None:
    plan = cut(grpo(every=0))
    first, last = plan.action(BEGUN), plan.action("actor.update")

    assert set(first.devices).isdisjoint(last.devices)
    assert first.ahead == last.ahead + 1
    assert plan.timing is not None
    synchronous = compiled_with(grpo(every=0), SPLIT).plan
    assert synchronous.timing is not None
    assert plan.timing.period < synchronous.timing.period


def test_nothing_overlaps_where_the_weights_are_shared_and_that_is_noted() -> None:
    plan = cut(grpo(every=0), COLOCATE)
    found = [note.text for note in plan.notes if "nothing overlaps" in note.text]

    assert ["shares actor@all" in text for text in found] == [True, True]
    assert all(not a.targets for a in plan.actions)


def test_an_evaluation_reads_the_newest_in_one_piece() -> None:
    plan = cut(grpo(every=1), staleness=2)

    assert (("actor@gen", 0),) == plan.action("eval").reads
    assert 0 == largest_lag(plan)["eval"]
    assert [] == [n.name for n in plan.graph.nodes if n.resumes == "eval"]


def test_log_probs_are_recomputed_by_the_newest() -> None:
    plan = cut(grpo(epochs=2), staleness=2)
    found = largest_lag(plan)

    assert (2, 1) == (found[BEGUN], found[RESUMED])
    assert all(lag == 0 for name, lag in found.items() if name not in (BEGUN, RESUMED))


def test_a_critic_learns_from_what_was_paused() -> None:
    plan = cut(ppo(), staleness=2, placement=COLOCATE)
    rows = sources(plan.graph.node("critic.values"))

    assert (BEGUN, RESUMED) == (rows["prompt_tokens"], rows["response_tokens"])
    assert 2 == dict(plan.graph.node("critic.update").params)["staleness"]


def two_rollouts(*, long: int, short: int) -> Graph:
    """A model that learns, sampled twice, and a frozen one."""

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/mid")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=long)
        probe = ops.rollout(actor, prompts, n=2, max_new_tokens=short, name="probe")
        other = ops.rollout(ref, prompts, n=2, max_new_tokens=long, name="other")
        for rows, name in ((probe, "probe"), (other, "other")):
            ops.metrics(ops.reward(exact, rows, name=f"{name}.reward"), name=f"{name}.metrics")
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    return graph_of(declare, "two")


@pytest.mark.parametrize(
    ("at", "wanted"), [(1, {BEGUN, "probe"}), (3, {BEGUN, "probe"}), (4, {BEGUN}), (7, {BEGUN})]
)
def test_rollouts_that_are_longer_and_run_ahead_are_paused(at: int, wanted: set[str]) -> None:
    plan = cut(two_rollouts(long=8, short=4), at=at)

    assert wanted == {node.resumes for node in plan.graph.nodes if node.resumes}
    assert wanted == {n.name for n in plan.graph.nodes if "until" in dict(n.params)}
    assert len(wanted) == len(notes(plan))


def refused(placement: rf.Placement, graph: Graph | None = None) -> tuple[str, str, str, str]:
    with pytest.raises(PlanError) as caught:
        compiled_with(graph or grpo(), placement)
    (finding,) = caught.value.findings
    return finding.code, finding.what, finding.got, finding.fix


def test_a_pause_of_what_never_runs_ahead_is_refused() -> None:
    assert (
        "E229",
        "pause_at=4 would do nothing",
        "staleness=0: no newer weights come while a rollout runs",
        "staleness=1, pause_at=4; or no pause_at",
    ) == refused(paused(SPLIT, staleness=0))


@pytest.mark.parametrize("at", [8, 9, 1000])
def test_a_pause_after_the_last_token_is_refused(at: int) -> None:
    assert (
        "E229",
        f"pause_at={at} would do nothing",
        "actor.rollout makes at most 8 tokens",
        "pause_at=4",
    ) == refused(paused(SPLIT, at=at))


def test_a_pause_of_one_token_is_refused_without_a_better_one() -> None:
    code, _, got, fix = refused(paused(SPLIT, at=1), two_rollouts(long=1, short=1))

    assert ("E229", "no pause_at") == (code, fix)
    assert "actor.rollout makes at most 1 tokens; probe makes at most 1 tokens" == got


def test_a_pause_without_a_rollout_that_learns_is_refused() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        written = ops.tokenize(actor, prompts)
        ops.update(actor, written, loss=rf.SFTLoss())

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    code, _, got, fix = refused(paused(placement), graph_of(declare))
    assert ("E229", "no rollout of a model that learns", "no pause_at") == (code, got, fix)


def test_a_placement_refuses_a_pause_before_the_first_token() -> None:
    with pytest.raises(ValueError, match="pause_at"):
        rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}, staleness=1, pause_at=0)


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_rollout_that_another_goes_on_from_does_not_pause(staleness: int) -> None:
    """The other starts before the update that the resumed half would wait for: a circle."""
    graph = load_pipeline(str(PIPELINES / "self_play.py")).trace()
    where = paused(rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")}), staleness=staleness)
    plan = compile_plan(graph, where, parse_cluster("cpu:1", 1), near=PIPELINES).plan

    resumed = {node.name for node in plan.graph.nodes if node.resumes}
    assert {"alice.rollout.resumed", "bob.rollout.resumed"} == resumed
    assert any(text.startswith("alice.rival does not pause: alice.rollout") for text in notes(plan))


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_without_a_pause_nothing_changes(staleness: int) -> None:
    changed = {"staleness": staleness}
    compiled = compiled_with(grpo(), SPLIT.model_copy(update=changed))
    explicit = compiled_with(grpo(), SPLIT.model_copy(update={**changed, "pause_at": None}))

    assert dict(compiled.stages)["pause"].graph.nodes == grpo().nodes
    assert compiled.plan.hash == explicit.plan.hash
    assert "pause" not in plan_text(compiled.plan)
    assert "resumed" not in plan_text(compiled.plan)


def test_where_it_pauses_is_part_of_what_a_run_is() -> None:
    graphs = {cut(grpo(), at=at).graph.hash for at in (1, 4, 7)}
    plain = compiled_with(grpo(), SPLIT.model_copy(update={"staleness": 1})).plan

    assert 4 == len(graphs | {plain.graph.hash})
    assert cut(grpo(), at=4).hash == cut(grpo(), at=4).hash


def test_lines_say_which_tokens_are_of_which_half() -> None:
    text = plan_text(cut(grpo()))

    assert "ops.rollout(actor), to token 4" in text
    assert "ops.rollout(actor), token 5 to the end" in text
    assert "samples: rollout weights at most 1 update old" in text


@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_both_halves_are_cut_where_rows_stream(ignore_eos: bool, backend: str) -> None:
    placement = paused(THREE, stream=2, staleness=2)
    plan = compiled_with(grpo(ignore_eos=ignore_eos), placement, backend=backend).plan
    pieces = {name: [a for a in plan.actions if a.node == name and a.kind == "run"]
              for name in (BEGUN, RESUMED, "reward", "ref.log_probs")}  # fmt: skip

    assert {2} == {len(found) for found in pieces.values()}
    assert all(a.begins for a in pieces[BEGUN])
    assert not any(a.begins for a in pieces[RESUMED])
    (by,) = {a.chunk.by for found in pieces.values() for a in found if a.chunk}
    assert ignore_eos is (by == "prompts")
    caches = [part.name for part in plan.parts if part.kind == "cache"]
    assert ([] if ignore_eos else [f"{BEGUN}/cache"]) == caches
    for name, lag in ((BEGUN, 2), (RESUMED, 1)):
        assert {((("actor@gen"), lag),)} == {a.reads for a in pieces[name]}
        assert lag == largest_lag(plan)[name]
    for index in (1, 2):
        after = {d.action for d in plan.action(f"{RESUMED}[{index}/2]").after if d.kind == "data"}
        assert f"{BEGUN}[{index}/2]" in after
    for seed in range(6):
        assert [] == play(plan, seed)


def before_order(**options: int) -> Plan:
    """After `transfer`, so that no device's order stands in for a dependency."""
    compiled = compiled_with(grpo(), paused(THREE, **options))
    plan = dict(compiled.stages)["transfer"]
    assert [] == verify(plan, "transfer")
    return plan


@pytest.mark.parametrize("stream", [1, 2])
def test_who_goes_on_before_its_rollout_is_over_is_rejected(stream: int) -> None:
    """The weights wait for the rollout too, and it for them: so both edges have to go."""
    plan = before_order(stream=stream)
    for piece in [""] if stream == 1 else ["[1/2]", "[2/2]"]:
        begun = f"{BEGUN}{piece}"
        waiting = [a for a in plan.actions if begun in {dep.action for dep in a.after}]
        assert {f"{RESUMED}{piece}", "reshard"} <= {a.id.partition(":")[0] for a in waiting}
        early = plan
        for action in waiting:
            after = tuple(dep for dep in action.after if dep.action != begun)
            early = with_action(early, action.id, after=after)
        broken = verify(early, "transfer")
        assert any(f"{RESUMED}{piece} may start before {begun} has made" in t for t in broken)
        assert any(f"may overwrite version i-1 of actor@gen before {begun}" in t for t in broken)


def test_a_leg_without_the_edge_to_the_one_before_is_rejected() -> None:
    plan = before_order(stream=2)
    leg = plan.action(f"{BEGUN}[2/2]")
    after = tuple(dep for dep in leg.after if dep.action != f"{BEGUN}[1/2]")
    broken = verify(with_action(plan, leg.id, after=after), "transfer")

    assert f"{BEGUN}[2/2] goes on before {BEGUN}[1/2] is over" in broken


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("off", [-1, 1])
def test_another_lag_than_declared_is_rejected(stream: int, off: int) -> None:
    plan = before_order(stream=stream, staleness=2)
    for action in plan.actions:
        if action.node in (BEGUN, RESUMED) and action.kind == "run":
            ((name, lag),) = action.reads
            mutant = with_action(plan, action.id, reads=((name, lag + off),))
            assert verify(mutant, "transfer")


@pytest.mark.parametrize("option", ["first", "temperature", "resumes"])
def test_two_halves_that_do_not_meet_are_rejected(option: str) -> None:
    plan = before_order()
    value = {"first": 5, "temperature": 0.5, "resumes": "nobody"}[option]
    nodes = tuple(
        replace(n, params=tuple({**dict(n.params), option: value}.items()))
        if n.name == RESUMED
        else n
        for n in plan.graph.nodes
    )
    broken = verify(replace(plan, graph=replace(plan.graph, nodes=nodes)), "pause")
    assert any(RESUMED in text for text in broken)


def test_rows_of_the_first_half_alone_are_no_rows_to_learn_from() -> None:
    plan = before_order()
    reward = plan.graph.node("reward")
    inputs = tuple(replace(bound, source=BEGUN) for bound in reward.inputs)
    nodes = tuple(
        replace(reward, inputs=inputs) if n.name == "reward" else n for n in plan.graph.nodes
    )
    broken = verify(replace(plan, graph=replace(plan.graph, nodes=nodes)), "pause")
    assert ["reward reads response of actor.rollout, which is paused"] == broken
