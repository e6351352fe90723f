"""Pairs, slopes and scores with small models: rows, parts, and a mini-batch in micro-batches."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlflow.batch import flat, lengths, make_batch, ragged, select_rows, split_rows
from rlflow.graph.fields import row
from rlflow.ops.bodies import pair as bodies
from rlflow.ops.bodies import update
from rlflow.ops.bodies.steps.batchwise import prepared, scored
from rlflow.ops.body import Output
from rlflow.ops.losses.preference import DPOLoss, RewardModelLoss
from rlflow.ops.math.losses.batchwise import SHARES, SLOPES
from rlflow.runtime.execute.stats import join_metrics
from tests.ops.parts import FEW, call_of, in_parts, require_equal, samples, split_batches

pytestmark = pytest.mark.torch


class Scorer:
    """Outputs are numbers of a token's own; values come with the state before it."""

    def forward(self, batch, *, outputs, temperature):
        (name,) = outputs
        tokens = split_rows(batch["response_tokens"])
        prompts = split_rows(batch["prompt_tokens"])
        made = []
        for prompt, response in zip(prompts, tokens, strict=True):
            read = torch.cat([prompt[-1:], response[:-1]]) if name == "values" else response
            made.append(-((read * 37 % 11).double() + 1) / 7 / temperature)
        return {name: torch.cat(made) if made else torch.empty(0, dtype=torch.float64)}


def with_pairs(batch):
    """The batch with the pairs of its groups."""
    made = bodies.pair(call_of(batch)).fields
    return make_batch({**dict(batch.items()), **made}, len(batch))


@FEW
@given(split_batches())
def test_pairs_of_groups_wherever_they_are(case):
    batch, parts = case
    inputs = batch.select("reward", "group", "response_mask")
    inputs["sample"] = batch["row"]
    require_equal(bodies.pair, call_of(inputs), parts)


def test_pairs_and_what_is_counted_of_them():
    batch = samples([0, 0, 1, 1, 2, 2, 2, 3, 4, 4])
    sizes = lengths(batch["response_mask"])
    mask = ragged(torch.ones(int(sizes.sum()), dtype=torch.bool), sizes)
    flat(mask)[: int(sizes[0])] = False
    batch["response_mask"] = mask
    batch["reward"] = torch.tensor([9.0, 1.0, 1.0, 1.0, 2.0, 0.0, 3.0, 1.0, 0.0, 1.0])
    batch["finished"] = torch.tensor([True] * 4 + [True, False, False, True, False, False])

    made = bodies.pair(call_of(batch))

    assert [-1, -1, -1, -1, -1, 20, 20, -1, 40, 40] == made.fields["pair"].tolist()
    assert [6, 9] == torch.nonzero(made.fields["chosen"])[:, 0].tolist()
    assert [0, 0, 0, 0, 0, 3, 3, 0, 1, 1] == made.fields["pair_margin"].tolist()
    assert {
        "pairs": 0.4,
        "ties": 0.2,
        "invalid": 0.0,
        "single": 0.4,
        "margin": 2.0,
    } == join_metrics([made.metrics])

    ended = bodies.pair(call_of(batch, {"require_eos": True}))
    assert [-1] * 4 + [20, 20, -1, -1, -1, -1] == ended.fields["pair"].tolist()
    assert 0.2 == join_metrics([ended.metrics])["invalid"]

    fined = bodies.pair(call_of(batch, {"missing_eos_penalty": 2.0}))
    assert [-1] * 4 + [20, 20, -1, -1, 40, 40] == fined.fields["pair"].tolist()
    assert [4, 9] == torch.nonzero(fined.fields["chosen"])[:, 0].tolist()
    assert 4.0 == fined.fields["pair_margin"][4]


def test_of_equal_samples_the_first_is_taken_in_any_order_of_rows():
    batch = samples([0, 0, 0])
    sizes = lengths(batch["response_mask"])
    batch["response_mask"] = ragged(torch.ones(int(sizes.sum()), dtype=torch.bool), sizes)
    batch["reward"] = torch.tensor([1.0, 1.0, 0.0])
    batch["sample"] = torch.tensor([8, 6, 7])
    assert [False, True, False] == bodies.pair(call_of(batch)).fields["chosen"].tolist()


def test_a_score_is_read_after_the_last_token():
    batch = samples([0, 1, 1])
    made = bodies.scores(call_of(batch, model=Scorer(), outputs=(row("score"),)))
    last = [int(tokens[-1]) for tokens in split_rows(batch["response_tokens"])]
    assert [-((token * 37 % 11) + 1) / 7 for token in last] == pytest.approx(
        made.fields["score"].tolist()
    )
    assert torch.float32 == made.fields["score"].dtype


@FEW
@given(split_batches(whole_groups=False))
def test_scores_wherever_rows_are(case):
    batch, parts = case
    call = call_of(batch, model=Scorer(), outputs=(row("score"),))
    require_equal(bodies.scores, call, parts)


def test_rows_to_score_are_one_token_longer():
    batch = samples([0, 1])
    longer = split_rows(scored(batch)["response_tokens"])
    for short, long in zip(split_rows(batch["response_tokens"]), longer, strict=True):
        assert short.tolist() == long[:-1].tolist()


SPECS = [
    DPOLoss(),
    DPOLoss("aot", sft_coef=0.5),
    DPOLoss("ipo", length="mean", ld_alpha=0.5),
    RewardModelLoss(margin_coef=0.5, center_coef=0.1),
    RewardModelLoss("regression"),
]


@FEW
@given(split_batches(), st.sampled_from(SPECS))
def test_slopes_are_those_of_all_parts_together(case, spec):
    batch, parts = case
    batch = with_pairs(batch)

    def body(call):
        made = prepared(call, spec, call.inputs)
        fields = {name: made[name] for name in (SLOPES, SHARES)}
        return Output(fields={**fields, "group": kept(call.inputs)}, rows=len(made))

    def kept(inputs):
        paired = getattr(spec, "kind", "") not in ("regression", "logistic")
        return inputs["row"][inputs["pair"] >= 0] if paired else inputs["row"]

    whole = call_of(batch, {"temperature": 0.5}, Scorer())
    expected = rows_of(body(whole))
    made = [rows_of(output) for output in in_parts(body, whole, parts)]
    assert expected == pytest.approx({k: v for part in made for k, v in part.items()}, rel=1e-12)


def rows_of(output):
    """Slopes and shares by row of the whole batch, in one list."""
    slopes, shares = split_rows(output.fields[SLOPES]), output.fields[SHARES]
    return {
        (name, place): number
        for index, name in enumerate(output.fields["group"].tolist())
        for place, number in enumerate([*slopes[index].tolist(), *shares[index].tolist()])
    }


class Trainable(Scorer):
    """Makes steps of one weight that scales its outputs, in micro-batches of some rows."""

    version, learning_rate = 0, 0.1

    def __init__(self, rows):
        self.rows, self.weight, self.seen = rows, 1.0, []

    def forward(self, batch, *, outputs, temperature):
        made = super().forward(batch, outputs=outputs, temperature=temperature)
        return {name: values * self.weight for name, values in made.items()}

    def step(self, batch, loss, *, outputs, temperature, max_grad_norm):
        weight = torch.tensor(self.weight, dtype=torch.float64, requires_grad=True)
        total, metrics = 0.0, {}
        for rows in torch.arange(len(batch)).split(self.rows):
            micro = select_rows(batch, rows)
            made = Scorer.forward(self, micro, outputs=outputs, temperature=temperature)
            value, found = loss({name: x * weight for name, x in made.items()}, micro)
            total = total + value
            for name, number in {"loss": value, **found}.items():
                metrics[name] = metrics.get(name, 0.0) + number.item()
        if torch.is_tensor(total):
            total.backward()
            self.weight -= 0.1 * weight.grad.item()
        self.seen.append(len(batch))
        return Stepped(metrics, 0.0 if weight.grad is None else weight.grad.item())


class Stepped:
    """A step that was made."""

    applied = True

    def __init__(self, metrics, grad_norm):
        self.metrics, self.grad_norm = metrics, grad_norm


@pytest.mark.rows(4)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.describe())
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_is_the_same_in_micro_batches_of_any_size(spec, mini_batches):
    batch = with_pairs(samples([0, 0, 0, 1, 1, 2, 2, 3, 3], seed=4))
    batch["version"] = batch["response_tokens"] * 0
    params = {"loss": spec, "epochs": 2, "mini_batches": mini_batches, "max_grad_norm": None}
    params |= {"staleness": 9, "temperature": 0.5}
    results = []
    for rows in (1, 2, 100):
        model = Trainable(rows)
        made = update.update(call_of(batch, params, model))
        numbers = {k: v for k, v in made.metrics.items() if not k.startswith("staleness")}
        results.append({**numbers, "weight": model.weight})
    assert results[0] == pytest.approx(results[2], rel=1e-10)
    assert results[1] == pytest.approx(results[2], rel=1e-10)
    assert results[0]["weight"] != 1.0


def test_an_update_reads_only_rows_in_pairs():
    batch = with_pairs(samples([0, 0, 0, 0, 1, 2, 2], seed=1))
    model = Trainable(3)
    params = {"loss": DPOLoss(), "epochs": 1, "mini_batches": 1, "max_grad_norm": None}
    made = update.update(call_of(batch, params, model))
    pairs = int((batch["pair"] >= 0).sum()) // 2
    assert [2 * pairs] == model.seen
    assert pairs == made.metrics["pairs"]
    assert math.isfinite(made.metrics["loss"])


def test_an_update_without_a_pair_changes_nothing():
    batch = samples([0, 0, 1], seed=1)
    batch["reward"] = torch.zeros(3)
    model = Trainable(3)
    params = {"loss": DPOLoss(), "epochs": 1, "mini_batches": 1, "max_grad_norm": None}
    made = update.update(call_of(with_pairs(batch), params, model))
    assert (1.0, [0]) == (model.weight, model.seen)
    assert 0 == made.metrics["grad_norm"]
