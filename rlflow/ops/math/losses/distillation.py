"""A student learns from a teacher: divergences of whole distributions, and of sampled tokens.

Distributions are log-probs of the same k tokens `[rows, tokens, k]`, one number per token comes
out, `[rows, tokens]`, 0 where the mask (bool `[rows, tokens]`) is false; `aggregate` averages
with the counts of the whole optimizer step. Teachers carry no gradient. Student and teacher share
a vocabulary. This file knows neither models nor how tokens were sampled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflow.ops.losses.distill import DistillLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.kl import token_kl
from rlflow.ops.math.losses.objective import policy_objective
from rlflow.ops.math.losses.regularise import Fields, Metrics, aggregated
from rlflow.ops.math.masked import clamped, per_token, select

LOWEST = -1e30


def top_k_jsd(
    student: Tensor,
    student_rest: Tensor,
    teacher: Tensor,
    teacher_rest: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    limit: float | None = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of every token, `[rows, tokens]`, never negative.

    `D = beta KL(t || m) + (1 - beta) KL(s || m)` with `m = beta t + (1 - beta) s`: GKD, Agarwal et
    al. 2023, arXiv:2306.13649, eq. 1; over the teacher's k likeliest tokens and one outcome for all
    others. By definition `beta = 0` is the forward KL(t || s) and `beta = 1` the reverse
    KL(s || t), the limits of D / beta and of D / (1 - beta): D itself goes to 0 there, so the
    function jumps.

    `student` and `teacher` are log-probs of the same tokens `[rows, tokens, k]`, the rests the
    log of the probability of all other tokens together `[rows, tokens]`, -inf for none. Log-probs
    are held above -1e30, so a token that a distribution excludes leaves values and gradients
    finite. Values are held at `limit` from above, where their gradient is 0.

    Both sides are whole distributions of k + 1 outcomes, so the value is never negative and at
    most that of the whole vocabulary (data processing), and equal to it where k is the
    vocabulary. Without the last outcome a student would make the reverse KL small by leaving the
    k tokens. The papers (GKD, arXiv:2306.13649; MiniLLM, arXiv:2306.08543) sum over the
    vocabulary. Others: TRL 1.16.0 adds this outcome by default where a server gives a teacher's
    top k, as `log(1 - sum p)`; here each side sums its own rest, so a small one keeps its digits.
    """
    own = _with_rest(student, student_rest, mask)
    value = _jsd(own, _with_rest(teacher, teacher_rest, mask).detach(), beta)
    return select(value if limit is None else value.clamp(max=limit), mask)


def forward_kl_at(
    student: Tensor,
    teacher: Tensor,
    mask: Tensor,
    *,
    log_prob_min: float | None = -10.0,
    limit: float | None = None,
) -> Tensor:
    """Forward KL over the k tokens that the teacher finds likeliest, `[rows, tokens]`.

    `sum_k p_k (log p_k - log q_k)`, held at 0 from below (part of a distribution has no
    KL that is sure to be positive) and at `limit` from above. Both sides are log-probs of the same
    tokens, `[rows, tokens, k]`, held above `log_prob_min` (None: not held). Where a value is held
    its gradient is 0.

    Others: verl 0.9.1 has k = 128, -10 and a limit of 10 (`forward_kl_topk`).
    """
    student, teacher = (select(x, mask[..., None]) for x in (student, teacher.detach()))
    lowest = LOWEST if log_prob_min is None else log_prob_min
    student, teacher = student.clamp(min=lowest), teacher.clamp(min=lowest)
    return select(kl_divergence(teacher, student).clamp(min=0.0, max=limit), mask)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """`sum p (log p - log q)` over the last dimension; finite log-probs in, one number out."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def teacher_kl(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    *,
    kind: str,
    limit: float | None = None,
) -> Tensor:
    """Estimate of the reverse KL at every sampled token, `[rows, tokens]`, held within +-limit.

    `kind` is an estimator of `rlflow.ops.math.kl`; where the value is held its gradient is 0.
    Others: verl 0.9.1 holds it at 10 (`loss_max_clamp`), slime does not.
    """
    value = token_kl(log_probs, teacher_log_probs, mask, kind=kind)
    return value if limit is None else clamped(value, -limit, limit)


@torch.no_grad()
def teacher_advantages(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor,
    *,
    kind: str = "k1",
    coef: float = 1.0,
    limit: float | None = None,
    advantages: Tensor | None = None,
) -> Tensor:
    """`[A_t] - coef teacher_kl_t`, `[rows, tokens]`, 0 where masked; carries no gradient.

    On-policy distillation (thinkingmachines.ai/blog/on-policy-distillation): a token that the
    teacher finds likelier than the student did is reinforced. `log_probs` are those that
    sampled the token, or the current ones; `advantages` `[rows]` or `[rows, tokens]` are added
    where a reward counts too. Others: slime has k1, coef 1, the rollout's log-probs, no limit;
    verl 0.9.1 the current log-probs, k3 by default, a limit of 10, and no other advantages.
    """
    value = teacher_kl(log_probs, teacher_log_probs, mask, kind=kind, limit=limit)
    pull = -coef * value
    return pull if advantages is None else pull + select(per_token(advantages), mask)


def distill_objective(
    spec: DistillLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """The loss of a student, in the form that `spec` names.

    `outputs`: `log_probs`. `batch`: `response_mask`, `teacher_log_probs`, and what the policy
    loss of `spec` reads; `advantages` are added where `spec` says so. Metrics: those of the
    policy loss, or `distill_loss` (aggregated); `teacher_kl`, the mean of k1 over tokens. For
    forms of whole distributions see `distribution_objective`.
    """
    if spec.distributions:
        return distribution_objective(spec, outputs, batch, totals)
    mask, log_probs, teacher = batch["response_mask"], outputs["log_probs"], "teacher_log_probs"
    if spec.form == "supervised":
        value = teacher_kl(log_probs, batch[teacher], mask, kind=spec.estimator, limit=spec.limit)
        loss = aggregated(spec, value, mask, totals)
        metrics = {"distill_loss": loss.detach()}
    else:
        sampled = batch["rollout_log_probs"] if spec.form == "reward" else log_probs
        rewarded = batch["advantages"] if spec.add_advantages else None
        made = teacher_advantages(
            sampled,
            batch[teacher],
            mask,
            kind=spec.estimator,
            coef=spec.teacher_coef,
            limit=spec.limit,
            advantages=rewarded,
        )
        loss, metrics = policy_objective(spec, outputs, {**batch, "advantages": made}, totals)
    gap = select(log_probs.detach() - batch[teacher], mask)
    metrics["teacher_kl"] = token_mean(gap, totals)
    return loss, metrics


def distribution_objective(
    spec: DistillLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """The divergence of the student's distribution from the teacher's in every place.

    `outputs`: `log_probs_at` `[rows, tokens, k]` and `rest_at`. `batch`: `response_mask`, the
    teacher's `top_log_probs` `[rows, tokens, k]` and `top_rest`. Metrics: `distill_loss`
    (aggregated); over tokens the means of `teacher_kl`, the reverse KL, and of `top_mass`, the
    teacher's probability of the k tokens.
    """
    mask, student, teacher = batch["response_mask"], outputs["log_probs_at"], batch["top_log_probs"]
    both = (student, outputs["rest_at"], teacher, batch["top_rest"], mask)
    if spec.form == "forward_kl" and not spec.tail:
        held = {"log_prob_min": spec.log_prob_min, "limit": spec.limit}
        value = forward_kl_at(student, teacher, mask, **held)
    else:
        beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(spec.form, spec.jsd_beta)
        value = top_k_jsd(*both, beta=beta, limit=spec.limit)
    loss = aggregated(spec, value, mask, totals)
    metrics = {"distill_loss": loss.detach()}
    with torch.no_grad():
        metrics["teacher_kl"] = token_mean(top_k_jsd(*both, beta=1.0), totals)
        metrics["top_mass"] = token_mean(select(-batch["top_rest"].expm1(), mask), totals)
    return loss, metrics


def _jsd(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence of finite log-probs over the last dimension, with its limits at 0 and 1."""
    if beta == 0:
        return kl_divergence(teacher, student)
    if beta == 1:
        return kl_divergence(student, teacher)
    assert 0 < beta < 1, f"beta is {beta}, and must lie between 0 and 1"
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    value = beta * kl_divergence(teacher, mixture)
    return value + (1.0 - beta) * kl_divergence(student, mixture)


def _with_rest(log_probs: Tensor, rest: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of k + 1 outcomes, at least `LOWEST`; 0 where masked."""
    whole = torch.cat([log_probs, rest[..., None]], -1)
    return select(whole, mask[..., None]).clamp(min=LOWEST)
