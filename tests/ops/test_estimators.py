"""Estimators as they are declared: what they read, how they may be cut, what is refused."""

from __future__ import annotations

import inspect
import math
import pkgutil

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError
from rlflow.ops.estimator_options import CHOICES, RANGES, RewardWeights, checked_options
from rlflow.ops.estimators import ESTIMATORS, granularity, needed_inputs

DATA = rf.data.arithmetic(digits=2)
REQUIRED = {"gdpo": {"rewards": {"correct": 1.0, "short": 0.5}}}
EVERY = pytest.mark.parametrize("name", ESTIMATORS)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def refused(name, **options):
    """The finding of a call that has exactly one."""
    _, findings = checked_options(ESTIMATORS[name], {**REQUIRED.get(name, {}), **options}, None)
    (finding,) = findings
    return finding


def accepted(name, **options):
    good, findings = checked_options(ESTIMATORS[name], {**REQUIRED.get(name, {}), **options}, None)
    assert [] == findings
    return good


def reads(name, **options):
    return [wanted.name for wanted in needed_inputs(ESTIMATORS[name], accepted(name, **options))]


# --- the table ------------------------------------------------------------------------------


def test_the_estimators_there_are():
    assert [
        "gae",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce++",
        "reinforce++-baseline",
        "remax",
        "opo",
        "gpg",
        "pass@k",
        "gdpo",
        "otb",
    ] == list(ESTIMATORS)


@EVERY
def test_every_option_is_known_and_its_default_is_one_it_may_take(name):
    estimator = ESTIMATORS[name]
    free = {"rewards", "reward_clip_range"}
    assert set(estimator.options) - free <= {*CHOICES, *RANGES}
    for option, default in estimator.options.items():
        if option not in (*free, "kl") and option not in estimator.only_with:
            assert {option: default}.items() <= accepted(name, **{option: default}).items()
    assert {*estimator.batch_if, *estimator.only_with, *estimator.reads_if} <= set(
        estimator.options
    )
    assert estimator.source


@pytest.mark.torch
@EVERY
def test_defaults_are_those_of_the_formula(name):
    """The body passes on what is given only, so both must say the same."""
    from rlflow.ops.math.advantages import group, token

    estimator = ESTIMATORS[name]
    body = pkgutil.resolve_name(estimator.body)
    written = {**vars(group), **vars(token)}
    formula = inspect.signature(written[body.__name__]).parameters
    named_alike = {"bootstrap", "rewards"}
    for option, default in estimator.options.items():
        if option in formula and option not in named_alike:
            assert default == formula[option].default


# --- what they read and how they may be cut -------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gae", {}, ["reward", "values", "response_mask"]),
        ("gae", {"bootstrap": True}, ["reward", "values", "response_mask", "finished"]),
        ("remax", {}, ["reward", "baseline", "response_mask"]),
        ("opo", {}, ["reward", "group", "response_mask"]),
        ("gpg", {}, ["reward", "group"]),
        ("gdpo", {}, ["correct", "short", "group"]),
        ("gdpo", {"over": "tokens"}, ["correct", "short", "group", "response_mask"]),
        ("otb", {}, ["reward", "group", "response_mask", "old_log_probs", "sum_pi_squared"]),
        (
            "dr_grpo",
            {"kl_coef": 0.1},
            ["reward", "group", "ref_log_probs", "rollout_log_probs", "response_mask"],
        ),
    ],
)
def test_what_an_estimator_reads(name, options, expected):
    assert expected == reads(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "per"),
    [
        ("gae", {}, "batch"),
        ("gae", {"whiten": False}, "row"),
        ("reinforce++", {"whiten": False}, "row"),
        ("reinforce++-baseline", {}, "batch"),
        ("reinforce++-baseline", {"whiten": False}, "group"),
        ("remax", {}, "row"),
        ("grpo", {}, "group"),
        ("grpo", {"scale": "batch"}, "batch"),
        ("grpo", {"scale": "none"}, "group"),
        ("dr_grpo", {}, "group"),
        ("rloo", {}, "group"),
        ("rloo", {"whiten": True}, "batch"),
        ("opo", {}, "group"),
        ("gpg", {}, "batch"),
        ("gpg", {"alpha": "none"}, "group"),
        ("gpg", {"alpha": "none", "scale": "batch"}, "batch"),
        ("pass@k", {}, "group"),
        ("pass@k", {"scale": "batch"}, "batch"),
        ("gdpo", {}, "batch"),
        ("gdpo", {"whiten": False}, "group"),
        ("gdpo", {"whiten": False, "scale": "batch"}, "batch"),
        ("otb", {}, "group"),
    ],
)
def test_how_an_estimator_may_be_cut(name, options, per):
    assert per == granularity(ESTIMATORS[name], accepted(name, **options))


# --- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("grpo", {"std_eps": 1e-4, "scale": "none"}, "std_eps= does nothing with scale='none'"),
        ("gpg", {"std_eps": 1e-4}, "std_eps= does nothing with scale='none'"),
        ("rloo", {"std_eps": 1e-4}, "std_eps= does nothing with whiten=False"),
        (
            "gdpo",
            {"std_eps": 1e-4, "scale": "none", "over": "tokens"},
            "std_eps= does nothing with scale='none', whiten=True, over='tokens'",
        ),
        ("gdpo", {"over": "rows", "whiten": False}, "over= does nothing with whiten=False"),
        (
            "reinforce++-baseline",
            {"over": "rows", "whiten": False},
            "over= does nothing with whiten=False",
        ),
        ("opo", {"kl": "k3"}, "kl= does nothing while kl_coef is 0"),
        ("dr_grpo", {"scale": "group"}, "estimator 'dr_grpo' has no option 'scale'"),
        ("gdpo", {"kl_coef": 0.1}, "estimator 'gdpo' has no option 'kl_coef'"),
    ],
)
def test_an_option_that_would_do_nothing(name, options, what):
    finding = refused(name, **options)
    assert "E117" == finding.code
    assert what in finding.what


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpg", {"std_eps": 1e-4, "scale": "group"}),
        ("rloo", {"std_eps": 1e-6, "whiten": True}),
        ("gdpo", {"std_eps": 1e-4, "scale": "none"}),
        ("gdpo", {"std_eps": 1e-4, "over": "tokens"}),
        ("opo", {"kl": "k3", "kl_coef": 0.1}),
        ("gae", {"gamma": 0, "lam": 1}),
    ],
)
def test_an_option_that_does_something(name, options):
    assert options.items() <= accepted(name, **options).items()


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"scale": "gruop"}, "'group', 'batch', 'none'"),
        ("grpo", {"single": "mean"}, "'zero', 'reward'"),
        ("gae", {"whiten": 1}, "True, False"),
        ("gae", {"gamma": 1.5}, "a number from 0 to 1"),
        ("gae", {"lam": math.nan}, "a number from 0 to 1"),
        ("gae", {"lam": True}, "a number from 0 to 1"),
        ("grpo", {"std_eps": -1e-6}, "a number from 0 on"),
        ("grpo", {"std_eps": "1e-6"}, "a number from 0 on"),
        ("opo", {"kl_coef": math.inf}, "a number from 0 on"),
        ("opo", {"kl_coef": 0.1, "kl": "k3+"}, "'k1', 'k2', 'k3', 'abs'"),
        ("gpg", {"alpha": 2.0}, "'degenerate', 'zero_reward', 'none'"),
    ],
)
def test_a_value_that_an_option_cannot_take(name, options, expected):
    finding = refused(name, **options)
    assert "E118" == finding.code
    assert finding.expected.startswith(expected)


@pytest.mark.parametrize(
    ("rewards", "code"),
    [
        (None, "E117"),
        ({}, "E118"),
        (["correct"], "E118"),
        ({"correct": "1"}, "E118"),
        ({"correct": math.inf}, "E118"),
        ({1: 1.0}, "E118"),
        ({"correct": 1.0, "short": 0.0}, "E117"),
    ],
)
def test_rewards_that_cannot_be_weighed(rewards, code):
    finding = refused("gdpo", rewards=rewards)
    assert code == finding.code
    assert "reward" in finding.what


def test_reward_weights_are_a_mapping_that_prints_in_one_line():
    weights = accepted("gdpo")["rewards"]
    assert RewardWeights(weights=(("correct", 1.0), ("short", 0.5))) == weights
    assert {"correct": 1.0, "short": 0.5} == dict(weights)
    assert (2, ["correct", "short"], 0.5) == (len(weights), list(weights), weights["short"])
    assert "{correct: 1, short: 0.5}" == weights.describe()


# --- in a pipeline --------------------------------------------------------------------------


def declared(declare):
    """The graph of a pipeline that trains on what `declare(samples, reward)` returns."""

    def run(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        samples = ops.rollout(actor, ops.prompts(DATA, batch=4), n=4, max_new_tokens=8)
        adv = declare(samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    return rf.pipeline()(run).trace(rf.Config())


def short(response: str) -> float:
    return -float(len(response))


def test_gdpo_reads_its_rewards_under_the_names_they_are_given():
    def declare(samples, reward):
        brief = ops.reward(short, samples, name="brief")
        return ops.advantage(
            "gdpo",
            samples,
            reward.rename(correct="reward"),
            brief.rename(short="reward"),
            rewards={"correct": 1, "short": 0.5},
        )

    graph = declared(declare)
    node = graph.node("advantage")
    assert {"correct": "reward", "short": "brief", "group": "actor.rollout"} == {
        bound.name: bound.source for bound in node.inputs
    }
    assert ("batch", ()) == (node.op.per, node.declined)
    (printed,) = [n["params"] for n in graph.to_json()["nodes"] if n["name"] == "advantage"]
    assert {"kind": "gdpo", "rewards": "{correct: 1, short: 0.5}"} == printed


def test_gdpo_without_a_reward_says_how_to_name_one():
    with pytest.raises(GraphError) as caught:
        declared(lambda samples, reward: ops.advantage("gdpo", samples, rewards={"correct": 1}))
    found = {finding.code: finding for finding in caught.value.findings}
    assert "node 'advantage' has no input 'correct'" == found["E103"].what
    assert 'reward.rename(correct="reward")' == found["E103"].fix


def test_remax_says_how_to_name_its_baseline():
    with pytest.raises(GraphError) as caught:
        declared(lambda samples, reward: ops.advantage("remax", samples, reward))
    (finding,) = caught.value.findings
    assert "node 'advantage' has no input 'baseline'" == finding.what
    assert 'greedy_reward.rename(baseline="reward")' == finding.fix


def test_a_bootstrap_binds_the_rollouts_finished():
    def run(cfg: rf.Config) -> None:
        critic = rf.Model("critic", "some/model", head="value", optimizer=rf.AdamW(lr=1e-3))
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        samples = ops.rollout(actor, ops.prompts(DATA, batch=4), max_new_tokens=8)
        values, reward = ops.values(critic, samples), ops.reward(exact, samples)
        adv = ops.advantage("gae", samples, reward, values, bootstrap=True, whiten=False)
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())
        ops.update(critic, samples, adv, values, loss=rf.ValueLoss())

    node = rf.pipeline()(run).trace(rf.Config()).node("advantage")
    assert "actor.rollout" == {bound.name: bound.source for bound in node.inputs}["finished"]
    assert "row" == node.op.per


def test_a_group_estimator_that_works_on_the_batch_refuses_groups_of_one_too():
    def run(cfg: rf.Config) -> None:
        actor = rf.Model("actor", "some/model", optimizer=rf.AdamW(lr=1e-3))
        samples = ops.rollout(actor, ops.prompts(DATA, batch=4), max_new_tokens=8)
        adv = ops.advantage("gpg", samples, ops.reward(exact, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss())

    with pytest.raises(GraphError) as caught:
        rf.pipeline()(run).trace(rf.Config())
    assert ["E110"] == [finding.code for finding in caught.value.findings]
