"""Losses that join rows: any cut of a mini-batch has the gradient of the whole, to 1e-10.

rows       0 1 2 3 4 5 6 7      pairs (0, 5), (3, 1), (7, 4); rows 2 and 6 in none
no-grad pass -> a slope for every token -> each row trained by itself
parts of the rows, ranks with pairs of their own -> the same sums
"""

from __future__ import annotations

import pytest
import torch

from rlflow.ops.losses.preference import PREFERENCE_LOSSES, DPOLoss, RewardModelLoss
from rlflow.ops.math.aggregate import count
from rlflow.ops.math.losses.batchwise import (
    SHARES,
    SLOPES,
    batchwise_objective,
    preference_terms,
    score_pair_terms,
    score_terms,
)
from rlflow.ops.math.losses.preference import preference_loss
from rlflow.ops.math.pairs import pair_rows
from tests.ops.math.distributions import combine

pytestmark = pytest.mark.torch

LENGTHS = torch.tensor([5, 1, 3, 3, 5, 2, 4, 4])
ROWS, WIDTH = len(LENGTHS), 5
PAIR = torch.tensor([70, 20, -1, 20, 50, 70, -1, 50])
CHOSEN = torch.tensor([True, False, False, True, False, False, True, True])
SPLITS = {
    "one": [list(range(ROWS))],
    "rows": [[row] for row in range(ROWS)],
    "torn pairs": [[0, 1, 4], [], [5, 3, 7, 2, 6]],
    "backwards": [list(range(ROWS - 1, -1, -1))],
}
LOSSES = {
    kind: DPOLoss(
        kind,
        beta=0.3,
        **({"label_smoothing": 0.1} if "label_smoothing" in found.options else {}),
    )
    for kind, found in PREFERENCE_LOSSES.items()
} | {
    "mean": DPOLoss("ipo", length="mean"),
    "sft": DPOLoss(sft_coef=0.7),
    "tail": DPOLoss(ld_alpha=0.4, sft_coef=0.2),
    "js": DPOLoss(divergence="js"),
    "alpha margin": DPOLoss(divergence="alpha", alpha=1.5, margin=0.2),
}


def fields():
    generator = torch.Generator().manual_seed(5)
    mask = torch.arange(WIDTH) < LENGTHS[:, None]
    mask[4, 1] = False
    drawn = {
        name: 0.5 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        for name in ("log_probs", "ref_log_probs")
    }
    return {**drawn, "response_mask": mask, "pair": PAIR, "chosen": CHOSEN}


def direct(spec, log_probs, data):
    """The loss of the whole batch, backpropagated as it stands."""
    mask, (better, worse) = data["response_mask"], pair_rows(PAIR, CHOSEN)
    lengths = mask.sum(1)
    weight = mask.double()
    if spec.ld_alpha is not None:
        for rows in zip(better.tolist(), worse.tolist(), strict=True):
            shorter = min(lengths[row].item() for row in rows)
            for row in rows:
                weight[row, mask[row].cumsum(0) > shorter] *= spec.ld_alpha
    sums = (log_probs * weight).sum(1)
    ref = (data["ref_log_probs"] * weight).sum(1)
    loss = preference_loss(
        sums[better],
        sums[worse],
        ref[better],
        ref[worse],
        chosen_tokens=lengths[better],
        rejected_tokens=lengths[worse],
        **spec.options(),
    ).mean()
    nll = -log_probs[better][mask[better]].mean()
    return loss + spec.sft_coef * nll


def parts_of(spec, leaf, mask, terms, cut):
    """The loss and the metrics of the micro-batches, with their gradients in `leaf`."""
    losses, metrics = [], []
    for rows in cut:
        width = int(LENGTHS[rows].max()) if rows else 0
        batch = {"response_mask": mask[rows][:, :width], SHARES: terms[SHARES][rows]}
        batch[SLOPES] = terms[SLOPES][rows][:, :width]
        (name,) = spec.outputs()
        loss, found = batchwise_objective(
            spec, {name: leaf[rows][:, :width]}, batch, count(batch["response_mask"])
        )
        loss.backward()
        losses.append(loss.detach())
        metrics.append(found)
    return sum(losses), combine(metrics)


@pytest.mark.rows(20)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("split", SPLITS)
def test_every_cut_has_the_gradient_of_the_whole(name, split):
    spec, data = LOSSES[name], fields()
    whole = data["log_probs"].clone().requires_grad_()
    expected = direct(spec, whole, data)
    expected.backward()
    leaf = data["log_probs"].clone().requires_grad_()

    terms = preference_terms(spec, leaf.detach(), data)
    loss, metrics = parts_of(spec, leaf, data["response_mask"], terms, SPLITS[split])

    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(leaf.grad, whole.grad, rtol=1e-10, atol=1e-12)
    assert 3 == metrics["pairs"].item()
    total = metrics["preference_loss"] + spec.sft_coef * metrics["sft_loss"]
    torch.testing.assert_close(total, expected.detach(), rtol=1e-10, atol=1e-12)


def test_metrics_by_hand():
    """Two pairs of one token: rewards 0.5 (1, -1) and 0.5 (0, 2)."""
    data = {
        "response_mask": torch.ones(4, 1, dtype=torch.bool),
        "pair": torch.tensor([1, 1, 2, 2]),
        "chosen": torch.tensor([True, False, True, False]),
        "ref_log_probs": torch.tensor([[-2.0], [-1.0], [-1.0], [-4.0]]),
    }
    log_probs = torch.tensor([[-1.0], [-2.0], [-1.0], [-2.0]])
    spec = DPOLoss(beta=0.5)
    terms = preference_terms(spec, log_probs, data)
    mask = data["response_mask"]
    batch = {"response_mask": mask, **terms}
    _, metrics = batchwise_objective(spec, {"log_probs": log_probs}, batch, count(mask))
    assert {
        "preference_loss": pytest.approx((0.31326169 + 1.31326169) / 2),
        "sft_loss": 1.0,
        "pairs": 2.0,
        "accuracy": 0.5,
        "reward_margin": 0.0,
        "reward_chosen": 0.25,
        "reward_rejected": 0.25,
    } == {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("name", ["sigmoid", "aot", "sft", "tail"])
def test_padding_and_rows_in_no_pair_change_nothing(name):
    spec, data = LOSSES[name], fields()
    terms = preference_terms(spec, data["log_probs"], data)

    def wider(x):
        if x.dim() == 1:
            return torch.cat([x, torch.full_like(x[:2], -1 if x.dtype == torch.int64 else 0)])
        fill = False if x.dtype == torch.bool else float("nan")
        return torch.nn.functional.pad(x, (0, 2, 0, 2), value=fill)

    wide = preference_terms(
        spec, wider(data["log_probs"]), {key: wider(value) for key, value in data.items()}
    )
    assert torch.equal(terms[SLOPES], wide[SLOPES][:ROWS, :WIDTH])
    assert torch.equal(terms[SHARES], wide[SHARES][:ROWS])
    assert not wide[SLOPES][ROWS:].any()
    assert not wide[SLOPES][:, WIDTH:].any()
    assert not terms[SLOPES][PAIR == -1].any()


def test_what_is_masked_reaches_no_value_and_no_gradient():
    spec, data = LOSSES["sft"], fields()
    mask, results = data["response_mask"], []
    terms = preference_terms(spec, data["log_probs"], data)
    for fill in (0.0, float("nan"), float("inf")):
        leaf = torch.where(mask, data["log_probs"], fill).requires_grad_()
        batch = {"response_mask": mask, SHARES: terms[SHARES]}
        batch[SLOPES] = torch.where(mask, terms[SLOPES], fill)
        loss, _ = batchwise_objective(spec, {"log_probs": leaf}, batch, count(mask))
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    for value, gradient in results[1:]:
        assert torch.equal(results[0][0], value)
        assert torch.equal(results[0][1], gradient)


def test_no_pair_gives_nothing_to_learn():
    data = {key: value[[2, 6]] for key, value in fields().items()}
    terms = preference_terms(LOSSES["sft"], data["log_probs"], data)
    assert not terms[SLOPES].any()
    assert not terms[SHARES].any()
    empty = {key: value[:0] for key, value in data.items()}
    none = preference_terms(LOSSES["aot"], empty["log_probs"], empty)
    assert (0, WIDTH) == tuple(none[SLOPES].shape)


SCORES = torch.tensor([0.5, -1.0, 9.0, 0.25, 1.5, -0.5, 9.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "spec",
    [RewardModelLoss(), RewardModelLoss(margin_coef=0.5, center_coef=0.1)],
    ids=lambda spec: spec.describe(),
)
def test_scores_of_pairs(spec):
    margin = torch.where(PAIR == 70, 2.0, 1.0)
    leaf = SCORES.clone().requires_grad_()
    better, worse = pair_rows(PAIR, CHOSEN)
    gap = leaf[better] - leaf[worse] - spec.margin_coef * margin[better]
    total = torch.log1p(torch.exp(-gap)) + spec.center_coef * (leaf[better] + leaf[worse]) ** 2
    total.mean().backward()

    terms = score_pair_terms(spec, SCORES, {"pair": PAIR, "chosen": CHOSEN, "pair_margin": margin})

    torch.testing.assert_close(terms[SLOPES], leaf.grad, rtol=1e-12, atol=1e-14)
    loss, _, pairs, accuracy, difference = terms[SHARES].sum(0).tolist()
    assert loss == pytest.approx(total.mean().item())
    assert (3, 2 / 3) == pytest.approx((pairs, accuracy))
    assert difference == pytest.approx((SCORES[better] - SCORES[worse]).mean().item())


@pytest.mark.parametrize("kind", ["regression", "logistic"])
def test_scores_that_fit_targets_are_a_mean_over_the_rows_of_all_parts(kind):
    targets = torch.tensor([0.0, 1.0, 1.0, 0.0])
    leaf = SCORES[:4].clone().requires_grad_()
    p = leaf.sigmoid()
    loss = {
        "regression": (leaf - targets) ** 2 / 2,
        "logistic": -(targets * p.log() + (1 - targets) * (1 - p).log()),
    }[kind]
    (loss.sum() / 10).backward()

    terms = score_terms(RewardModelLoss(kind), SCORES[:4], targets, rows=10.0)

    torch.testing.assert_close(terms[SLOPES], leaf.grad, rtol=1e-10, atol=1e-12)
    expected = [loss.sum().item() / 10, SCORES[:4].sum().item() / 10, 0.2]
    assert expected == pytest.approx(terms[SHARES].sum(0)[1:].tolist())
