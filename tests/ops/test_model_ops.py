"""Ops of a user's own that score or generate with a model: the same as the built-in ones do."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.runtime.record.metrics import read_metrics
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices import cluster
from tests.conftest import TINY

FILE = f'''
import rlflow as rf
from rlflow import ops


class Config(rf.Config):
    asked: int = 0


@rf.op(per="row")
def scored(
    ref: rf.Scorer, prompt_tokens: rf.Token[int], response_tokens: rf.Token[int]
) -> rf.Row[float]:
    return ref.log_probs(prompt_tokens, response_tokens).to_padded_tensor(0.0).sum(-1)


@rf.op(per="row")
def answered(
    actor: rf.Sampler, prompt: list[str], *, max_new_tokens: int = 4, temperature: float = 0.0
) -> list[str]:
    return actor.generate(prompt)


@rf.op(per="batch")
def agrees(
    response: list[str], answered: list[str], scored: rf.Row[float], ref_log_probs: rf.Token[float]
) -> rf.Row[float]:
    assert response == answered, (response, answered)
    wanted = ref_log_probs.to_padded_tensor(0.0).sum(-1)
    assert (scored - wanted).abs().max() < 1e-4, (scored, wanted)
    return scored


def placed(devices, **layout):
    return rf.Placement(
        pools={{"all": devices}},
        assign={{
            "*": rf.on("all", **layout),
            "actor.rollout": rf.on("all", tp=layout.get("tp", 1)),
        }},
    )


LAYOUTS = {{"one": placed(1), "fsdp2": placed(2, fsdp=2), "tp2": placed(2, tp=2, fsdp=1)}}


def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline(placements=LAYOUTS)
def using(cfg: Config) -> None:
    actor = rf.Model("actor", "{TINY}", optimizer=rf.AdamW(lr=1e-3))
    ref = rf.Model("ref", "{TINY}")
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4, temperature=0.0)
    said = answered(actor, samples)
    found = scored(ref, samples)
    checked = agrees(samples, said, found, ops.log_probs(ref, samples))
    ops.metrics(checked, name="told")
    adv = ops.advantage("grpo", samples, ops.reward(exact_match, samples))
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
'''


@pytest.fixture
def told(rlflow, tmp_path, monkeypatch):
    """What a run of three iterations has logged, by placement."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "using.py").write_text(FILE)

    def call(placement, *words):
        options = ("--iterations", 3, "--threads", 1, "--run-dir", placement, "-q", *words)
        result = rlflow("run", "using.py", "--placement", placement, *options)
        assert 0 == result.code, result.err
        return [line.metrics for line in read_metrics(tmp_path / placement / "metrics.jsonl")]

    return call


@pytest.mark.slow
@pytest.mark.torch
def test_scores_and_samples_are_those_of_the_built_in_ops(told):
    lines = told("one")
    assert 3 == len(lines)
    assert lines[0]["told/agrees_mean"] < 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.torch
@pytest.mark.parametrize("placement", ["fsdp2", pytest.param("tp2", marks=pytest.mark.extra)])
def test_sharded_models_answer_as_whole_ones(told, placement):
    here, there = told("one"), told(placement)
    for mine, theirs in zip(here, there, strict=True):
        assert theirs["told/agrees_mean"] == pytest.approx(mine["told/agrees_mean"], rel=1e-4)


# --- what is declared -----------------------------------------------------------------------


@rf.op(per="row")
def judged(judge: rf.Scorer, prompt: list[str], response: list[str]) -> rf.Row[float]:
    return judge.log_probs(prompt, response).to_padded_tensor(0.0).sum(-1)


@rf.op(per="row")
def rival(ref: rf.Sampler, prompt: list[str], *, max_new_tokens: int = 6) -> list[str]:
    return ref.generate(prompt)


def traced(*, model=True, staleness=0):
    @rf.pipeline(staleness=staleness)
    def using(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", str(TINY))
        prompts = ops.prompts(rf.data.arithmetic(), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        graded = judged(ref, samples) if model else judged(samples)
        other = rival(ref, samples)
        reward = ops.reward(lambda response, rival: 1.0, samples, other)
        adv = ops.advantage("grpo", samples, reward)
        ops.metrics(graded)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    return using.trace()


def test_a_model_is_placed_costed_and_counted_by_its_use():
    split = rf.Placement(
        pools={"train": 1, "gen": 1},
        assign={
            "actor": rf.on("train"),
            "actor.rollout": rf.on("gen"),
            "ref": rf.on("train"),
            "ref.rollout": rf.on("gen"),
        },
    )
    devices = cluster.cpu_cluster(2, threads=1, memory=4e9)
    plan = compile_plan(traced(), split, devices, near=TINY).plan
    runs = {a.node: a for a in plan.actions if a.kind == "run"}
    assert ("ref@train", "ref@gen") == (runs["ref.judged"].instance, runs["ref.rival"].instance)
    assert ("forward", "rollout") == (judged.op.use, rival.op.use)
    assert 6 == plan.graph.node("ref.rival").param("max_new_tokens")
    assert all(runs[name].cost.transient for name in ("ref.judged", "ref.rival"))


def test_what_no_plan_could_place_is_refused():
    with pytest.raises(GraphError, match=r"(?s)E165.*judged.*given none"):
        traced(model=False)

    def endless(ref: rf.Sampler, prompt: list[str]) -> list[str]: ...
    def acting(ref: rf.Scorer, prompt: list[str]) -> None: ...

    for per, function, says in (
        ("group", judged.op.function, 'per="group"'),
        ("row", endless, "max_new_tokens"),
        ("row", acting, "an effect"),
    ):
        with pytest.raises(GraphError, match=f"(?s)E165.*{says}"):
            rf.op(per=per)(function)
