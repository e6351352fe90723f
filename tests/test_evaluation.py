"""What an evaluation is made of, before a weight is read: terms, graphs, plans, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlflow.cli.commands import Target, declare, plan_declared
from rlflow.cli.evaluation.declared import Counted, evaluation_graph, ks_of
from rlflow.cli.evaluation.terms import answer_named, terms_of
from rlflow.cli.evaluation.weights import named_weights
from rlflow.data.answers import extract_boxed
from rlflow.errors import UsageError
from rlflow.graph.cut.part import GraphPart
from rlflow.ops.evaluating.passing import PassRule, whole_response
from tests.conftest import PIPELINES

GRPO = PIPELINES / "grpo_arithmetic.py"


def planned(name, placement, n=4, node=None):
    """The plan of an evaluation of a shipped pipeline, and its terms."""
    target = Target(pipeline=str(PIPELINES / name), placement=placement, devices="cpu:8", threads=1)
    declared = declare(target)
    terms = terms_of(declared.whole, node, None, n)
    model = terms.model.model_copy(update={"optimizer": None, "lora": None})
    counted = Counted(n=n, ks=ks_of(n, ()), rule=PassRule(), answer=whole_response)
    graph = evaluation_graph(declared.whole, terms, model, counted)
    part = GraphPart(graph=graph, notes=())
    return plan_declared(replace(declared, part=part), target).compiled.plan, terms


@pytest.mark.parametrize(
    ("name", "placement", "pool"),
    [
        ("grpo_arithmetic.py", "colocate", "all"),
        ("grpo_arithmetic.py", "async", "gen"),
        ("grpo_arithmetic.py", "sglang", "gen"),
        ("lora_grpo.py", "h100_split", "gen"),
        ("ppo.py", "h100_split", "policy"),
        ("distill.py", "split", "student"),
        ("dapo.py", "h100", "all"),
    ],
)
def test_an_evaluation_runs_where_the_placement_has_its_rollouts(name, placement, pool):
    plan, _ = planned(name, placement)
    runs = {action.node: action for action in plan.actions if action.kind == "run"}
    rollout = next(node for node in runs if str(node).endswith(".rollout"))
    assert {"prompts", rollout, "reward", "passes"} == set(runs)
    assert pool == runs[rollout].pool
    assert not any(instance.trained for instance in plan.instances)
    assert ("sglang" in str(plan.instances[0].name)) == (placement == "sglang")


def test_several_samples_are_drawn_as_rollouts_are_and_one_as_evaluations_are():
    assert 1.0 == planned("grpo_arithmetic.py", "colocate")[1].sampling["temperature"]
    assert 0.0 == planned("grpo_arithmetic.py", "colocate", n=1)[1].sampling["temperature"]
    # The first rollout of remax is its greedy baseline.
    assert planned("remax.py", "colocate")[1].sampling["temperature"] > 0


def test_a_rollout_and_its_reward_are_terms_too():
    plan, terms = planned("grpo_arithmetic.py", "colocate", node="actor.rollout")
    assert "train split" in terms.data.describe()
    assert "exact_match" == terms.function.__name__
    prompts = plan.graph.node("prompts")
    assert terms.data.size() == dict(prompts.params)["batch"]
    assert "grpo_arithmetic.py:54" in str(prompts.where)


def test_k_is_each_power_of_two_and_n():
    assert (1,) == ks_of(1, ())
    assert (1, 2, 4, 8) == ks_of(8, ())
    assert (1, 2, 4, 8, 10) == ks_of(10, ())
    assert (3, 5) == ks_of(5, (5, 3, 3))


def test_rules_are_read_as_they_are_printed():
    for text in ("reward>=1", "reward>0.5", "reward>=-1"):
        assert text == PassRule.parse(text).describe()
    assert PassRule(">", 0.25) == PassRule.parse(" Reward > 2.5e-1 ")


def test_answers_are_read_by_known_ways_or_by_a_function_of_the_file():
    def mine(response: str) -> str:
        return response[-1]

    assert extract_boxed is answer_named("boxed", {})
    assert mine is answer_named("mine", {"mine": mine})


def folder(path, **files):
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("_json", ".json")).write_text(text)
    return path


def test_weights_are_known_by_what_lies_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run", "p.py", "--placement", "split", "--set", "a=1", "--devices", "cpu:2"]
    said = {"again": words, "name": "p", "pipeline": "p.py", "started": "2025"}
    run = folder(tmp_path / "runs" / "r", run_json=json.dumps(said))
    saved = folder(run / "checkpoints" / "iteration-000020", manifest_json="{}")
    found = named_weights("runs/r", 20)
    expected = ("p.py", ("a=1",), "split")
    assert expected == (found.pipeline, found.settings, found.placement)
    assert saved.resolve() == found.checkpoint.resolve()
    assert "actor after 20 iterations, runs/r/checkpoints/iteration-000020" == found.text("actor")
    same = named_weights(str(saved), None)
    assert expected == (same.pipeline, same.settings, same.placement)
    loose = named_weights(
        str(folder(tmp_path / "x" / "iteration-000007", manifest_json="{}")), None
    )
    assert (None, "a after 7") == (loose.pipeline, loose.text("a")[:9])
    model = named_weights(str(folder(tmp_path / "m", config_json="{}")), None)
    assert str(tmp_path / "m") == model.path
    assert "Qwen/Qwen2.5-7B" == named_weights("Qwen/Qwen2.5-7B", None).path
    assert ("p.py:one", None) == (named_weights("p.py:one", None).pipeline, found.path)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("nothing",), "E360", "neither run nor model"),
        (("runs/missing",), "E360", "a path that is not there"),
        ((".",), "E360", "neither run nor model"),
        (("",), "E360", "'' is nothing that has weights"),
        (("x" * 5000,), "E360", "File name too long"),
        ((GRPO, "--iteration", 3), "E361", "not the directory of a run"),
        ((GRPO, "--passes", "reward"), "E362", "--passes 'reward>=1'"),
        ((GRPO, "--passes", "reward>=.."), "E362", "'reward>0.5'"),
        ((GRPO, "--node", "evil"), "E364", "did you mean 'eval'"),
        ((GRPO, "--model", "ref"), "E364", "models actor"),
        ((PIPELINES / "multi_turn.py",), "E364", "on single prompts"),
        ((GRPO, "--temperature", 0), "E365", "-n 1, or --temperature 1"),
        ((GRPO, "-n", 4, "-k", 2, "-k", 8), "E370", "fix          -n 8"),
        ((GRPO, "--answer", "bxed"), "E366", "did you mean 'boxed'"),
        (("model",), "E367", "rlflow eval model --pipeline FILE.py"),
        ((GRPO, "--data", "no.jsonl"), "E601", "no file 'no.jsonl'"),
        ((GRPO, "--run-dir", "runs/r"), "E368", "another --run-dir"),
    ],
)
def test_what_is_wrong_is_said_before_weights_are_read(
    rlflow, tmp_path, monkeypatch, words, code, says
):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "nothing")
    folder(tmp_path / "model", config_json="{}")
    folder(tmp_path / "runs" / "r", run_json="{}")
    result = rlflow("eval", *words)
    assert 2 == result.code
    assert f"error[{code}]" in result.err
    assert says in result.err
    assert "click" not in result.err


def test_a_run_without_that_checkpoint_says_which_it_has(tmp_path):
    run = folder(tmp_path / "r", run_json="{}")
    for number in (10, 20):
        folder(run / "checkpoints" / f"iteration-{number:06}")
    with pytest.raises(UsageError, match=r"(?s)E361.*after 10, 20.*--iteration 20"):
        named_weights(str(run), 15)


def test_data_of_the_command_line_needs_what_the_reward_reads(rlflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "sum": "2"}\n')
    asked = ("eval", GRPO, "--data", "rows.jsonl", "--prompt-column", "question", "--dry-run")
    lacking = rlflow(*asked)
    assert 3 == lacking.code
    assert "'answer'" in lacking.err
    assert "grpo_arithmetic.py:60" in lacking.err
