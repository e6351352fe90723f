"""Tracing: what a pipeline function declares, and every finding that tracing reports."""

from __future__ import annotations

import typing

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.op import Op
from rlflow.graph.rules.check import check_graph
from rlflow.graph.rules.nesting import NodeName
from rlflow.graph.trace import tracing

DATA = rf.data.arithmetic(digits=2)


class Made(typing.TypedDict):
    good: rf.Row[bool]
    weight: rf.Token[float]


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def trace(declare, **config):
    """The graph that a function of no arguments declares."""

    def run(cfg: rf.Config) -> None:
        declare()

    return rf.pipeline()(run).trace(rf.Config(**config))


def findings(declare):
    with pytest.raises(GraphError) as caught:
        trace(declare)
    return caught.value.findings


def actor_and_samples(n=4):
    actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
    samples = ops.rollout(actor, ops.prompts(DATA, batch=4), n=n, max_new_tokens=8)
    return actor, samples


def grpo():
    actor, samples = actor_and_samples()
    reward = ops.reward(exact, samples)
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss())


def test_edges_follow_from_fields_and_weights():
    graph = trace(grpo)
    edges = {(e.source, e.target, e.kind, e.distance) for e in graph.edges}

    assert ("prompts", "actor.rollout", "data", 0) in edges
    assert ("reward", "advantage", "data", 0) in edges
    assert ("actor.update", "actor.rollout", "weights", 1) in edges
    assert ("actor.rollout", "actor.update", "order", 0) in edges
    assert ("actor.update", "actor.update", "weights", 1) in edges
    assert ["prompts", "actor.rollout", "reward", "advantage", "actor.update"] == graph.order()


def test_old_policy_read_precedes_the_update():
    """log_probs(actor) reads version i, update writes i + 1: an order edge at distance 0."""

    def declare():
        actor, samples = actor_and_samples()
        old = ops.log_probs(actor, samples)
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, old, loss=rf.PolicyLoss(), epochs=2)

    order = {(e.source, e.target) for e in trace(declare).edges if e.kind == "order"}

    assert ("actor.log_probs", "actor.update") in order


def test_a_rollout_carries_the_columns_of_its_prompts():
    graph = trace(grpo)
    made = {field.name: str(field) for field in graph.node("actor.rollout").op.outputs}

    assert "answer:text[row]" == made["answer"]
    assert "rollout_log_probs:float32[token|response_mask]" == made["rollout_log_probs"]


def test_the_same_pipeline_has_the_same_hash_and_another_not():
    assert trace(grpo).hash == trace(grpo).hash

    def other():
        actor, samples = actor_and_samples(n=8)
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    assert trace(grpo).hash != trace(other).hash


def test_a_missing_field_names_the_op_that_provides_it():
    def declare():
        actor, samples = actor_and_samples()
        adv = ops.advantage("gae", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert "E103" == found.code
    assert "node 'advantage' has no input 'values'" == found.what
    assert "values:float32[token], made by ops.values" == found.expected
    assert "values = ops.values(critic, samples)" == found.fix
    assert found.where is not None
    assert 'ops.advantage("gae"' in found.where.text


def test_a_missing_reference_for_a_kl_term():
    def declare():
        actor, samples = actor_and_samples()
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss(kl_coef=0.1))

    (found,) = findings(declare)

    assert "node 'actor.update' has no input 'ref_log_probs'" == found.what
    assert "made by ops.log_probs" in found.expected


def test_all_findings_come_at_once():
    def declare():
        actor, samples = actor_and_samples()
        adv = ops.advantage("grpo", samples)
        ops.update(actor, adv, loss=rf.PolicyLoss())

    found = findings(declare)

    assert ["advantage", "actor.update"] == list(dict.fromkeys(f.what.split("'")[1] for f in found))
    assert len(found) >= 4


def test_unknown_estimator_and_unknown_option():
    def declare():
        actor, samples = actor_and_samples()
        reward = ops.reward(exact, samples)
        ops.advantage("gpro", samples, reward)
        adv = ops.advantage("grpo", samples, reward, std_epz=1.0)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    by_code = {f.code: f for f in findings(declare)}

    assert "grpo" == by_code["E116"].near[0]
    assert ("std_eps",) == by_code["E117"].near


def test_group_op_on_ungrouped_rows():
    def declare():
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(DATA, batch=4)
        written = ops.tokenize(actor, prompts)
        reward = ops.reward(lambda answer: 1.0, prompts)
        adv = ops.advantage("grpo", written, reward)
        ops.update(actor, written, adv, loss=rf.PolicyLoss())

    assert "E109" in {f.code for f in findings(declare)}


def test_group_size_one_with_a_group_relative_estimator():
    def declare():
        actor, samples = actor_and_samples(n=1)
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert "E110" == found.code
    assert "ops.rollout(..., n=8)" == found.fix


def test_wrong_dtype():
    def declare():
        actor, samples = actor_and_samples()
        wrong = samples.only("sample", "group").rename(reward="sample")
        adv = ops.advantage("grpo", wrong)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert "E104" == found.code
    assert "sample:int64[row]" == found.got


def test_wrong_level():
    @rf.op(per="batch")
    def mean_length(finished: rf.Row[bool]) -> rf.Token[float]:
        return finished

    def declare():
        actor, samples = actor_and_samples()
        reward = mean_length(samples).rename(reward="mean_length")
        adv = ops.advantage("grpo", samples, reward)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert "dtype float32, level rf.Row" == found.expected


def test_a_field_of_the_wrong_type_is_told_with_what_makes_the_right_one():
    @rf.op(per="row")
    def values(finished: rf.Row[bool]) -> rf.Row[float]:
        return 1.0 * finished

    def declare():
        actor, samples = actor_and_samples()
        reward = ops.reward(exact, samples)
        adv = ops.advantage("gae", samples, reward, values(samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert ("E104", "values:float32[row]") == (found.code, found.got)
    assert "values = ops.values(critic, samples)" == found.fix


def test_a_name_with_the_sign_of_trips():
    def declare():
        actor, samples = actor_and_samples()
        ops.metrics(ops.reward(exact, samples, name="a#1"), name="b#")
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert ("E130", "a name with '#': 'a#1'") == (found.code, found.what)
    assert 'name="a_1"' == found.fix
    assert "a#1" in found.where.text


def test_a_loop_with_the_sign_of_trips_is_one_finding():
    def declare():
        actor, _ = actor_and_samples()

        def attempt():
            samples = ops.rollout(actor, ops.prompts(DATA, batch=4), n=4, max_new_tokens=8)
            reward = ops.reward(exact, samples)
            return samples, reward, ops.informative(samples, reward)

        found = ops.repeat(attempt, until="informative", groups=4, at_most=2, name="try#2")
        ops.update(actor, found, ops.advantage("grpo", found), loss=rf.PolicyLoss())

    found = [f for f in findings(declare) if f.code == "E130"]

    assert ["a name with '#': 'try#2'"] == [f.what for f in found]


def test_models_and_pools_with_the_sign_of_trips():
    with pytest.raises(ValueError, match="plain word, got 'actor#2'"):
        rf.Model("actor#2", "some/model")
    with pytest.raises(ValueError, match="pool 'gen#1': a name without '#'"):
        rf.Placement(pools={"gen#1": 1}, assign={"*": rf.on("gen#1")})


def test_name_clash_of_nodes_and_of_models():
    def declare():
        actor, samples = actor_and_samples()
        first = ops.reward(exact, samples, name="score")
        second = ops.reward(exact, samples, name="score").rename(other="reward")
        other = rf.Model("actor", "another/model")
        ref = ops.log_probs(other, samples)
        adv = ops.advantage("grpo", samples, first)
        ops.metrics(second)
        ops.update(actor, samples, adv, ref, loss=rf.PolicyLoss())

    found = [f for f in findings(declare) if f.code == "E105"]

    assert ["two nodes are named 'score'", "two models are named 'actor'"] == [
        f.what for f in found
    ]


def test_a_field_offered_twice():
    def declare():
        actor, samples = actor_and_samples()
        first, second = ops.reward(exact, samples), ops.reward(exact, samples)
        adv = ops.advantage("grpo", samples, first, second)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    assert "E106" in {f.code for f in findings(declare)}


def test_rows_that_do_not_belong_together():
    def declare():
        actor, samples = actor_and_samples()
        other = ops.rollout(actor, ops.prompts(DATA, batch=4), n=4, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(exact, other))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    assert "E108" in {f.code for f in findings(declare)}


def test_a_result_that_nobody_uses():
    def declare():
        actor, samples = actor_and_samples()
        ops.reward(exact, samples, name="unused")
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert ("E112", "nobody uses the result of node 'unused'") == (found.code, found.what)


def test_a_declined_result_is_no_finding():
    """kl_coef is 0: the update leaves the reference's log-probs unread, and says why."""

    def declare():
        actor, samples = actor_and_samples()
        ref = ops.log_probs(rf.Model("ref", "some/model"), samples)
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, ref, loss=rf.PolicyLoss())

    (declined,) = trace(declare).node("actor.update").declined

    assert ("ref.log_probs", "ref_log_probs") == (declined.source, declined.field)


def test_mini_batches_that_do_not_divide():
    def declare():
        actor, samples = actor_and_samples()
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss(), mini_batches=3)

    (found,) = findings(declare)

    assert ("E115", "mini_batches=2") == (found.code, found.fix)


def test_an_optimizer_without_update_and_an_update_without_optimizer():
    def declare():
        trained, samples = actor_and_samples()
        frozen = rf.Model("frozen", "some/model")
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(frozen, samples, adv, loss=rf.PolicyLoss())

    assert {"E113", "E114"} == {f.code for f in findings(declare)}


def test_a_value_loss_needs_a_value_head():
    def declare():
        actor, samples = actor_and_samples()
        values = ops.values(actor, samples)
        adv = ops.advantage("gae", samples, ops.reward(exact, samples), values)
        ops.update(actor, samples, values, adv, loss=rf.ValueLoss())

    assert {"E120"} == {f.code for f in findings(declare)}


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"n": 0}, "n=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"draft_rows": 0}, "draft_rows=0"),
        ({"draft_rows": 8}, "draft_rows=8 and no drafter"),
    ],
)
def test_options_out_of_range(options, got):
    def declare():
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        given = {"n": 4, "max_new_tokens": 8, **options}
        samples = ops.rollout(actor, ops.prompts(DATA, batch=4), **given)
        adv = ops.advantage("rloo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    assert f"a rollout with {got}" in {f.what for f in findings(declare)}


def test_an_op_outside_a_pipeline():
    with pytest.raises(GraphError, match=r"E101.*outside of a pipeline"):
        ops.prompts(DATA, batch=4)


def test_something_that_is_not_a_handle():
    def declare():
        actor, samples = actor_and_samples()
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples), 0.5)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert ("E102", "float: 0.5") == (found.code, found.got)


def test_an_empty_pipeline():
    (found,) = findings(lambda: None)

    assert "E111" == found.code


def test_a_cycle_is_printed_as_its_path():
    """A graph built by hand: b -> a -> b."""
    op = Op(name="x", body="m:f", inputs=(), outputs=(), per="row")

    def node(name, source):
        field = rf.ops.declare.PROMPTS.outputs[0]
        bound = Binding(name="prompt", source=source, field=field)
        return Node(name=name, op=op, inputs=(bound,))

    graph = Graph(name="g", nodes=(node("b", "a"), node("a", "b")), models=())
    found = [f for f in check_graph(graph) if f.code == "E107"]

    assert ["the graph has a cycle: a -> b -> a"] == [f.what for f in found]


def test_user_ops_take_fields_from_annotations():
    @rf.op(per="group")
    def judge(reward: rf.Row[float], length: rf.Row[int] | None, *, above: float = 0.5) -> Made:
        return {}

    inputs = {str(wanted) for wanted in judge.op.inputs}

    assert {"reward:float32[row]", "length?:int64[row]", "group:int64[row]"} == inputs
    assert ["good:bool[row]", "weight:float32[token|response_mask]"] == [
        str(made) for made in judge.op.outputs
    ]


def test_user_ops_without_field_types_are_refused():
    with pytest.raises(GraphError, match="parameter 'x' of op 'bad' has no field type"):

        @rf.op(per="row")
        def bad(x) -> rf.Row[float]:
            return x

    with pytest.raises(GraphError, match="result 'worse' of op 'worse' has no field type"):

        @rf.op(per="row")
        def worse(x: rf.Row[int]):
            return x


def test_rename_and_only_name_near_fields():
    def declare():
        actor, samples = actor_and_samples()
        adv = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples.only("respons_tokens"), samples, adv, loss=rf.PolicyLoss())

    (found,) = findings(declare)

    assert "response_tokens" in found.near


def test_nodes_are_numbered_where_the_user_gives_no_name():
    with tracing() as traced:
        actor, samples = actor_and_samples()
        ops.reward(exact, samples)
        ops.reward(exact, samples)

    assert ["prompts", "actor.rollout", "reward", "reward_2"] == list(traced.nodes)


def test_every_op_is_numbered_where_it_is_declared_again():
    """Those that declare several nodes too; E105 is for names that a user gave."""

    def declare():
        actor, samples = actor_and_samples()
        rewards = [ops.reward(exact, samples) for _ in range(2)]
        rewards += [ops.reward(exact, samples, on_error="drop_group") for _ in range(2)]
        for reward in rewards:
            ops.metrics(reward)
            adv = ops.advantage("grpo", samples, reward.only("reward"))
            ops.update(actor, samples, adv, loss=rf.PolicyLoss())
        for _ in range(2):
            ops.evaluate(actor, DATA, exact, every=1, max_new_tokens=4)

        def more():
            more = ops.rollout(actor, ops.prompts(DATA, batch=4), n=4, max_new_tokens=8)
            scored = ops.reward(exact, more)
            return more, ops.informative(more, scored)

        for _ in range(2):
            ops.repeat(more, until="informative", groups=2, at_most=2)

    assert [] == [found for found in findings(declare) if found.code == "E105"]


def test_an_unknown_op_names_near_ones_beside_earlier_findings():
    def declare():
        actor, samples = actor_and_samples()
        ops.advantage("grpo", samples)
        ops.updat(actor, samples, loss=rf.PolicyLoss())

    found = findings(declare)

    assert ["E103", "E121"] == [f.code for f in found]
    assert "ops.update(...)" == found[-1].fix
    assert not hasattr(ops, "__nothing__")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("prompts", NodeName("prompts")),
        ("prompts", NodeName("prompts", (0, 0))),
        ("prompts#3", NodeName("prompts", (2,))),
        ("actor.rollout#1.2", NodeName("actor.rollout", (0, 1))),
    ],
)
def test_a_name_says_of_which_trips_a_node_is_the_copy(written, name):
    """A node of first trips only keeps the name that was declared."""
    assert str(name) == written
    found = NodeName.parse(written)
    assert found.declared == name.declared
    assert found.trips == (name.trips if any(name.trips) else ())
