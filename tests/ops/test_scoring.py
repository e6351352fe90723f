"""Declaring rewards: which functions, how they are called, and what failures do to the graph."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.graph.text import graph_text


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def long(response: list[str]) -> list[float]:
    return [float(len(text)) for text in response]


async def judged(response: str) -> float:
    return 1.0


def counted(response: str, tokens: int) -> float:
    return 0.0


def declared(make, *, data=None):
    """The graph of a pipeline whose reward `make` declares."""
    mixed = {"sums": rf.data.arithmetic(), "maths": rf.data.arithmetic(operators="-")}
    source = data or rf.data.mix(mixed)

    @rf.pipeline()
    def pipeline(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-4))
        prompts = ops.prompts(source, batch=4)
        samples = ops.rollout(actor, prompts, n=4, max_new_tokens=8)
        advantage = ops.advantage("grpo", samples, *make(samples))
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss())

    return pipeline.trace()


def findings(make, **options):
    with pytest.raises(GraphError) as caught:
        declared(make, **options)
    return caught.value.findings


def reads(graph, node):
    return {bound.name: bound.source for bound in graph.node(node).inputs}


# --- one function or one for each data set --------------------------------------------------


def test_a_function_for_each_data_set_reads_what_any_of_them_reads():
    graph = declared(lambda samples: [ops.reward({"sums": exact, "maths": long}, samples)])
    node = graph.node("reward")
    assert {"response", "answer", "data_source"} == set(reads(graph, "reward"))
    assert ("maths",) == tuple(node.param("function").batched)
    assert "reward(function={sums=exact, maths=long} by data_source, batched=False)" in " ".join(
        graph_text(graph).split()
    )


def test_a_data_set_of_the_mix_without_a_function_is_found_before_anything_starts():
    (finding,) = findings(lambda samples: [ops.reward({"sums": exact, "math": exact}, samples)])
    assert ("E281", ("math",)) == (finding.code, finding.near)
    assert "no reward function for data_source 'maths'" == finding.what


def test_another_column_may_say_which_function():
    data = rf.data.jsonl("nowhere.jsonl", columns=["prompt", "answer", "kind"])
    graph = declared(lambda samples: [ops.reward({"x": exact}, samples, by="kind")], data=data)
    assert "kind" in reads(graph, "reward")


def test_a_column_that_nobody_offers():
    data = rf.data.arithmetic()
    (finding,) = findings(lambda samples: [ops.reward({"x": exact}, samples)], data=data)
    assert ("E103", True) == (finding.code, "data_source" in finding.what)


def test_functions_that_read_a_field_as_different_types():
    def other(response: str, answer: int) -> float:
        return 0.0

    found = findings(lambda samples: [ops.reward({"sums": exact, "maths": other}, samples)])
    assert "E104" == found[0].code
    assert "two reward functions read 'answer' as different types" == found[0].what


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (judged, {"timeout": 0}, "timeout=0"),
        (judged, {"concurrency": 0}, "concurrency=0"),
        (exact, {"concurrency": 4}, "concurrency=4"),
        (exact, {"retries": -1}, "retries=-1"),
        (exact, {"backoff": 2.0}, "backoff=2.0"),
        (judged, {"retries": 1, "backoff": -1.0}, "backoff=-1.0"),
        (exact, {"max_failures": 0.5}, "max_failures=0.5"),
        (exact, {"max_failures": 1.0, "on_error": "drop_sample"}, "max_failures=1.0"),
        (exact, {"on_error": "drop_samples"}, "on_error='drop_samples'"),
    ],
)
def test_an_option_out_of_range_or_without_effect_is_refused(function, options, what):
    (finding,) = findings(lambda samples: [ops.reward(function, samples, **options)])
    assert ("E280", f"a reward with {what}") == (finding.code, finding.what)
    assert finding.expected


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (exact, {"timeout": 1, "concurrency": 2}),
        (judged, {"concurrency": 2, "retries": 3, "backoff": 0.5}),
        (exact, {"on_error": "drop_group", "max_failures": 0.0}),
    ],
)
def test_options_that_are_right(function, options):
    node = declared(lambda samples: [ops.reward(function, samples, **options)]).node("reward")
    assert options == {key: found(node.param("policy"), key) for key in options}


def found(policy, key):
    return getattr(policy.bounds, key) if hasattr(policy.bounds, key) else getattr(policy, key)


# --- failures -------------------------------------------------------------------------------


def test_without_a_policy_nothing_is_added_to_the_graph():
    graph = declared(lambda samples: [ops.reward(exact, samples)])
    assert [field.name for field in graph.node("reward").op.outputs] == ["reward"]
    assert "reward_failures" not in graph_text(graph)
    assert "valid" not in graph_text(graph)
    options = ("function", "batched")
    assert options == tuple(key for key, _ in graph.node("reward").params)


def test_a_policy_makes_a_count_of_failures_and_what_trains_reads_valid():
    graph = declared(lambda samples: [ops.reward(exact, samples, on_error="drop_sample")])
    assert "row" == graph.node("reward").op.per
    watched = reads(graph, "reward_failures")
    assert ("reward", "reward") == (watched["valid"], watched["failure"])
    assert {"prompt", "response", "sample", "group"} <= set(watched)
    assert "reward" == reads(graph, "advantage")["valid"]
    assert "advantage" == reads(graph, "actor.update")["valid"]


def test_dropping_groups_needs_groups_whole():
    graph = declared(lambda samples: [ops.reward(exact, samples, on_error="drop_group")])
    assert "group" == graph.node("reward").op.per
    assert "group" in reads(graph, "reward")


def test_a_row_must_be_valid_in_all_rewards():
    def make(samples):
        first = ops.reward(exact, samples, on_error="drop_sample", name="first")
        second = ops.reward(judged, samples, on_error="drop_sample", name="second")
        return [first, second.rename(other="reward")]

    graph = declared(make)
    assert ("first", "second") == tuple(
        reads(graph, "advantage")[name] for name in ("valid", "valid_2")
    )
    assert {"first_failures", "second_failures"} <= {node.name for node in graph.nodes}


def test_an_evaluation_may_have_a_function_for_each_data_set():
    @rf.pipeline()
    def pipeline(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-4))
        data = rf.data.mix({"sums": rf.data.arithmetic()})
        ops.evaluate(actor, data, {"sums": exact}, every=5, max_new_tokens=4)
        tokens = ops.tokenize(actor, ops.prompts(data, batch=4))
        ops.update(actor, tokens, loss=rf.SFTLoss())

    node = pipeline.trace().node("eval")
    assert {"sums": exact} == node.param("function").functions


@pytest.mark.parametrize("given", ["exact_match", None, int, {"a": 3}], ids=repr)
def test_what_is_no_function_is_refused_by_name(given):
    def run(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=4), max_new_tokens=8)
        ops.reward(given, samples)

    with pytest.raises(GraphError, match=r"(?s)E104.*is no function of rows.*def score\("):
        rf.pipeline()(run).trace(rf.Config())
