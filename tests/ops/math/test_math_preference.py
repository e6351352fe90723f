"""Losses of pairs: by hand, against loops of plain Python, and their gradients."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlflow.ops.losses.preference import PREFERENCE_LOSSES
from rlflow.ops.math.losses.preference import (
    aot,
    divergence_score,
    pairwise_reward_loss,
    pointwise_reward_loss,
    preference_loss,
    sequence_log_probs,
)

pytestmark = pytest.mark.torch

KINDS = sorted(PREFERENCE_LOSSES)
SMOOTHED = {"label_smoothing": 0.1}
# Chosen, rejected, and the same under the reference; two pairs.
WON, LOST = [-2.0, -6.5], [-5.0, -3.0]
REF_WON, REF_LOST = [-3.0, -6.0], [-4.0, -3.25]
TOKENS_WON, TOKENS_LOST = [2, 5], [4, 1]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def plain(kind, won, lost, ref_won, ref_lost, *, beta, e, tau=0.05):
    """One pair in plain Python."""
    x, y = won - ref_won, lost - ref_lost
    h = beta * (x - y)
    match kind:
        case "sigmoid":
            return -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)
        case "hinge":
            return max(0.0, 1 - h)
        case "ipo":
            return (x - y - 1 / (2 * beta)) ** 2
        case "robust":
            return (-(1 - e) * log_sigmoid(h) + e * log_sigmoid(-h)) / (1 - 2 * e)
        case "exo_pair":
            return sigmoid(h) * math.log(sigmoid(h) / (1 - e)) + sigmoid(-h) * math.log(
                sigmoid(-h) / e
            )
        case "discopop":
            mix = sigmoid(h / tau)
            return (1 - mix) * math.log(1 + math.exp(-h)) + mix * math.exp(-h)
        case "nca_pair":
            return -log_sigmoid(beta * x) - (log_sigmoid(-beta * x) + log_sigmoid(-beta * y)) / 2
        case "bco_pair":
            return -log_sigmoid(beta * x) - log_sigmoid(-beta * y)
        case "sppo_hard":
            return (x - 1 / (2 * beta)) ** 2 + (y + 1 / (2 * beta)) ** 2
        case "apo_zero":
            return 1 - sigmoid(beta * x) + sigmoid(beta * y)
        case "apo_down":
            return sigmoid(beta * x) + 1 - sigmoid(beta * (x - y))
    raise AssertionError(kind)


def sides(dtype=torch.float64):
    return [torch.tensor(side, dtype=dtype) for side in (WON, LOST, REF_WON, REF_LOST)]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"simpo", "aot", "aot_unpaired"}))
def test_every_kind_is_its_formula(kind):
    made = preference_loss(*sides(), kind=kind, beta=0.3, **SMOOTHED)

    pairs = zip(WON, LOST, REF_WON, REF_LOST, strict=True)
    assert [plain(kind, *pair, beta=0.3, e=0.1) for pair in pairs] == pytest.approx(made.tolist())


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        # x_w = 1, x_l = -1, beta = 1/2: h = 1
        ("sigmoid", 0.3132616875182228),  # log(1 + 1/e)
        ("hinge", 0.0),
        ("ipo", 1.0),  # (2 - 1)^2
        ("sppo_hard", 0.0),  # (1 - 1)^2 + (-1 + 1)^2
        ("bco_pair", 0.9481540),  # 2 log(1 + e^-1/2)
        ("nca_pair", 1.1981540),  # log(1+e^-.5) + (log(1+e^.5) + log(1+e^-.5)) / 2
        ("apo_zero", 0.7550813),  # 2 sigmoid(-1/2)
        ("apo_down", 0.8914007),  # sigmoid(1/2) + sigmoid(-1)
        ("discopop", 0.3678794),  # e^-1, for the mix is 1 - 2e-9
    ],
)
def test_one_pair_by_hand(kind, first):
    assert first == pytest.approx(
        preference_loss(*sides(), kind=kind, beta=0.5)[0].item(), abs=1e-6
    )


def test_ipo_of_means_divides_each_response_by_its_length():
    lengths = {
        "chosen_tokens": torch.tensor(TOKENS_WON),
        "rejected_tokens": torch.tensor(TOKENS_LOST),
    }
    made = preference_loss(*sides(), kind="ipo", beta=0.5, length="mean", **lengths)
    # 1/2 + 1/4 - 1 = -1/4;  -0.5/5 - 0.25/1 - 1 = -1.35
    assert [0.0625, 1.8225] == pytest.approx(made.tolist())


def test_a_mean_over_tokens_is_sigmoid_norm():
    lengths = {
        "chosen_tokens": torch.tensor(TOKENS_WON),
        "rejected_tokens": torch.tensor(TOKENS_LOST),
    }
    made = preference_loss(*sides(), kind="sigmoid", beta=2.0, length="mean", **lengths)
    assert [-log_sigmoid(1.5), -log_sigmoid(-0.7)] == pytest.approx(made.tolist())


def test_simpo_reads_no_reference_and_wants_a_margin():
    won, lost, _, _ = sides()
    lengths = {
        "chosen_tokens": torch.tensor(TOKENS_WON),
        "rejected_tokens": torch.tensor(TOKENS_LOST),
    }
    made = preference_loss(won, lost, kind="simpo", beta=2.0, margin=0.5, **lengths)
    # 2 (-1 + 1.25) - 0.5 = 0;  2 (-1.3 + 3) - 0.5 = 2.9
    assert [math.log(2), -log_sigmoid(2.9)] == pytest.approx(made.tolist())


def test_a_margin_is_how_far_the_chosen_one_has_to_be_ahead():
    made = preference_loss(*sides(), kind="sigmoid", beta=0.5, margin=0.25)
    # h = 1 and 0.5 (-0.5 - 0.25)
    assert [-log_sigmoid(0.75), -log_sigmoid(-0.625)] == pytest.approx(made.tolist())


def test_aot_pairs_by_rank():
    won, lost, ref_won, ref_lost = sides()
    paired = preference_loss(won, lost, ref_won, ref_lost, kind="aot", beta=0.5)
    # policy 3, -3.5 and reference 1, -2.75, each sorted: -3.5 + 2.75 and 3 - 1
    assert [-log_sigmoid(-0.375), -log_sigmoid(1.0)] == pytest.approx(paired.tolist())
    unpaired = preference_loss(won, lost, ref_won, ref_lost, kind="aot_unpaired", beta=0.5)
    # chosen 1, -0.5 and rejected -1, 0.25, each sorted: -0.5 + 1 and 1 - 0.25
    assert [-log_sigmoid(0.25), -log_sigmoid(0.375)] == pytest.approx(unpaired.tolist())
    same = aot(won, won.flip(0), 1.0, 0.1)
    assert [math.log(2)] * 2 == pytest.approx(same.tolist())


@pytest.mark.parametrize(
    ("divergence", "alpha", "formula"),
    [
        ("reverse_kl", 0.5, math.log),
        ("forward_kl", 0.5, lambda t: 1 - 1 / t),
        ("js", 0.5, lambda t: math.log(2 * t / (1 + t))),
        ("alpha", 0.5, lambda t: (t**-0.5 - 1) / -0.5),
        ("alpha", 2.0, lambda t: t - 1),
        ("alpha", 1.0, math.log),
    ],
)
def test_divergences(divergence, alpha, formula):
    ratio = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    made = divergence_score(ratio.log(), divergence=divergence, alpha=alpha)
    assert [formula(t) for t in ratio.tolist()] == pytest.approx(made.tolist(), abs=1e-12)
    assert 0 == pytest.approx(made[1].item(), abs=1e-12)


def test_divergences_and_losses_of_far_log_ratios_stay_finite():
    far = torch.tensor([300.0, -300.0])
    zero = torch.zeros(2)
    for divergence in ("reverse_kl", "forward_kl", "js", "alpha"):
        leaf = far.clone().requires_grad_()
        for alpha in (0.5, 2.0):
            divergence_score(leaf, divergence=divergence, alpha=alpha).sum().backward()
        assert leaf.grad.isfinite().all()
    for kind in KINDS:
        leaf = far.clone().requires_grad_()
        options = {"chosen_tokens": torch.ones(2), "rejected_tokens": torch.ones(2), **SMOOTHED}
        loss = preference_loss(leaf, zero, zero, zero, kind=kind, **options)
        loss.sum().backward()
        assert loss.isfinite().all()
        assert leaf.grad.isfinite().all()


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="'dop'"):
        preference_loss(*sides(), kind="dop")
    with pytest.raises(ValueError, match="'tv'"):
        divergence_score(torch.zeros(1), divergence="tv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js", "alpha"])
def test_gradients_are_those_of_finite_differences(kind, divergence):
    options = {
        "chosen_tokens": torch.tensor(TOKENS_WON),
        "rejected_tokens": torch.tensor(TOKENS_LOST),
        "divergence": divergence,
        "tau": 0.5,
        **SMOOTHED,
    }
    won, lost, ref_won, ref_lost = sides()
    won.requires_grad_(), lost.requires_grad_()

    def loss(won, lost):
        return preference_loss(won, lost, ref_won, ref_lost, kind=kind, beta=0.3, **options)

    assert torch.autograd.gradcheck(loss, (won, lost))


def test_references_carry_no_gradient():
    for kind in set(KINDS) - {"simpo"}:
        leaves = [side.requires_grad_() for side in sides()]
        preference_loss(*leaves, kind=kind, **SMOOTHED).sum().backward()
        assert None is leaves[2].grad is leaves[3].grad
        assert leaves[1].grad.abs().sum() > 0


@given(st.floats(-5, 5), st.sampled_from(KINDS))
def test_only_log_ratios_count(shift, kind):
    """A constant added to the policy and to the reference alike changes nothing."""
    if kind == "simpo":
        return
    won, lost, ref_won, ref_lost = sides()
    options = {"kind": kind, **SMOOTHED}
    one = preference_loss(won, lost, ref_won, ref_lost, **options)
    two = preference_loss(won + shift, lost - shift, ref_won + shift, ref_lost - shift, **options)
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"aot", "aot_unpaired"}))
def test_pairs_do_not_see_each_other(kind):
    options = {"kind": kind, **SMOOTHED}
    counts = (torch.tensor(TOKENS_WON), torch.tensor(TOKENS_LOST))
    whole = preference_loss(*sides(), chosen_tokens=counts[0], rejected_tokens=counts[1], **options)
    for pair in range(2):
        alone = preference_loss(
            *(side[pair : pair + 1] for side in sides()),
            chosen_tokens=counts[0][pair : pair + 1],
            rejected_tokens=counts[1][pair : pair + 1],
            **options,
        )
        assert whole[pair].item() == pytest.approx(alone.item(), rel=1e-12)


def test_label_smoothing_of_one_half_would_say_nothing():
    won, lost, ref_won, ref_lost = sides()
    up = preference_loss(won, lost, ref_won, ref_lost, label_smoothing=0.5)
    down = preference_loss(lost, won, ref_lost, ref_won, label_smoothing=0.5)
    torch.testing.assert_close(up, down)


def test_sums_of_log_probs_skip_what_is_masked():
    log_probs = torch.tensor([[-1.0, math.nan, -2.0], [math.inf, -0.5, -0.25]])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    leaf = log_probs.requires_grad_()
    made = sequence_log_probs(leaf, mask)
    made.sum().backward()
    assert [-3.0, -0.75] == made.tolist()
    assert mask.tolist() == leaf.grad.tolist()
    assert torch.float32 == made.dtype


def test_tokens_beyond_the_shorter_response_count_less():
    log_probs = torch.tensor([[-1.0, -8.0, -2.0, -4.0]])
    mask = torch.tensor([[True, False, True, True]])
    tail = torch.tensor([2])
    assert [-5.0] == sequence_log_probs(log_probs, mask, tail=tail, tail_weight=0.5).tolist()
    assert [-3.0] == sequence_log_probs(log_probs, mask, tail=tail, tail_weight=0.0).tolist()
    assert [-7.0] == sequence_log_probs(log_probs, mask, tail=tail, tail_weight=1.0).tolist()


def test_bradley_terry():
    won, lost = torch.tensor([1.0, -0.5]), torch.tensor([0.0, 0.25])
    made = pairwise_reward_loss(won, lost)
    assert [-log_sigmoid(1.0), -log_sigmoid(-0.75)] == pytest.approx(made.tolist())
    made = pairwise_reward_loss(won, lost, margin=torch.tensor([0.5, 1.0]), center_coef=0.01)
    expected = [-log_sigmoid(0.5) + 0.01, -log_sigmoid(-1.75) + 0.01 * 0.0625]
    assert expected == pytest.approx(made.tolist())


def test_scores_that_fit_targets():
    scores, targets = torch.tensor([1.0, -2.0]), torch.tensor([0.0, 1.0])
    made = pointwise_reward_loss(scores, targets, kind="regression")
    assert [0.5, 4.5] == made.tolist()
    made = pointwise_reward_loss(scores, targets, kind="logistic")
    assert [-log_sigmoid(-1.0), -log_sigmoid(-2.0)] == pytest.approx(made.tolist())
