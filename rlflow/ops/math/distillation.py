"""A student learns from a teacher: divergences of whole distributions, and of sampled tokens.

Distributions are logits `[rows, tokens, vocabulary]` of the same positions, one number per
token comes out, `[rows, tokens]`, 0 where the mask (bool `[rows, tokens]`) is false; `aggregate`
averages with the counts of the whole optimizer step. Teachers carry no gradient. Student and
teacher share a vocabulary. This file knows neither models nor how tokens were sampled.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlflow.ops.distill import DistillLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.kl import token_kl
from rlflow.ops.math.masked import per_token, select
from rlflow.ops.math.objective import policy_objective
from rlflow.ops.math.regularise import Fields, Metrics, aggregated

LOWEST = -1e30


def generalized_jsd(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """Generalised Jensen-Shannon divergence of every token, `[rows, tokens]`, never negative.

    `D = beta KL(t || m) + (1 - beta) KL(s || m)` with `m = beta t + (1 - beta) s` and
    s, t = softmax(logits / temperature): GKD, Agarwal et al. 2023, arXiv:2306.13649, eq. 1.
    By definition `beta = 0` is the forward KL(t || s) and `beta = 1` the reverse KL(s || t), the
    limits of D / beta and of D / (1 - beta): D itself goes to 0 there, so the function jumps.

    Log-probs are held above -1e30, so a token that a distribution excludes (logit -inf) leaves
    values and gradients finite. The loss is not multiplied by temperature^2. Others: TRL 1.16.0
    has the same function with the same limits.
    """
    student = _log_softmax(student_logits, mask, temperature)
    teacher = _log_softmax(teacher_logits.detach(), mask, temperature)
    if beta == 0:
        value = kl_divergence(teacher, student)
    elif beta == 1:
        value = kl_divergence(student, teacher)
    else:
        assert 0 < beta < 1, f"beta is {beta}, and must lie between 0 and 1"
        mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
        value = beta * kl_divergence(teacher, mixture)
        value = value + (1.0 - beta) * kl_divergence(student, mixture)
    return select(value, mask)


def top_k_forward_kl(
    student_logits: Tensor,
    teacher_log_probs: Tensor,
    teacher_tokens: Tensor,
    mask: Tensor,
    *,
    log_prob_min: float | None = -10.0,
    limit: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Forward KL over the k tokens that the teacher finds likeliest, `[rows, tokens]`.

    `sum_k p_k (log p_k - log q_k)`, held at 0 from below (part of a distribution has no
    KL that is sure to be positive) and at `limit` from above. `teacher_log_probs` and
    `teacher_tokens` (int64) are `[rows, tokens, k]`; log-probs of both sides are held above
    `log_prob_min` (None: not held). Where a value is held its gradient is 0.

    Others: verl 0.9.1 has k = 128, -10 and a limit of 10 (`forward_kl_topk`).
    """
    at = mask[..., None]
    scores = _log_softmax(student_logits, mask, temperature)
    student = scores.gather(-1, torch.where(at, teacher_tokens, 0))
    teacher = select(teacher_log_probs.detach(), at)
    if log_prob_min is not None:
        student, teacher = student.clamp(min=log_prob_min), teacher.clamp(min=log_prob_min)
    value = kl_divergence(teacher, student).clamp(min=0.0, max=limit)
    return select(value, mask)


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
    return value if limit is None else value.clamp(-limit, limit)


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
    policy loss, or `distill_loss` (aggregated); `teacher_kl`, the mean of k1 over tokens.
    """
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


def _log_softmax(logits: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """Log-probs, float32 or wider, at least `LOWEST`; of equal logits where masked."""
    wide = select(logits, mask[..., None]).to(torch.promote_types(logits.dtype, torch.float32))
    return (wide / temperature).log_softmax(-1).clamp(min=LOWEST)
