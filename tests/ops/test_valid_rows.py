"""Samples without a reward: they are counted, and all that trains is as if they were not there."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import pkgutil
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import rlflow as rf
from rlflow.batch import (
    flat,
    is_ragged,
    lengths,
    make_batch,
    pad,
    ragged_rows,
    select_rows,
    split_rows,
    strings,
    text,
)
from rlflow.errors import RewardError
from rlflow.graph.fields import row, token
from rlflow.ops.bodies import missing_reward as valid
from rlflow.ops.bodies import pair, reward
from rlflow.ops.body import Output
from rlflow.ops.scoring import STRICT, Dispatch, Policy
from rlflow.rewards.bounds import Bounds
from rlflow.runtime.execute.stats import join_metrics
from tests.budget import examples
from tests.ops import calls

pytestmark = pytest.mark.torch


def call_of(inputs, params, *, outputs=(), model=None):
    wanted = [made.name for made in outputs]
    options = {"model": model, "wanted": wanted, "outputs": tuple(outputs), "per": "batch"}
    return calls.call_of(inputs, params, iteration=3, **options)


BODIES = "rlflow.ops.bodies"


# --- the reward op --------------------------------------------------------------------------


def scored(function, responses, *, groups=None, batched=False, policy=STRICT, **columns):
    fields = {"response": text(responses), **{k: text(v) for k, v in columns.items()}}
    if groups is not None:
        fields["group"] = torch.tensor(groups)
    params = {"function": function, "batched": batched, "policy": policy}
    return reward.reward(call_of(make_batch(fields, len(responses)), params))


def length(response):
    if response == "raise":
        raise ValueError("no")
    return {"nan": math.nan, "none": None, "text": "1"}.get(response, len(response))


async def slow(response):
    if response == "slow":
        await asyncio.Event().wait()
    return 1.0


DROP = Policy(on_error="drop_sample", max_failures=0.5)
DROP_GROUP = Policy(on_error="drop_group", max_failures=0.5)


def test_a_dropped_sample_has_no_number_and_says_why():
    made = scored(length, ["a", "raise", "bbb", "nan", "none", "text"], policy=DROP)
    assert [True, False, True, False, False, False] == made.fields["valid"].tolist()
    assert [1.0, None, 3.0, None, None, None] == [
        None if math.isnan(x) else x for x in made.fields["reward"].tolist()
    ]
    told = [json.loads(entry) if entry else None for entry in strings(made.fields["failure"])]
    assert [None, "raised", None, "not a number", "not a number", "not a number"] == [
        entry and entry["cause"] for entry in told
    ]
    assert "ValueError: no" == told[1]["problem"]
    expected = {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert expected == join_metrics([made.metrics])


def test_a_group_goes_with_its_sample():
    responses, groups = ["a", "nan", "b", "c", "d"], [7, 4, 4, 7, 9]
    made = scored(length, responses, groups=groups, policy=DROP_GROUP)
    assert [True, False, False, True, True] == made.fields["valid"].tolist()
    assert ["", "not a number", "", "", ""] == [
        json.loads(entry)["cause"] if entry else "" for entry in strings(made.fields["failure"])
    ]


def test_a_judge_that_times_out_is_dropped_and_repeats_are_counted():
    policy = dataclasses.replace(DROP, bounds=Bounds(timeout=0.05, retries=1, backoff=0.0))
    made = scored(slow, ["x", "slow", "y"], policy=policy)
    assert [True, False, True] == made.fields["valid"].tolist()
    assert 1 / 3 == pytest.approx(join_metrics([made.metrics])["retries"])


def test_or_ends_the_run_with_its_sample():
    with pytest.raises(RewardError) as caught:
        scored(slow, ["x", "slow", "y"], policy=Policy(bounds=Bounds(timeout=0.05)))
    assert "reward slow on sample 1 of iteration 3: no answer within 0.05 s" in str(caught.value)
    assert "response: 'slow'" in str(caught.value)


BROKEN = [lambda response: [1.0], lambda response: 3.0, lambda response: {}[1]]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_failure_of_a_whole_batch_is_one_of_every_row(broken):
    made = scored(broken, ["a", "b", "c"], batched=True, policy=DROP)
    assert [False] * 3 == made.fields["valid"].tolist()


def test_one_row_of_a_batch():
    made = scored(lambda response: [1.0, None, 2.0], ["a", "b", "c"], batched=True, policy=DROP)
    assert [True, False, True] == made.fields["valid"].tolist()


def test_rows_go_to_the_function_of_their_data_set():
    calls = []

    def whole(response, scale):
        calls.append(response)
        return [scale * len(each) for each in response]

    functions = {"b": whole, "a": lambda response: -len(response), "never": length}
    dispatch = Dispatch(functions, "data_source", frozenset({"b"}))
    fields = {
        "response": text(["1", "22", "333", "4444"]),
        "data_source": text(["a", "b", "a", "b"]),
    }
    params = {"function": dispatch, "batched": False, "scale": 10}
    made = reward.reward(call_of(make_batch(fields, 4), params))
    assert [-1.0, 20.0, -3.0, 40.0] == made.fields["reward"].tolist()
    assert [["22", "4444"]] == calls


@pytest.mark.parametrize("policy", [STRICT, DROP])
def test_an_unknown_data_set_is_an_error_whatever_the_policy(policy):
    dispatch = Dispatch({"gsm8k": length}, "data_source", frozenset())
    with pytest.raises(RewardError) as caught:
        scored(dispatch, ["a"], data_source=["gsm8"], policy=policy)
    assert ("E281", ("gsm8k",)) == (caught.value.findings[0].code, caught.value.findings[0].near)


# --- counting failures ----------------------------------------------------------------------


def watched(told, valid_rows, groups, most):
    entries = [json.dumps({"cause": c, "problem": f"{c}!"}) if c else "" for c in told]
    fields = {
        "valid": torch.tensor(valid_rows),
        "failure": text(entries),
        "prompt": text([f"prompt {n}" for n in range(len(told))]),
        "response": text([f"response {n}" for n in range(len(told))]),
        "sample": torch.arange(len(told)) + 100,
        "group": torch.tensor(groups),
    }
    params = {"reward": "judge", "max_failures": most}
    return reward.failures(call_of(make_batch(fields, len(told)), params))


def test_failures_are_counted_by_cause():
    told = ["timeout", None, None, "raised", "timeout", None]
    keep = [False, True, False, False, False, False]
    made = watched(told, keep, [0, 0, 1, 1, 2, 2], 0.5)
    assert {
        "failed": 3.0,
        "dropped": 5.0,
        "dropped_groups": 2.0,
        "timeout": 2.0,
        "raised": 1.0,
        "not_a_number": 0.0,
        "lost": 0.0,
    } == dict(made.metrics)


@pytest.mark.parametrize(
    ("failed", "most", "stops"), [(1, 0.25, False), (2, 0.25, True), (1, 0.0, True)]
)
def test_the_run_stops_above_the_threshold(failed, most, stops):
    told = ["timeout"] * failed + [None] * (4 - failed)
    keep = [not cause for cause in told]
    if stops:
        with pytest.raises(RewardError, match="E288"):
            watched(told, keep, [0] * 4, most)
    else:
        assert failed == watched(told, keep, [0] * 4, most).metrics["failed"]


def test_the_error_names_the_samples():
    with pytest.raises(RewardError) as caught:
        watched(["timeout", None, "raised", "lost", "raised"], [False] * 5, [0] * 5, 0.1)
    (finding,) = caught.value.findings
    assert "judge: 4 of 5 samples of iteration 3 have no reward" == finding.what
    assert (
        "sample 100: timeout!\n  prompt: 'prompt 0'\n  response: 'response 0'\n"
        "sample 102: raised!\n  prompt: 'prompt 2'\n  response: 'response 2'\n"
        "sample 103: lost!\n  prompt: 'prompt 3'\n  response: 'response 3'\n"
        "and samples 104"
    ) == finding.got
    assert "at most the share max_failures=0.1 of them" == finding.expected


# --- what trains ----------------------------------------------------------------------------


class Trainee:
    """Computes each step's gradient of rows from their numbers, and notes them."""

    learning_rate = 0.5

    def __init__(self):
        self.steps = []

    def step(self, mini, loss, *, outputs, temperature, max_grad_norm):
        made = {
            name: (flat(mini["response_tokens"]).double() / -7).requires_grad_() for name in outputs
        }
        value, _ = loss(made, mini)
        value.backward()
        grads = {name: pad(x.grad, lengths(mini["response_tokens"])) for name, x in made.items()}
        self.steps.append((float(value.detach()), mini["row"].tolist(), grads))
        return SimpleNamespace(metrics={"loss": float(value.detach())}, grad_norm=1.0, applied=True)


@st.composite
def batches(draw):
    """Rows in groups, of which at least one is valid; the others hold NaN and infinities."""
    count = draw(st.integers(1, 10))
    groups = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    keep = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count))
    values = [
        [0.1 * (n + 1) * (t + 1) if ok else math.inf for t in range(size)]
        for n, (size, ok) in enumerate(zip(sizes, keep, strict=True))
    ]
    fields = {
        "response_tokens": ragged_rows([list(range(3, 3 + s)) for s in sizes], torch.int64),
        "response_mask": ragged_rows([[True] * s for s in sizes], torch.bool),
        "values": ragged_rows(values, torch.float32),
        "rollout_log_probs": ragged_rows([[-x for x in each] for each in values], torch.float32),
        "reward": torch.tensor(
            [r if ok else math.nan for r, ok in zip(rewards, keep, strict=True)]
        ),
        "advantages": torch.tensor([float(n) if ok else math.nan for n, ok in enumerate(keep)]),
        "group": torch.tensor(groups),
        "row": torch.arange(count),
        "valid": torch.tensor(keep),
    }
    return make_batch(fields, count)


def on_all(batch, body, params, *, outputs=(), model=None):
    """The body on all rows with `valid`, and on the valid rows alone."""
    outputs = (*outputs, row("valid", "bool")) if outputs else ()
    call = call_of(batch, {**params, "body": f"{BODIES}.{body}"}, outputs=outputs, model=model)
    return valid.of_valid_rows(call)


def on_valid(batch, body, params, *, outputs=(), model=None):
    kept = batch["valid"].nonzero().flatten()
    alone = select_rows(batch.exclude("valid"), kept)
    call = call_of(alone, params, outputs=outputs, model=model)
    call = dataclasses.replace(call, rows=kept, total=len(batch))
    return pkgutil.resolve_name(f"{BODIES}.{body}")(call)


ESTIMATORS = [
    ("advantage:grpo", {"kind": "grpo"}, (row("advantages"),)),
    ("advantage:rloo", {"kind": "rloo"}, (row("advantages"),)),
    ("advantage:gae", {"kind": "gae"}, (token("advantages"), token("returns"))),
    ("advantage:reinforce_pp", {"kind": "reinforce++"}, (token("advantages"), token("returns"))),
]


@settings(max_examples=examples(25))
@given(batches(), st.sampled_from(ESTIMATORS))
def test_an_estimator_sees_valid_rows_only_and_gives_the_others_0(batch, estimator):
    body, params, outputs = estimator
    made, alone = (
        on_all(batch, body, params, outputs=outputs),
        on_valid(batch, body, params, outputs=outputs),
    )
    assert len(batch) == made.rows
    assert torch.equal(batch["valid"], made.fields["valid"])
    assert dict(alone.metrics) == dict(made.metrics)
    for name, field in alone.fields.items():
        whole = made.fields[name]
        rows = split_rows(whole) if is_ragged(whole) else list(whole)
        expected = iter(split_rows(field) if is_ragged(field) else list(field))
        for place, ok in enumerate(batch["valid"].tolist()):
            assert torch.equal(rows[place], next(expected) if ok else torch.zeros_like(rows[place]))
        if is_ragged(whole):
            assert torch.equal(lengths(batch["response_mask"]), lengths(whole))


LOSSES = [
    rf.PolicyLoss("ppo_clip", old="rollout"),
    rf.PolicyLoss("ppo_clip", aggregate="seq-mean-token-mean", old="rollout"),
    rf.PolicyLoss("ppo_clip", aggregate="seq-mean-token-sum-norm", constant=8.0, old="current"),
    rf.SFTLoss(aggregate="seq-mean-token-sum"),
]


@settings(max_examples=examples(25))
@given(batches(), st.sampled_from(LOSSES), st.integers(1, 3))
def test_an_update_is_that_of_the_valid_rows_alone(batch, spec, mini_batches):
    params = {"loss": spec, "epochs": 2, "mini_batches": mini_batches, "max_grad_norm": 1.0}
    params["old"] = getattr(spec, "old", "current")
    one, other = Trainee(), Trainee()
    made = on_all(batch, "update:update", params, model=one)
    alone = on_valid(batch, "update:update", params, model=other)
    assert dict(alone.metrics) == dict(made.metrics)
    assert len(other.steps) == len(one.steps)
    for (loss, rows, grads), (loss2, rows2, grads2) in zip(one.steps, other.steps, strict=True):
        assert (loss, rows) == (loss2, rows2)
        assert math.isfinite(loss)
        assert all(torch.equal(grads[name], grads2[name]) for name in grads)


def test_a_pair_is_made_of_valid_rows():
    fields = {
        "reward": torch.tensor([0.0, math.nan, 1.0, 0.5, math.nan, 0.2]),
        "group": torch.tensor([0, 0, 0, 0, 1, 1]),
        "response_mask": ragged_rows([[True]] * 6, torch.bool),
        "valid": torch.tensor([True, False, True, True, False, True]),
    }
    outputs = (row("pair", "int64"), row("chosen", "bool"), row("pair_margin"))
    made = on_all(make_batch(fields, 6), "pair:pair", {}, outputs=outputs)
    assert [0, -1, 0, -1, -1, -1] == made.fields["pair"].tolist()
    assert [False, False, True, False, False, False] == made.fields["chosen"].tolist()
    assert pair.pair is not None


def test_rows_must_be_valid_in_every_field():
    fields = {
        "reward": torch.tensor([0.0, 1.0, 1.0]),
        "group": torch.tensor([0, 0, 0]),
        "valid": torch.tensor([True, True, False]),
        "valid_2": torch.tensor([False, True, True]),
    }
    params = {"kind": "grpo"}
    made = on_all(make_batch(fields, 3), "advantage:grpo", params, outputs=(row("advantages"),))
    assert [False, True, False] == made.fields["valid"].tolist()
    assert [0.0, 0.0, 0.0] == made.fields["advantages"].tolist()


SEEN = []


def spy(call):
    SEEN.append(call)
    return Output()


def test_the_rows_of_a_part_keep_their_numbers():
    fields = {"reward": torch.arange(3.0), "valid": torch.tensor([True, False, True])}
    params = {"body": f"{__name__}:spy"}
    call = call_of(make_batch(fields, 3), params)
    valid.of_valid_rows(call)
    valid.of_valid_rows(dataclasses.replace(call, rows=torch.tensor([7, 2, 4]), total=9))
    whole, part = SEEN
    assert ([0, 2], 3) == (whole.rows.tolist(), whole.total)
    assert ([7, 4], 9) == (part.rows.tolist(), part.total)
    assert ["reward"] == list(part.inputs.keys())
