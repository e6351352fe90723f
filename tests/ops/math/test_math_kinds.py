"""Every kind of policy loss against loops of plain numbers: values, gradients, edges.

A reference takes one row without padding, `new` and `old` log-probs and advantages `a`, and
returns the loss of each token and the gradient of their sum, both by the formula of the paper.
"""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.ops.losses.losses import POLICY_LOSSES, PolicyLoss
from rlflow.ops.math.aggregate import count
from rlflow.ops.math.losses.clipped import clipped
from rlflow.ops.math.losses.covariance import clip_cov, kl_cov
from rlflow.ops.math.losses.objective import policy_objective
from rlflow.ops.math.losses.sequence import gmpo, gmpo_clipped, gspo, sequence_clip, vespo
from rlflow.ops.math.losses.weighted import (
    cispo,
    cispo_clipped,
    dppo_kl,
    dppo_kl_outside,
    dppo_tv,
    dppo_tv_outside,
    dro,
    reinforce,
    sapo,
)

pytestmark = pytest.mark.torch

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def surrogate_of(ratio, a, low, high):
    """The clipped surrogate and its derivative in the log of the ratio."""
    free, held = -a * ratio, -a * min(max(ratio, 1 - low), 1 + high)
    return max(free, held), -a * ratio if free >= held else 0.0


def mean(values):
    return sum(values) / len(values) if values else 0.0


def of_gspo(new, old, a, clip):
    s = math.exp(mean([x - y for x, y in zip(new, old, strict=True)]))
    return [surrogate_of(s, each, *clip) for each in a]


def of_gmpo(new, old, a, clip):
    low, high = clip
    d = [x - y for x, y in zip(new, old, strict=True)]
    c = [
        min(x, high) if g > 0 else max(x, -low) if g < 0 else 0.0 for x, g in zip(d, a, strict=True)
    ]
    loss = -mean(a) * math.exp(mean(c))
    free = [(g > 0 and x <= high) or (g < 0 and x >= -low) for x, g in zip(d, a, strict=True)]
    return [(loss, loss * is_free) for is_free in free]


def of_sequence_clip(new, old, a, clip):
    """Each token has its share of the row's loss, and the row's whole ratio moves with each."""
    w = math.exp(sum(x - y for x, y in zip(new, old, strict=True)))
    found = [surrogate_of(w, each, *clip) for each in a]
    slope = mean([grad for _, grad in found])
    return [(value / len(a), slope) for value, _ in found]


def of_vespo(new, old, a, gamma_positive, gamma_negative):
    w = math.exp(sum(x - y for x, y in zip(new, old, strict=True)))
    made = []
    for x, g in zip(new, a, strict=True):
        k, lam = gamma_positive if g >= 0 else gamma_negative
        phi = math.exp(lam) * w**k * math.exp(-lam * w)
        made.append((-phi * g * x, -phi * g))
    return made


def by_token(function):
    """A reference of a row from one of a token."""

    def row(new, old, a, **options):
        return [function(*token, **options) for token in zip(new, old, a, strict=True)]

    return row


@by_token
def of_reinforce(new, old, a):
    return -a * new, -a


@by_token
def of_cispo(new, old, a, ratio_max, ratio_min=None):
    weight = min(math.exp(new - old), ratio_max)
    weight = weight if ratio_min is None else max(weight, ratio_min)
    return -weight * a * new, -weight * a


@by_token
def of_sapo(new, old, a, tau):
    steep, rho = tau[0] if a > 0 else tau[1], math.exp(new - old)
    gate = 1 / (1 + math.exp(-steep * (rho - 1)))
    return -a * 4 / steep * gate, -4 * a * rho * gate * (1 - gate)


@by_token
def of_dppo_tv(new, old, a, divergence, ratio_max):
    moved = math.exp(new) - math.exp(old)
    inside = moved <= divergence[1] if a > 0 else moved >= -divergence[0]
    weight = min(math.exp(new - old), ratio_max) * inside
    return -a * weight * new, -a * weight


@by_token
def of_dppo_kl(new, old, a, divergence, ratio_max):
    p, q = math.exp(new), math.exp(old)
    kl = q * (old - new) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    inside = (kl <= divergence[1] or p <= q) if a > 0 else (kl <= divergence[0] or p >= q)
    weight = min(math.exp(new - old), ratio_max) * inside
    return -a * weight * new, -a * weight


@by_token
def of_dro(new, old, a, beta):
    return -(a * new - beta / 2 * (new - old) ** 2), -a + beta * (new - old)


CASES = {
    "reinforce": (reinforce, of_reinforce, {}),
    "gspo": (gspo, of_gspo, {"clip": (0.1, 0.2)}),
    "gmpo": (gmpo, of_gmpo, {"clip": (0.1, 0.2)}),
    "sequence_clip": (sequence_clip, of_sequence_clip, {"clip": (0.3, 0.4)}),
    "vespo": (vespo, of_vespo, {"gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.1)}),
    "cispo": (cispo, of_cispo, {"ratio_max": 1.2}),
    "cispo below": (cispo, of_cispo, {"ratio_max": 1.2, "ratio_min": 0.9}),
    "sapo": (sapo, of_sapo, {"tau": (1.0, 1.05)}),
    "dppo_tv": (dppo_tv, of_dppo_tv, {"divergence": (0.05, 0.1), "ratio_max": 1.3}),
    "dppo_kl": (dppo_kl, of_dppo_kl, {"divergence": (0.002, 0.01), "ratio_max": 1.3}),
    "dro": (dro, of_dro, {"beta": 0.3}),
}
LENGTHS, WIDTH = (5, 1, 0, 3, 4, 5), 6


def padded(seed, *, rows_only, fill=0.0):
    """Random rows with holes and what `fill` says under the mask; advantages a row, or a token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    mask[0, 2] = mask[4, 0] = False
    log_probs = -0.1 - draw(len(LENGTHS), WIDTH).abs()
    old = (log_probs + 0.3 * draw(len(LENGTHS), WIDTH)).clamp(max=-1e-3)
    advantages = draw(len(LENGTHS)) if rows_only else draw(len(LENGTHS), WIDTH)
    if not rows_only:
        advantages[5, 1] = 0.0
    for x in (log_probs, old) if rows_only else (log_probs, old, advantages):
        x[~mask] = fill
    return log_probs.requires_grad_(), old, advantages, mask


@pytest.mark.rows(40)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows_only", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_are_those_of_plain_loops(name, rows_only, seed):
    loss, reference, options = CASES[name]
    log_probs, old, advantages, mask = padded(seed, rows_only=rows_only, fill=math.nan)
    made, ratio = loss(log_probs, old, advantages, mask, **options)
    made.sum().backward()
    values, grads = torch.zeros_like(made), torch.zeros_like(made)
    for row, kept in enumerate(mask):
        given = (log_probs[row].detach(), old[row], advantages[row].expand(WIDTH))
        pairs = reference(*(x[kept].tolist() for x in given), **options)
        values[row, kept] = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
        grads[row, kept] = torch.tensor([g for _, g in pairs], dtype=torch.float64)
    torch.testing.assert_close(made.detach(), values, **EXACT)
    torch.testing.assert_close(log_probs.grad, grads, **EXACT)
    assert (ratio[~mask] == 1).all()
    assert ratio.shape == made.shape == mask.shape


SPECS = {
    kind: PolicyLoss(kind, **({"beta": 0.3} if kind == "dro" else {})) for kind in POLICY_LOSSES
}
SPECS["masked"] = PolicyLoss(off_policy_limit=0.05, top_entropy=0.5)


ON_POLICY = sorted(POLICY_LOSSES)


@pytest.mark.parametrize("kind", ON_POLICY)
def test_on_policy_every_kind_has_the_gradient_of_reinforce(kind):
    """`-A grad log_probs`, averaged alike; so do the steps of one optimizer step an iteration."""
    log_probs, _, advantages, mask = padded(5, rows_only=True)
    mode = SPECS[kind].of_kind.aggregate or "token-mean"
    found = []
    for spec in (SPECS[kind], PolicyLoss("gpg")):
        leaf = log_probs.detach().clone().requires_grad_()
        none = torch.zeros_like(mask)
        batch = {"response_mask": mask, "advantages": advantages, "chosen": none}
        batch["covariance"] = log_probs.detach()
        alike = spec.model_copy(update={"aggregate": mode})
        policy_objective(alike, {"log_probs": leaf}, batch, count(mask))[0].backward()
        found.append(leaf.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


TRUE = torch.ones(1, 4, dtype=torch.bool)


def test_gspo_by_hand():
    """Log-ratios .1 and .3: s = e^.2 = 1.2214 for both, above 1.2 with A > 0: no gradient."""
    log_probs = f64([-1.0, -2.0]).requires_grad_()
    old, mask = f64([-1.1, -2.3]), TRUE[:, :2]
    loss, ratio = gspo(log_probs, old, f64(2.0).view(1), mask, clip=(0.2, 0.2))
    torch.testing.assert_close(ratio.detach(), f64([math.exp(0.2)] * 2), **EXACT)
    torch.testing.assert_close(loss.detach(), f64([-2.4, -2.4]), **EXACT)
    loss.sum().backward()
    assert not log_probs.grad.any()
    assert clipped(ratio, f64(2.0).view(1), mask, clip=(0.2, 0.2)).all()
    dual, _ = gspo(log_probs, old, f64(-2.0).view(1), mask, clip=(0.2, 0.2), dual_clip=1.1)
    torch.testing.assert_close(dual.detach(), f64([2.2, 2.2]), **EXACT)


def sequence_by_hand():
    """Rows of 2, 3 and 1 tokens, ratios e^.1 e^.05, e^-.2 e^.1 e^-.3 and e^.5; masked holes."""
    old = f64([-1.0, -2.0, 9.0], [-1.0, -1.5, -0.5], [-3.0, math.nan, math.inf])
    step = f64([0.1, 0.05, 7.0], [-0.2, 0.1, -0.3], [0.5, 0.0, 0.0])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    return (old + step).requires_grad_(), old, mask


@pytest.mark.parametrize(
    ("advantages", "options", "losses", "slopes"),
    [
        # W = e^.15 = 1.16, e^-.4 = 0.67, e^.5 = 1.65; clip to [0.8, 1.2].
        ((2.0, 1.0, 0.5), {}, (-2 * 1.1618342, -0.6703200, -0.6), (-2 * 1.1618342, -0.67032, 0)),
        ((-2.0, -1.0, -0.5), {}, (2.3236685, 0.8, 0.8243606), (2.3236685, 0, 0.8243606)),
        (
            (-2.0, -1.0, -0.5),
            {"clip": (0.5, 0.5), "dual_clip": 1.1},
            (2.2, 0.67032, 0.55),
            (0, 0.67032, 0),
        ),
    ],
)
def test_sequence_clip_by_hand(advantages, options, losses, slopes):
    """Averaged as it is, the mean over rows; the gradient of every token is the row's."""
    log_probs, old, mask = sequence_by_hand()
    batch = {"response_mask": mask, "advantages": f64(*advantages), "old_log_probs": old}
    spec = PolicyLoss("sequence_clip", old="recomputed", **options)
    loss, metrics = policy_objective(spec, {"log_probs": log_probs}, batch, count(mask))
    loss.backward()
    assert sum(losses) / 3 == pytest.approx(loss.item(), rel=1e-6)
    expected = (f64(*slopes)[:, None] * mask / 3).expand(3, 3)
    torch.testing.assert_close(log_probs.grad, expected, rtol=1e-6, atol=1e-12)
    assert math.exp(0.5) == pytest.approx(metrics["ratio_max"].item())
    stopped = [(a > 0) == (w > 1) and not low <= w <= high for a, w, low, high in (
        (a, w, 1 - spec.clip[0], 1 + spec.clip[1])
        for a, w in zip(advantages, (1.16183, 0.67032, 1.64872), strict=True)
    )]  # fmt: skip
    tokens = sum(n for n, is_stopped in zip((2, 3, 1), stopped, strict=True) if is_stopped)
    assert tokens / 6 == pytest.approx(metrics["clip_fraction"].item())


def test_the_ratio_of_a_response_is_not_normalised_by_its_length():
    """Twice the tokens of the same log-ratio: gspo's ratio stays, the product is squared."""
    step = f64([0.02] * 4)
    old, options = f64([-1.0] * 4), {"clip": (0.5, 0.5)}
    for length, product in ((2, 0.04), (4, 0.08)):
        mask = torch.arange(4).expand(1, 4) < length
        _, whole = sequence_clip(old + step, old, f64(1.0).view(1), mask, **options)
        _, normed = gspo(old + step, old, f64(1.0).view(1), mask, **options)
        assert math.exp(product) == pytest.approx(whole[0, 0].item(), rel=1e-12)
        assert math.exp(0.02) == pytest.approx(normed[0, 0].item(), rel=1e-12)


def test_the_ratio_of_a_response_is_held_where_its_exponential_would_not_be_finite():
    old = f64([-1.0] * 4)
    for moved, held in ((400.0, 20.0), (-400.0, -20.0)):
        log_probs = (old + moved).requires_grad_()
        loss, ratio = sequence_clip(
            log_probs, old, f64(-1.0).view(1), TRUE, clip=(math.inf, math.inf)
        )
        loss.sum().backward()
        assert math.exp(held) == pytest.approx(ratio[0, 0].item())
        assert not log_probs.grad.any()


def test_where_weights_are_cut_by_hand():
    """Ratios 2, 1/2, 1, 2 with advantages +, -, +, -."""
    old = f64([math.log(0.2), math.log(0.4), math.log(0.3), math.log(0.05)])
    log_probs = f64([math.log(0.4), math.log(0.2), math.log(0.3), math.log(0.1)])
    gains, ratio = f64([1.0, -1.0, 1.0, -1.0]), (log_probs - old).exp()
    given = (ratio, log_probs, old, gains, TRUE)
    assert [[True, False, False, True]] == cispo_clipped(*given, ratio_max=1.5).tolist()
    both = cispo_clipped(*given, ratio_max=1.5, ratio_min=0.9)
    assert [[True, True, False, True]] == both.tolist()
    wide = {"divergence": (0.1, 0.1), "ratio_max": 20.0}
    assert [[True, True, False, False]] == dppo_tv_outside(*given, **wide).tolist()
    assert [[True, True, False, False]] == dppo_kl_outside(
        *given, **wide | {"divergence": (0.05, 0.05)}
    ).tolist()
    assert [[False] * 4] == dppo_tv_outside(*given, **wide | {"divergence": (0.3, 0.3)}).tolist()
    assert [[True, True, False, False]] == gmpo_clipped(*given, clip=(0.4, 0.4)).tolist()
    assert [[True, False, False, False]] == gmpo_clipped(*given, clip=(0.8, 0.4)).tolist()


def test_vespo_weighs_a_sample_of_the_same_policy_once_and_holds_others():
    log_probs = f64([-1.0, -1.0, -1.0, -1.0])
    options = {"gamma_positive": (2.0, 3.0), "gamma_negative": (3.0, 2.0)}
    same, ratio = vespo(log_probs, log_probs, f64(1.0).view(1), TRUE, **options)
    torch.testing.assert_close(same, f64([1.0] * 4), **EXACT)
    assert (ratio == 1).all()
    far, ratio = vespo(log_probs, log_probs + 30, f64(-1.0).view(1), TRUE, **options)
    torch.testing.assert_close(ratio, f64([1e-8] * 4), rtol=1e-9, atol=0)
    torch.testing.assert_close(far, f64([-1e-24 * math.exp(2)] * 4), rtol=1e-6, atol=0)
    assert not vespo(log_probs, log_probs - 30, f64(-1.0).view(1), TRUE, **options)[0].any()


def test_what_the_covariance_chose_is_left_out_or_held():
    """Ratios 1.1 1.1 1/2 1, A = 1; the first and third are chosen."""
    old = f64([-1.0, -1.0, -1.0, -1.0])
    log_probs = (old + f64([math.log(1.1), math.log(1.1), -math.log(2), 0.0])).requires_grad_()
    chosen, gain = torch.tensor([[True, False, True, False]]), f64(1.0).view(1)
    loss, _ = clip_cov(log_probs, old, gain, TRUE, chosen=chosen, clip=(0.2, 0.2))
    torch.testing.assert_close(loss.detach(), f64([0.0, -1.1, 0.0, -1.0]), **EXACT)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, f64([0.0, -1.1, 0.0, -1.0]), **EXACT)
    log_probs.grad = None
    loss, _ = kl_cov(log_probs, old, gain, TRUE, chosen=chosen, cov_coef=0.5)
    expected = f64([0.5 * math.log(1.1) - 1.1, -1.1, 0.5 * math.log(2) - 0.5, -1.0])
    torch.testing.assert_close(loss.detach(), expected, **EXACT)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, f64([-0.6, -1.1, -1.0, -1.0]), **EXACT)


def test_dro_regresses_the_log_ratio_to_the_advantage():
    """The gradient is that of beta / 2 (d - A / beta)^2, and 0 where d = A / beta."""
    log_probs = f64([-1.0, -2.0]).requires_grad_()
    loss, _ = dro(log_probs, f64([-1.5, -2.0]), f64(0.2).view(1), TRUE[:, :2], beta=0.4)
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, f64([0.0, -0.2]), **EXACT)
