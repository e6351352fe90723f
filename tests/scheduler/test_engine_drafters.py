"""Plans in which a drafter lies in an engine: its instance, its reshard, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import Finding, PlanError
from rlflow.graph.graph import Graph
from rlflow.scheduler.compile import Compiled, dump_plan
from rlflow.scheduler.plan.plan import HOST
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.plan.text import plan_text
from tests.scheduler.examples import compiled_with
from tests.scheduler.proving import holds_and_plays, unnoticed
from tests.scheduler.strategies import exact, graph_of

ENGINE, DRAFTER = "actor@gen/sglang", "drafter@gen/sglang/actor"
TOKENS = 1000
# Layers of 256 x (256 + 2 x 128 + 256) + 3 x 256 x 1024, two norms each and one after them,
# embeddings of 64 words; the same of 64.
MID = 4 * (2 * (256 * 768 + 3 * 256 * 1024) + 5 * 256 + 64 * 256)
TINY = 4 * (2 * (64 * 192 + 3 * 64 * 256) + 5 * 64 + 64 * 64)


def placed(gen: int = 1, engine: object = None, **more: object) -> rf.Placement:
    """All trains on one pool; rollouts of the actor are an engine's, on a pool of its own."""
    engine = engine or rf.SGLang(max_total_tokens=TOKENS)
    assign = {"*": rf.on("train"), "actor.rollout": rf.on("gen", engine=engine, **more)}
    return rf.Placement(pools={"train": 1, "gen": gen}, assign=assign)


def together() -> rf.Placement:
    engine = rf.SGLang(max_total_tokens=4000)
    assign = {"*": rf.on("all"), "actor.rollout": rf.on("all", engine=engine)}
    return rf.Placement(pools={"all": 1}, assign=assign)


def drafted(
    *,
    path: str = "models/mid",
    temperature: float = 0.0,
    n: int = 2,
    rows: int | Literal["auto"] | None = None,
    probe: dict[str, object] | None = None,
    **draft: object,
) -> Graph:
    """GRPO with a drafter that learns; a second rollout by the same engine with a `probe`."""

    def declare() -> None:
        adam = rf.AdamW(lr=1e-3)
        actor = rf.Model("actor", path, optimizer=adam)
        small = rf.Model("drafter", "models/tiny", optimizer=adam, **draft)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        how = {"n": n, "max_new_tokens": 8, "temperature": temperature}
        samples = ops.rollout(actor, prompts, drafter=small, draft_tokens=3, draft_rows=rows, **how)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
        ops.train_drafter(small, samples, steps=2)
        if probe is not None:
            found = ops.rollout(actor, prompts, **{**how, **probe}, name="probe")
            ops.metrics(ops.reward(exact, found, name="exact"), name="probe.metrics")

    return graph_of(declare)


EXAMPLES = {
    "split": lambda: compiled_with(drafted(), placed()),
    "probed": lambda: compiled_with(drafted(probe={}), placed()),
    "tight": lambda: compiled_with(drafted(path="models/wide"), together(), share=0.85),
    "ranks": lambda: compiled_with(drafted(), placed(4, tp=2)),
    "gpus": lambda: compiled_with(
        drafted(path="models/wide", temperature=1.0), placed(2, tp=2), kind="h100"
    ),
    "streamed": lambda: compiled_with(drafted(), placed().model_copy(update={"stream": 2})),
    "paused": lambda: compiled_with(
        drafted(), placed().model_copy(update={"staleness": 2, "pause_at": 4})
    ),
}


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Compiled:
    return EXAMPLES[request.param]()


def test_examples_hold_after_every_pass_and_play(example: Compiled) -> None:
    holds_and_plays(example)


@pytest.mark.rows(2)
def test_every_mutant_is_rejected(example: Compiled) -> None:
    assert [] == unnoticed(example.plan)


def test_a_drafter_is_an_instance_in_the_engine_filled_one_update_behind() -> None:
    plan = EXAMPLES["split"]().plan
    engine, drafter = plan.instance(ENGINE), plan.instance(DRAFTER)
    assert ("drafter", 3, "whole sglang drafts=3") == (
        engine.drafter,
        engine.draft_tokens,
        engine.layout(),
    )
    assert (ENGINE, f"whole in {ENGINE}", ("rollout",)) == (
        drafter.inside,
        drafter.layout(),
        drafter.uses,
    )
    rollout = plan.action("actor.rollout")
    assert (f"{ENGINE}/weights", f"{DRAFTER}/weights", f"{ENGINE}/pool") == rollout.needs
    assert ((ENGINE, 0), (DRAFTER, 1)) == rollout.reads
    waits = {d.action: d.distance for d in rollout.after}
    policy = waits[f"reshard:actor@train->{ENGINE}"]
    assert policy + 1 == waits[f"reshard:drafter@train->{DRAFTER}"]
    reshard = plan.action(f"reshard:drafter@train->{DRAFTER}")
    assert ("drafter@train/weights", f"{DRAFTER}/weights") == reshard.needs
    assert TINY == reshard.cost.moved
    assert "assumed per call of an engine" in reshard.cost.source


def test_what_a_drafter_takes_is_in_the_parts_of_its_engine() -> None:
    """A token has keys and values of 2 layers: 2 x 2 x 128 numbers, and 2 x 2 x 32 of both."""
    plan = EXAMPLES["split"]().plan
    assert MID + TINY == plan.part(f"{ENGINE}/weights").size
    assert TOKENS * 4 * 2 * 2 * (128 + 32) == plan.part(f"{ENGINE}/pool").size
    drafter = plan.part(f"{DRAFTER}/weights")
    assert (0, TINY) == (drafter.size, drafter.on_host)
    assert MID + TINY == plan.peaks[HOST]
    held = dict(plan.action("actor.rollout").cost.holds)
    assert "KV cache" not in held
    # Logits of 16 rows: 3 more of the policy for each, and one of the drafter.
    assert 0 < held["drafts"] < 16 * 4 * 64 * 4 * 4


def test_ranks_share_what_lies_in_an_engine() -> None:
    plan = EXAMPLES["ranks"]().plan
    assert 2 == plan.instance(DRAFTER).tp
    assert (1, 3) == plan.instance(DRAFTER).owners
    assert TINY // 2 == plan.part(f"{DRAFTER}/weights").on_host


def test_a_pool_has_room_for_drafts_of_two_turns() -> None:
    """17 rows of 13 tokens, and twice 3 drafts and the token after them."""
    plan = compiled_with(drafted(), placed(engine=rf.SGLang())).plan
    assert 17 * (5 + 8 + 2 * 4) == plan.instance(ENGINE).options.max_total_tokens


def test_it_sleeps_and_wakes_with_its_engine() -> None:
    plan = EXAMPLES["tight"]().plan
    moves = [a for a in plan.actions if a.part is not None]
    assert any(a.part == "actor@all/sglang/weights" for a in moves)
    assert not any(a.part == "drafter@all/sglang/actor/weights" for a in moves)
    assert "drafter@all/sglang/actor/weights" in plan.awake_at_start


def test_the_plan_says_who_drafts() -> None:
    text = plan_text(EXAMPLES["split"]().plan)
    assert f"{DRAFTER}  resharded  whole in {ENGINE}" in text
    assert "and drafter drafts in it" in text


def test_a_saved_plan_with_a_drafter_comes_back_equal(tmp_path: Path) -> None:
    plan = EXAMPLES["tight"]().plan
    (tmp_path / "plan.json").write_text(dump_plan(plan))
    assert plan.hash == read_plan(tmp_path / "plan.json").hash


def test_plans_without_drafters_have_no_word_of_them() -> None:
    document = EXAMPLES["split"]().plan.to_json()
    (plain,) = (i for i in document["instances"] if i["name"] == "actor@train")
    assert not {"drafter", "draft_tokens", "inside"} & plain.keys()


def refused(graph: Graph, placement: rf.Placement, **more: str) -> tuple[Finding, ...]:
    with pytest.raises(PlanError) as error:
        compiled_with(graph, placement, **more)
    return error.value.findings


def test_sampling_with_drafts_is_refused_on_a_cpu() -> None:
    (finding,) = refused(drafted(temperature=0.7), placed())
    assert ("E630", "temperature=0.7") == (finding.code, finding.got)
    assert "on a CPU SGLang verifies drafts greedily" in finding.what
    assert '"actor.rollout": rf.on("gen")' == finding.fix
    assert compiled_with(drafted(temperature=0.7), placed(), kind="h100").plan.instance(DRAFTER)


def test_a_rollout_without_a_drafter_is_refused_where_its_engine_drafts() -> None:
    (finding,) = refused(drafted(probe={"temperature": 1.0}), placed())
    assert "E630" == finding.code
    assert finding.what.startswith("probe: ")
    assert "'drafter' drafts for all of actor@gen/sglang" in finding.what


def test_an_engine_drafts_in_one_way() -> None:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid")
        small = rf.Model("drafter", "models/tiny")
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        for name, tokens in (("one", 2), ("two", 3)):
            how = {"drafter": small, "draft_tokens": tokens, "temperature": 0.0, "name": name}
            found = ops.rollout(actor, prompts, max_new_tokens=8, **how)
            ops.metrics(ops.reward(exact, found, name=f"{name}.right"), name=f"{name}.metrics")

    (finding,) = refused(graph_of(declare), placed())
    assert "E638" == finding.code
    assert "drafter (draft_tokens=2), drafter (draft_tokens=3)" == finding.got


def test_an_engine_drafts_however_many_rows_go_on() -> None:
    (finding,) = refused(drafted(rows=4), placed())
    assert ("E264", "draft_rows=4") == (finding.code, finding.got)
    assert finding.what.endswith("SGLang lets a drafter draft in every turn")
    assert '"actor.rollout": rf.on("gen")' == finding.fix


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype bfloat16, the policy's is float32"),
        ({"lora": rf.LoRA(rank=4)}, "adapters (lora=)"),
    ],
)
def test_a_drafter_unlike_its_policy_is_refused(draft: dict[str, object], said: str) -> None:
    (finding,) = refused(drafted(**draft), placed())
    assert ("E639", said) == (finding.code, finding.got)


def test_a_drafter_with_another_vocabulary_is_refused(models: Path) -> None:
    folder = models / "models" / "other"
    folder.mkdir(exist_ok=True)
    said = (models / "models" / "mid" / "config.json").read_text()
    (folder / "config.json").write_text(said.replace('"vocab_size": 64', '"vocab_size": 96'))
    (finding,) = refused(drafted(path="models/other"), placed())
    assert ("E639", "a vocabulary of 64, the policy's is 96") == (finding.code, finding.got)


def test_an_engine_that_does_not_draft_refuses_a_drafter() -> None:
    (finding,) = refused(drafted(), placed(engine="vllm"))
    assert "E249" == finding.code
    assert "drafter 'drafter'" in finding.what


def test_what_sglang_drafts_with_is_said_by_the_rollout_alone() -> None:
    with pytest.raises(PlanError) as error:
        rf.SGLang(args={"speculative_algorithm": "NGRAM"})
    assert "E246" == error.value.findings[0].code
    assert "drafter= of the rollout" in str(error.value)


def test_embedded_and_engine_rollouts_have_drafters_of_their_own() -> None:
    """The embedded one's lies whole on the pool, and neither is taken for the other."""

    def declare() -> None:
        adam = rf.AdamW(lr=1e-3)
        actor = rf.Model("actor", "models/mid", optimizer=adam)
        small = rf.Model("drafter", "models/tiny", optimizer=adam)
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        how = {"max_new_tokens": 8, "temperature": 0.0, "drafter": small, "draft_tokens": 2}
        samples = ops.rollout(actor, prompts, n=2, **how)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
        ops.train_drafter(small, samples, steps=1)
        found = ops.rollout(actor, prompts, **how, name="probe")
        ops.metrics(ops.reward(exact, found, name="right"), name="probe.metrics")

    placement = placed()
    assign = {**placement.assign, "probe": rf.on("gen", weights="own")}
    plan = compiled_with(graph_of(declare), placement.model_copy(update={"assign": assign})).plan
    assert (DRAFTER, 1) in plan.action("actor.rollout").reads
    assert ("drafter@gen", 1) in plan.action("probe").reads
    assert plan.instance("drafter@gen") == replace(plan.instance("drafter@gen"), inside=None)


FROZEN = rf.Speculative(algorithm="STANDALONE", draft_model="/models/draft", draft_tokens=4)


def sampling(temperature: float, n: int = 2) -> Graph:
    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=n, max_new_tokens=8, temperature=temperature)
        advantage = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))

    return graph_of(declare)


def test_options_that_draft_are_refused_where_they_would_change_samples() -> None:
    engine = rf.SGLang(speculative=FROZEN)
    with pytest.raises(PlanError) as refused:
        compiled_with(sampling(1.0), placed(engine=engine))
    (finding,) = refused.value.findings
    assert "E630" == finding.code
    assert "actor.rollout: with a drafter" in finding.what
    for temperature, kind in ((0.0, "cpu"), (1.0, "h100")):
        plan = compiled_with(sampling(temperature), placed(engine=engine), kind=kind).plan
        assert FROZEN == plan.instance(plan.action("actor.rollout").instance).options.speculative


def test_a_drafter_and_options_that_draft_are_refused_together() -> None:
    with pytest.raises(PlanError) as refused:
        compiled_with(drafted(), placed(engine=rf.SGLang(speculative=FROZEN)))
    assert ["E678"] == [finding.code for finding in refused.value.findings]


def test_a_frozen_draft_model_counts_by_its_files(tmp_path: Path) -> None:
    """And each row has slots in the pool for two turns of five tokens."""
    (tmp_path / "model.safetensors").write_bytes(bytes(123_456))
    said = FROZEN.model_copy(update={"draft_model": str(tmp_path)})
    plans = [
        compiled_with(sampling(0.0), placed(engine=engine)).plan
        for engine in (rf.SGLang(), rf.SGLang(speculative=said))
    ]
    plain, drafts = (plan.part(f"{ENGINE}/weights").size for plan in plans)
    assert 123_456 == drafts - plain
    tokens = [plan.instance(ENGINE).options.max_total_tokens for plan in plans]
    assert (16 + 1) * 2 * 5 == tokens[1] - tokens[0]


@pytest.mark.parametrize(
    ("algorithm", "topk", "verified"), [("NGRAM", 1, 5), ("NEXTN", 1, 5), ("NEXTN", 2, 9)]
)
def test_rows_have_room_for_what_two_turns_verify(algorithm: str, topk: int, verified: int) -> None:
    """17 rows of 13 tokens, and twice what SGLang is told to verify."""
    said = rf.Speculative(algorithm=algorithm, draft_tokens=4, topk=topk)
    assert verified == said.arguments()["speculative_num_draft_tokens"]
    plan = compiled_with(sampling(0.0), placed(engine=rf.SGLang(speculative=said))).plan
    assert 17 * (5 + 8 + 2 * verified) == plan.instance(ENGINE).options.max_total_tokens


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithm": "EAGLE"}, "needs a draft_model"),
        ({"algorithm": "NGRAM", "draft_model": "/there"}, "no model of its own"),
        ({"algorithm": "EAGLE3", "draft_model": "../there"}, "another draft_model for every"),
        ({"algorithm": "EAGLE", "draft_model": "~/there"}, "another draft_model for every"),
        ({"algorithm": "EAGLE", "draft_model": ""}, "needs a draft_model"),
        ({"algorithm": "NEXTN", "draft_model": ""}, "no model of its own"),
        ({"algorithm": "NGRAM", "topk": 4}, "topk would do nothing"),
    ],
)
def test_speculative_options_that_are_wrong_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as refused:
        rf.Speculative(**options)
    (finding,) = refused.value.findings
    assert "E677" == finding.code
    assert said in finding.what


def test_a_plan_with_options_that_draft_is_saved_and_read(tmp_path: Path) -> None:
    plan = compiled_with(sampling(0.0), placed(engine=rf.SGLang(speculative=FROZEN))).plan
    (tmp_path / "plan.json").write_text(dump_plan(plan))
    assert plan.instances == read_plan(tmp_path / "plan.json").instances
