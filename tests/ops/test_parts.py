"""Bodies on parts of a batch: together they do what one does that has all of it.

Ranks are threads here, and really meet in their sums and unions.
"""

from __future__ import annotations

import itertools
import json
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import rlflow as rf
from rlflow.batch import (
    flat,
    lengths,
    make_batch,
    ragged_rows,
    select_rows,
    split_rows,
    strings,
    text,
)
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import DataError, RewardError, RunError
from rlflow.graph.fields import row, token
from rlflow.ops.bodies import advantage, data, forward, metrics, reward, rollout, update
from rlflow.ops.bodies.steps.selection import numbered, selected
from rlflow.ops.bodies.user import call as user
from rlflow.ops.math.aggregate import Totals
from rlflow.ops.models import EVALUATE, UPDATE
from rlflow.runtime.execute.stats import join_metrics
from tests.budget import examples
from tests.conftest import TINY
from tests.ops.calls import generated
from tests.ops.parts import (
    FEW,
    Trainee,
    call_of,
    copied,
    in_parts,
    nearly,
    require_equal,
    same_fields,
    samples,
    split_batches,
)

pytestmark = pytest.mark.torch


# --- rows by themselves ---------------------------------------------------------------------


@FEW
@given(split_batches(whole_groups=False), st.booleans())
def test_rewards_and_their_statistics(case, batched):
    batch, parts = case

    def count(response, bonus):
        if batched:
            assert len(response) > 0
            return [len(one) + bonus for one in response]
        return len(response) + bonus

    params = {"function": count, "batched": batched, "bonus": 0.25}

    require_equal(reward.reward, call_of(batch, params), parts)


class Scorer:
    """A model whose scores are sums of token numbers."""

    def forward(self, batch, *, outputs, temperature):
        (name,) = outputs
        assert len(batch) == len(lengths(batch["prompt_tokens"]))
        return {name: flat(batch["response_tokens"]).float() / 7 / temperature}


@FEW
@given(split_batches(whole_groups=False))
def test_scores_of_a_model(case):
    batch, parts = case
    call = call_of(batch, {"temperature": 0.5}, Scorer(), outputs=(token("ref_log_probs"),))

    require_equal(forward.log_probs, call, parts)
    require_equal(forward.values, call, parts)


@FEW
@given(split_batches(whole_groups=False))
def test_numbers_of_fields(case):
    batch, parts = case
    inputs = batch.select("reward", "values", "response_mask", "row")

    require_equal(metrics.metrics, call_of(inputs), parts)


@FEW
@given(split_batches(whole_groups=False))
def test_written_responses_as_tokens(case):
    batch, parts = case
    inputs = batch.select("prompt")
    inputs["answer"] = text(str(number) for number in batch["row"].tolist())

    require_equal(data.tokenize, call_of(inputs, {"tokenizer": "", "response": "answer"}), parts)


@FEW
@given(split_batches(whole_groups=False))
def test_a_users_op_on_rows(case):
    batch, parts = case
    called = []

    def doubled(reward, values):
        called.append(len(reward))
        return {"twice": reward * 2, "same": values}

    outputs = (row("twice"), token("same"))

    require_equal(user.call, call_of(batch, outputs=outputs, function=doubled), parts)
    assert 0 not in called


def test_a_users_op_may_write_into_what_it_is_given():
    def spoilt(reward, values):
        reward -= 1
        flat(values).zero_()
        return reward

    call = call_of(samples([0, 0, 1]), outputs=(row("made"),), function=spoilt)
    before = copied(call.inputs)

    made = user.call(call).fields["made"]

    assert same_fields(before, copied(call.inputs))
    assert (before["reward"][0] - 1).tolist() == made.tolist()


# --- groups ---------------------------------------------------------------------------------


@pytest.mark.slow
@FEW
@given(split_batches())
def test_group_relative_advantages(case):
    batch, parts = case

    require_equal(advantage.grpo, call_of(batch), parts)
    require_equal(advantage.rloo, call_of(batch, {"single": "reward"}), parts)


@pytest.mark.slow
@FEW
@given(split_batches())
def test_group_relative_advantages_with_a_kl_in_the_reward(case):
    batch, parts = case
    call = call_of(batch, {"kl_coef": 0.1, "kl": "k3"})

    require_equal(advantage.grpo, call, parts, close=nearly)
    require_equal(advantage.rloo, call, parts, close=nearly)


@pytest.mark.slow
@FEW
@given(split_batches())
def test_token_advantages_of_rows_that_are_not_whitened(case):
    batch, parts = case
    params = {"whiten": False, "gamma": 0.9, "kl_coef": 0.1}
    call = call_of(batch, params, wanted=("advantages", "returns"))

    require_equal(advantage.gae, call, parts)
    require_equal(advantage.reinforce_pp, call, parts)


@FEW
@given(split_batches())
def test_a_users_op_on_groups(case):
    batch, parts = case
    call = call_of(
        batch,
        per="group",
        outputs=(row("made"),),
        function=lambda reward, group: reward - reward.mean(),
    )

    require_equal(user.call, call, parts)


# --- rollout and evaluation -----------------------------------------------------------------


class Speaker:
    """A model that answers a prompt with a number made of it and of the sample's number."""

    context = 64

    def __init__(self):
        self.tokenizer = load_tokenizer(str(TINY))
        self.drawn = []

    def generate(self, prompts, samples, *, n, **options):
        self.drawn += samples.tolist()
        first = [int(prompt.sum()) for prompt in split_rows(prompts) for _ in range(n)]
        said = [str(a * b % 997) for a, b in zip(first, samples.tolist(), strict=True)]
        rows = [self.tokenizer(one)["input_ids"] for one in said]
        finished = [a % 2 == 0 for a in samples.tolist()]
        return generated(rows, [[-len(r) / 3] * len(r) for r in rows], finished)


SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}
MADE = (
    "prompt_tokens",
    "response_tokens",
    "response_mask",
    "rollout_log_probs",
    "response",
    "finished",
    "group",
    "sample",
    "row",
)


@FEW
@given(split_batches(whole_groups=False), st.integers(1, 3))
def test_a_rollout_draws_the_same_samples(case, n):
    batch, parts = case
    model = Speaker()
    inputs = batch.select("prompt", "row")
    call = call_of(inputs, {"n": n, **SAMPLING}, model, wanted=MADE)

    require_equal(rollout.rollout, call, parts, factor=n)

    rows = len(inputs)
    assert list(range(3 * rows * n, 4 * rows * n)) == model.drawn[: rows * n]
    assert sorted(model.drawn[rows * n :]) == model.drawn[: rows * n]


def held_out(folder, rows):
    file = folder / f"{rows}.jsonl"
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i)}) for i in range(rows)]
    file.write_text("\n".join(lines))
    return rf.data.jsonl(str(file))


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_ranks_share_an_evaluation(tmp_path, rows, count, batched):
    def judge(response, answer):
        if batched:
            return [len(r) / 7 + int(a) for r, a in zip(response, answer, strict=True)]
        return len(response) / 7 + int(answer)

    params = {"data": held_out(tmp_path, rows), "limit": None, "batched": batched}
    whole = call_of(params=params | SAMPLING | {"function": judge}, model=Speaker())
    models = [Speaker() for _ in range(count)]

    expected = join_metrics([rollout.evaluate(whole).metrics])
    made = in_parts(rollout.evaluate, whole, [[]] * count, models)

    assert expected == pytest.approx(join_metrics([output.metrics for output in made]), rel=1e-12)
    assert list(range(rows)) == list(itertools.chain(*(model.drawn for model in models)))


def test_ops_whose_bodies_meet_are_split():
    assert ("split", "split") == (UPDATE.dispatched, EVALUATE.dispatched)


# --- update ---------------------------------------------------------------------------------


LOSSES = [
    rf.PolicyLoss("ppo_clip", kl_coef=0.1, entropy_coef=0.01, old="rollout"),
    rf.PolicyLoss("ppo_clip", aggregate="seq-mean-token-mean", old="recomputed"),
    rf.PolicyLoss("ppo_clip", aggregate="seq-mean-token-sum-norm", constant=8.0, old="current"),
    rf.PolicyLoss("clip_cov", cov_share=0.3, cov_range=(0.0, 50.0), old="recomputed"),
    rf.PolicyLoss("kl_cov", cov_share=0.3, off_policy_limit=0.2, old="rollout"),
    rf.PolicyLoss("gspo_token", top_entropy=0.5, aggregate="token-mean", old="recomputed"),
    rf.ValueLoss(clip=0.2),
    rf.SFTLoss(aggregate="seq-mean-token-sum"),
]


def params_of(spec, epochs=1, mini_batches=1):
    old = getattr(spec, "old", "current")
    options = {"loss": spec, "epochs": epochs, "mini_batches": mini_batches, "max_grad_norm": 1.0}
    return {**options, "old": old}


def updated(batch, parts, spec, epochs, mini_batches):
    """The steps of one part with all rows, and those of every part."""
    whole = call_of(batch, params_of(spec, epochs, mini_batches), Trainee())
    models = [Trainee() for _ in parts]
    expected = update.update(whole)
    made = in_parts(update.update, whole, parts, models)
    assert dict(expected.metrics) == join_metrics([output.metrics for output in made])
    return whole.model.steps, [model.steps for model in models]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(split_batches(), st.sampled_from(LOSSES), st.integers(1, 2), st.integers(1, 4))
def test_parts_make_the_steps_of_the_whole_together(case, spec, epochs, mini_batches):
    batch, parts = case

    whole, split = updated(batch, parts, spec, epochs, mini_batches)

    assert {len(whole)} == {len(steps) for steps in split}
    for number, (rows, grads, numbers) in enumerate(whole):
        for steps, part in zip(split, parts, strict=True):
            assert [one for one in rows if one in part] == steps[number][0]
        together = {key: value for steps in split for key, value in steps[number][1].items()}
        assert grads == together
        for name, value in numbers.items():
            shares = [float(steps[number][2][name]) for steps in split]
            joined = max(shares) if name.endswith("_max") else math.fsum(shares)
            assert float(value) == pytest.approx(joined, rel=1e-6, abs=1e-6), name


@pytest.mark.slow
@FEW
@given(split_batches(whole_groups=False), st.integers(1, 4))
def test_without_groups_rows_are_cut_by_their_numbers(case, mini_batches):
    batch, parts = case

    whole, split = updated(batch.exclude("group"), parts, rf.SFTLoss(), 2, mini_batches)

    for number, (rows, *_) in enumerate(whole):
        assert [[one for one in rows if one in part] for part in parts] == [
            steps[number][0] for steps in split
        ]


def test_a_part_without_a_row_of_a_mini_batch_makes_the_step_all_the_same():
    whole, split = updated(samples([0, 0, 1, 2]), [[0, 1], [2, 3], []], LOSSES[0], 1, 3)

    sizes = [[len(rows) for rows, *_ in steps] for steps in split]
    assert 3 == len(whole)
    assert [0, 0, 0] == sizes[2]
    assert sorted(sizes[0]) == [0, 0, 2]
    assert [len(rows) for rows, *_ in whole] == [sum(column) for column in zip(*sizes, strict=True)]


@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.describe())
def test_a_loss_of_no_rows_is_zero(spec):
    batch = numbered(spec, samples([0]), torch.arange(1))
    nothing = select_rows(selected(call_of(batch, model=Trainee()), spec, batch, 0), [])
    outputs = {name: torch.zeros(0, requires_grad=True) for name in spec.outputs()}

    loss, numbers = update.loss_function(spec, Totals(tokens=5.0, rows=2.0))(outputs, nothing)

    assert 0.0 == loss.item()
    assert {0.0} == {float(value) for value in numbers.values()}


# --- row numbers in messages ----------------------------------------------------------------


@pytest.mark.parametrize("batched", [False, True])
def test_a_sample_that_breaks_a_reward_is_named_by_its_number_in_the_batch(batched):
    def broken(response):
        return [math.nan for _ in response] if batched else math.nan

    call = call_of(samples([0] * 6), {"function": broken, "batched": batched})

    with pytest.raises(RewardError, match="on sample 4 of iteration 3"):
        in_parts(reward.reward, call, [[4, 5]])


def test_an_empty_response_is_named_by_its_number_in_the_batch():
    inputs = make_batch({"prompt": text("1111"), "answer": text(["1", "2", "3", ""])}, 4)
    call = call_of(inputs, {"tokenizer": "", "response": "answer"})

    with pytest.raises(DataError, match="an empty response in row 3"):
        in_parts(data.tokenize, call, [[2, 3]])


def test_a_prompt_that_is_too_long_is_named_by_its_number_in_the_batch():
    inputs = make_batch({"prompt": text(["1", "1", "1" * 60])}, 3)
    call = call_of(inputs, {"n": 1, **SAMPLING}, Speaker())

    with pytest.raises(RunError, match="new tokens, in row 2: '111"):
        in_parts(rollout.rollout, call, [[1, 2]])


def test_a_held_out_prompt_that_is_too_long_is_named_by_its_number(tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": "1" * size}) for size in (1, 1, 1, 60)]
    file.write_text("\n".join(lines))
    params = {"data": rf.data.jsonl(str(file)), "limit": None, "batched": False}
    call = call_of(params=params | SAMPLING | {"function": lambda response: 0.0}, model=Speaker())

    with pytest.raises(RunError, match="new tokens, in row 3: '111"):
        in_parts(rollout.evaluate, call, [[], []])


def test_text_of_no_rows_is_no_text():
    assert [] == rollout.as_texts(load_tokenizer(str(TINY)), ragged_rows([], torch.int64))
    assert [] == strings(text([]))
