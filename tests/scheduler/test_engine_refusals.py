"""What a placement may not ask of an engine in a process of its own."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from tests.scheduler.examples import compiled_with, grpo
from tests.scheduler.test_engine_plans import adapted, colocated, split


def refused(placement: rf.Placement, graph: Graph | None = None) -> tuple[str, str, str]:
    with pytest.raises(PlanError) as error:
        compiled_with(graph or grpo(), placement)
    (finding,) = error.value.findings
    return finding.code, finding.what, finding.fix


def test_an_engine_for_more_than_rollouts_is_refused_once() -> None:
    everything = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all", engine="sglang")})
    code, what, fix = refused(everything)
    assert "E247" == code
    assert "actor.update (train)" in what
    assert "ref.log_probs (forward)" in what
    assert (
        '"ref": rf.on("all"), "actor": rf.on("all"), '
        '"actor.rollout": rf.on("all", engine="sglang")' == fix
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp": 2}, "fsdp=2"),
        ({"recompute": True}, "recompute=True"),
        ({"offload": "layers"}, "offload=layers"),
        ({"weights": "shared"}, "weights=shared"),
    ],
)
def test_layouts_that_an_engine_has_not_are_refused(options: dict[str, object], said: str) -> None:
    code, what, _ = refused(split(gen=2, **options), grpo(every=0))
    assert ("E248", f"actor.rollout: engine 'sglang' has no {said}") == (code, what)


@pytest.mark.parametrize(
    ("engine", "targets", "layers"),
    [
        ("vllm", ("q_proj", "self_attn.v_proj", "q_proj"), "q_proj and v_proj"),
        ("sglang", ("q_proj", "0.mlp.dense"), "dense"),
    ],
)
def test_adapters_that_an_engine_has_not_are_refused(
    engine: str, targets: tuple[str, ...], layers: str
) -> None:
    code, what, fix = refused(colocated(engine), adapted(targets=targets))
    assert "E249" == code
    wanted = f"actor.rollout: engine {engine!r} runs no model with adapters on {layers} (lora=)"
    assert wanted == what
    assert '"actor.rollout": rf.on("all")' == fix


def test_two_uses_of_one_engine_agree_on_its_options() -> None:
    placement = colocated()
    other = rf.on("all", engine=rf.SGLang(max_total_tokens=99))
    code, what, _ = refused(
        placement.model_copy(update={"assign": {**placement.assign, "eval": other}})
    )
    assert "E216" == code
    assert "wants another layout" in what
