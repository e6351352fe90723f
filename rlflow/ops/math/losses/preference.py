"""Losses of pairs of responses, of which one was preferred.

A side of a pair is one number a pair, `[pairs]`: the sum of the log-probs of a response
(`sequence_log_probs`), under the policy with gradient and under the reference without; or the
score of a reward model. A loss is one number a pair.
With `x_w = chosen - ref_chosen` and `x_l` likewise, `s = divergence_score(x)`, divided by
the response's number of tokens with `length="mean"`, `h = beta (s_w - s_l)`,
e = label_smoothing (cDPO where `sigmoid` has one) and S(h) = log sigmoid(h):

    sigmoid    -(1 - e) S(h - margin) - e S(-h + margin)  DPO, arXiv:2305.18290 eq. 7
    simpo      the same without a reference, length mean  arXiv:2405.14734 eq. 6
    hinge      max(0, 1 - h)                              SLiC, arXiv:2309.06657
    ipo        (s_w - s_l - 1 / (2 beta))^2               arXiv:2310.12036 eq. 17
    robust     (-(1 - e) S(h) + e S(-h)) / (1 - 2e)       arXiv:2403.00409
    exo_pair   KL((sigmoid h, sigmoid -h) || (1 - e, e))  arXiv:2402.00856 eq. 16; e > 0
    discopop   -(1 - m) S(h) + m e^-h, m = sigmoid(h/tau) arXiv:2406.08414 eq. 5
    nca_pair   -S(b x_w) - S(-b x_w)/2 - S(-b x_l)/2      arXiv:2402.05369, K = 2 (b = beta)
    bco_pair   -S(b x_w) - S(-b x_l)                      arXiv:2404.04656 without its shift
    sppo_hard  (x_w - 1/2b)^2 + (x_l + 1/2b)^2            arXiv:2405.00675 eq. 4.7, P = 1 and 0
    apo_zero   1 - sigmoid(b x_w) + sigmoid(b x_l)        arXiv:2408.06266 eq. 7
    apo_down   sigmoid(b x_w) + 1 - sigmoid(b (x_w - x_l))  the same, eq. 8
    aot        sigmoid of sorted differences, see `aot`   arXiv:2406.05882; `aot_unpaired` too

This file knows neither how pairs are averaged nor how a pair whose rows are computed apart gets
its gradient: `batchwise` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from rlflow.ops.math.masked import select, statistics_dtype

EXPONENT_LIMIT = 80.0


def sequence_log_probs(
    log_probs: Tensor, mask: Tensor, *, tail: Tensor | None = None, tail_weight: float = 1.0
) -> Tensor:
    """Sum of the log-probs of each row's unmasked tokens, `[rows]`.

    With `tail` (int64 `[rows]`) the unmasked tokens after the first `tail` of them count
    `tail_weight` times: LD-DPO (Liu et al. 2024, arXiv:2409.06411), where `tail` is the length
    of the shorter response of the pair.
    """
    total = (select(log_probs, mask) * token_weights(mask, tail, tail_weight)).sum(-1)
    return total.to(statistics_dtype(log_probs))


def token_weights(mask: Tensor, tail: Tensor | None, tail_weight: float) -> Tensor:
    """How often each token counts in `sequence_log_probs`, float64 `[rows, tokens]`."""
    weight = mask.double()
    if tail is None:
        return weight
    late = mask.cumsum(-1) > tail[:, None]
    return torch.where(late, weight * tail_weight, weight)


def divergence_score(log_ratio: Tensor, *, divergence: str, alpha: float = 0.5) -> Tensor:
    """`f'(t)` of an f-divergence at `log t = log_ratio`, in place of the log-ratio.

    f-DPO, Wang et al. 2023 (arXiv:2309.16240), up to a constant that pairs cancel:
    `reverse_kl`: log t; `forward_kl`: 1 - 1/t; `js`: log(2t / (1 + t)); `alpha`:
    (t^(alpha - 1) - 1) / (alpha - 1), which is log t at alpha = 1. Exponents are held below 80.
    Others: TRL 1.16.0 has the same four, and holds the exponent of `alpha` alone.
    """
    match divergence:
        case "reverse_kl":
            return log_ratio
        case "forward_kl":
            return -_exp_minus_one(-log_ratio)
        case "js":
            return math.log(2) + logsigmoid(log_ratio)
        case "alpha":
            power = alpha - 1.0
            return log_ratio if not power else _exp_minus_one(power * log_ratio) / power
    raise ValueError(f"no divergence is called {divergence!r}")


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    length: str = "sum",
    chosen_tokens: Tensor | None = None,
    rejected_tokens: Tensor | None = None,
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    tau: float = 0.05,
    margin: float = 0.0,
) -> Tensor:
    """The loss `kind` of every pair, `[pairs]`, from sums of log-probs `[pairs]`.

    The kinds are those of the table above. `chosen_tokens` and `rejected_tokens` (`[pairs]`) are
    read where lengths matter. References carry no gradient. The loss of one pair depends on no
    other, `aot` and `aot_unpaired` apart.

    Others: TRL 1.16.0 has these but `simpo` under the same names (`sigmoid_norm` is sigmoid with
    `length="mean"`), its `sigmoid` reads no label smoothing, and its IPO divides by lengths, as
    `length="mean"` does; OpenRLHF and TRL's online DPO sum, as the paper and the default here.
    """
    if kind == "simpo":
        ref_chosen, ref_rejected = torch.zeros_like(chosen), torch.zeros_like(rejected)
    assert ref_chosen is not None, f"{kind} reads the reference"
    assert ref_rejected is not None, f"{kind} reads the reference"
    better, worse = chosen - ref_chosen.detach(), rejected - ref_rejected.detach()
    if kind in ("aot", "aot_unpaired"):
        sides = (chosen - rejected, (ref_chosen - ref_rejected).detach())
        return aot(*(sides if kind == "aot" else (better, worse)), beta, label_smoothing)
    if kind in TWO_SIDED:
        return TWO_SIDED[kind](better, worse, beta)
    scores = [divergence_score(x, divergence=divergence, alpha=alpha) for x in (better, worse)]
    if length == "mean" or kind == "simpo":
        counts = (chosen_tokens, rejected_tokens)
        scores = [_per_token(s, n) for s, n in zip(scores, counts, strict=True)]
    difference = scores[0] - scores[1]
    h = beta * difference
    losses: dict[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: smoothed(h - margin, label_smoothing),
        "simpo": lambda: smoothed(h - margin, label_smoothing),
        "hinge": lambda: relu(1.0 - h),
        "ipo": lambda: (difference - 0.5 / beta).square(),
        "robust": lambda: robust(h, label_smoothing),
        "exo_pair": lambda: exo_pair(h, label_smoothing),
        "discopop": lambda: discopop(h, tau),
    }
    if kind not in losses:
        raise ValueError(f"no preference loss is called {kind!r}")
    return losses[kind]()


def smoothed(h: Tensor, smoothing: float) -> Tensor:
    """`-(1 - e) log sigmoid(h) - e log sigmoid(-h)`: the label is wrong with probability e."""
    return -(1.0 - smoothing) * logsigmoid(h) - smoothing * logsigmoid(-h)


def robust(h: Tensor, smoothing: float) -> Tensor:
    """The unbiased loss under labels flipped with probability e < 1/2 (arXiv:2403.00409)."""
    clean = -(1.0 - smoothing) * logsigmoid(h) + smoothing * logsigmoid(-h)
    return clean / (1.0 - 2.0 * smoothing)


def exo_pair(h: Tensor, smoothing: float) -> Tensor:
    """KL of the policy's preference `(sigmoid h, sigmoid -h)` from the label's `(1 - e, e)`."""
    won = h.sigmoid() * (logsigmoid(h) - math.log1p(-smoothing))
    lost = (-h).sigmoid() * (logsigmoid(-h) - math.log(smoothing))
    return won + lost


def discopop(h: Tensor, tau: float) -> Tensor:
    """Logistic loss where `h` is low, exponential where it is high; the mix has a gradient."""
    mix = (h / tau).sigmoid()
    return -(1.0 - mix) * logsigmoid(h) + mix * (-h).clamp(max=EXPONENT_LIMIT).exp()


def aot(left: Tensor, right: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """`smoothed(beta (sort(left) - sort(right)))`, `[pairs]`: the pairs are those of ranks.

    Melnyk et al. 2024 (arXiv:2406.05882): first-order stochastic dominance of `left` over
    `right`. Paired: differences of policy and of reference; unpaired: log-ratios of the chosen
    and of the rejected. All pairs of the optimizer step are sorted together. Others: TRL 1.16.0
    sorts those of a micro-batch, so its loss depends on how a batch is cut.
    """
    return smoothed(beta * (left.sort().values - right.sort().values), smoothing)


def pairwise_reward_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float = 0.0,
    center_coef: float = 0.0,
) -> Tensor:
    """Bradley-Terry: `-log sigmoid(r_w - r_l - margin) + center_coef (r_w + r_l)^2`, `[pairs]`.

    Ouyang et al. 2022, arXiv:2203.02155, eq. 1; the margin is Touvron et al. 2023,
    arXiv:2307.09288, section 3.2.2; centering, which fixes the free constant of the scores,
    Eisenstein et al. 2023, arXiv:2312.09244. As in TRL 1.16.0.
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_coef * (chosen + rejected).square() if center_coef else loss


def pointwise_reward_loss(scores: Tensor, targets: Tensor, *, kind: str) -> Tensor:
    """The loss of every row, `[rows]`: scores against targets.

    `regression`: `(score - target)^2 / 2`. `logistic`: the cross-entropy of `sigmoid(score)`
    to a target in [0, 1], which for targets 0 and 1 trains a verifier (Cobbe et al. 2021,
    arXiv:2110.14168, section 4.2). Targets carry no gradient.
    """
    target = targets.detach()
    if kind == "regression":
        return 0.5 * (scores - target).square()
    assert kind == "logistic", f"no pointwise reward loss is called {kind!r}"
    return -target * logsigmoid(scores) - (1.0 - target) * logsigmoid(-scores)


def _nca_pair(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    won, lost = beta * better, beta * worse
    return -logsigmoid(won) - 0.5 * logsigmoid(-won) - 0.5 * logsigmoid(-lost)


def _bco_pair(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    return -logsigmoid(beta * better) - logsigmoid(-beta * worse)


def _sppo_hard(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    return (better - 0.5 / beta).square() + (worse + 0.5 / beta).square()


def _apo_zero(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    return (-beta * better).sigmoid() + (beta * worse).sigmoid()


def _apo_down(better: Tensor, worse: Tensor, beta: float) -> Tensor:
    return (beta * better).sigmoid() + (-beta * (better - worse)).sigmoid()


TWO_SIDED: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
}
"""Losses that read each side's log-ratio, not only their difference."""


def _exp_minus_one(x: Tensor) -> Tensor:
    return x.clamp(max=EXPONENT_LIMIT).expm1()


def _per_token(score: Tensor, tokens: Tensor | None) -> Tensor:
    assert tokens is not None, "a mean over tokens reads how many there are"
    return score / tokens.clamp(min=1)
