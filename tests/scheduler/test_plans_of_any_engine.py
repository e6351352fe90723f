"""Plans with engines other than SGLang: vLLM, and one of somebody's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.user import engine_options
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.observed import key_of
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.examples import compiled_with, grpo
from tests.scheduler.player import play
from tests.scheduler.test_engine_plans import colocated, costs_of, split


class Mine(rf.EngineOptions):
    engine = "mine"
    title = "my engine"
    loader = "nowhere:load"

    def unseeded(self, *, on_cpu: bool) -> str:
        return f": dice are thrown, {on_cpu}"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_options, "_ENGINES", dict(engine_options._ENGINES))
    rf.register_engine(Mine)


def tight(engine: rf.EngineOptions) -> Plan:
    """A plan in which the engine has to sleep."""
    return compiled_with(grpo(path="models/wide", every=0), colocated(engine), share=0.7).plan


@pytest.mark.parametrize("kind", [rf.VLLM, Mine])
def test_plans_hold_play_and_come_back(kind: type[rf.EngineOptions], tmp_path: Path) -> None:
    plan = tight(kind(max_total_tokens=4000))
    assert [] == verify(plan, "timing")
    assert [] == play(plan, 0)
    engine = plan.instance(f"actor@all/{kind.engine}")
    assert kind(max_total_tokens=4000, memory_saver=True) == engine.options
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    assert plan.hash == read_plan(path).hash


def test_a_saved_plan_needs_no_registered_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tight(Mine(max_total_tokens=4000))
    path = tmp_path / "plan.json"
    path.write_text(dump_plan(plan))
    monkeypatch.setattr(engine_options, "_ENGINES", {})
    found = read_plan(path)
    assert (plan.hash, "mine") == (found.hash, found.instance("actor@all/mine").engine)


def test_the_text_says_which_engine_and_whether_samples_can_be_drawn_again() -> None:
    text = plan_text(compiled_with(grpo(), split("vllm")).plan)
    assert "actor@gen/vllm  resharded  whole vllm" in text
    assert "engine: actor@gen/vllm is vLLM in a process of its own" in text
    assert "seeds: " not in text
    text = plan_text(compiled_with(grpo(), split("mine")).plan)
    assert "is my engine in a process of its own" in text
    assert "is not replayable: dice are thrown, True" in text


def test_engines_are_measured_apart() -> None:
    keys = set()
    for engine in ("sglang", "vllm", "mine"):
        compiled = compiled_with(grpo(every=0), colocated(engine))
        costs = costs_of(compiled)
        for action in compiled.plan.actions:
            if action.kind == "reshard" or action.node == "actor.rollout":
                keys.add(key_of(compiled.plan, costs, action))
    assert 3 * len(("reshard", "rollout")) == len(keys)


def test_findings_name_the_engine() -> None:
    with pytest.raises(PlanError) as refused:
        compiled_with(grpo(), rf.Placement(pools={"a": 1}, assign={"*": rf.on("a", engine="mine")}))
    (finding,) = refused.value.findings
    assert "E247" == finding.code
    assert "engine 'mine' generates and does nothing else" in finding.what
    assert 'rf.on("a", engine="mine")' in finding.fix
    with pytest.raises(PlanError, match=r"E248.*engine 'vllm' has no fsdp=2"):
        compiled_with(grpo(every=0), split("vllm", gen=2, fsdp=2))
