"""The objectives of an optimizer step: a scalar loss and its metrics for one micro-batch.

`spec` is what the user said (`rlflow.ops.losses.losses`), `outputs` what the training forward
computed (padded `[rows, tokens]`, with gradient), `batch` the fields of the micro-batch,
`totals` the counts of the whole optimizer step.

Every metric is a detached scalar already divided by the totals: the metrics of the
micro-batches of a step are *added* (over ranks too), except that names ending in `_max` are
combined by maximum; the result is exactly that of the whole batch.

This file knows neither models nor optimizers.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlflow.ops.losses.losses import PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.diagnostics import response_measures, rollout_measures
from rlflow.ops.math.losses.choices import left_in
from rlflow.ops.math.losses.clipped import nll, value_loss
from rlflow.ops.math.losses.mismatch import policy_term
from rlflow.ops.math.losses.regularise import Fields, Metrics, aggregated, largest, regularised
from rlflow.ops.math.masked import select
from rlflow.ops.math.proximal import loglinear


def policy_objective(
    spec: PolicyLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """`policy + kl_coef * KL - entropy_coef * entropy`, each aggregated as `spec` says.

    `outputs`: `log_probs`, and `entropy` (needed where it has a coefficient). `batch`:
    `response_mask` bool, `advantages` `[rows]` or `[rows, tokens]`, and where there
    `old_log_probs` (else the current ones, detached), `rollout_log_probs`, `ref_log_probs`.
    With a `correction` the policy term of each token, and no other, is multiplied by its weight;
    a `rejection`, an `off_policy_limit` and `top_entropy` leave tokens out of that term, and of
    no other. What its kind, or `top_entropy`, chooses among all tokens of the step is there too.
    `old="loglinear"` reads `age`.
    An adaptive coefficient that was not replaced by its number is its first one.

    Metrics: `policy_loss` (the aggregated policy term); as means over tokens `clip_fraction`
    (where the kind stopped a gradient or cut a weight),
    `approx_kl` (old minus current), `kl` if there is a reference, `entropy` if computed;
    `ratio_max`; those of `mismatch.policy_term`; and if the rollout left log-probs those of
    `diagnostics.rollout_measures`, of old against rollout, or current where old is the rollout's.
    """
    mask, log_probs = batch["response_mask"], outputs["log_probs"]
    old = old_log_probs(spec, log_probs, batch)
    kind = spec.of_kind
    given = (log_probs, old, batch["advantages"], mask)
    options = {name: getattr(spec, name) for name in kind.options}
    if kind.selection is not None:
        options["chosen"] = select(batch["chosen"], mask, False)
    token_loss, ratio = resolved(kind.body)(*given, **options)
    metrics: Metrics = {}
    token_loss = left_in(spec, token_loss, log_probs, old, batch, totals, metrics)
    trained = log_probs.detach() if spec.old == "rollout" else old
    policy = policy_term(spec, token_loss, trained, batch, totals, metrics)
    metrics["policy_loss"] = policy.detach()
    loss = regularised(spec, policy, old, outputs, batch, totals, metrics)
    with torch.no_grad():
        metrics["approx_kl"] = token_mean(select(old - log_probs, mask), totals)
        metrics["ratio_max"] = largest(select(ratio, mask))
        if kind.clipped is not None:
            inert = resolved(kind.clipped)(ratio, *given, **options)
            metrics["clip_fraction"] = token_mean(inert.to(ratio.dtype), totals)
        if "rollout_log_probs" in batch:
            both = trained, batch["rollout_log_probs"]
            metrics |= rollout_measures(*both, mask, totals)
            if spec.response_metrics:
                metrics |= response_measures(*both, mask, totals)
    return loss, metrics


def value_objective(
    spec: ValueLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """Half the squared error of `outputs["values"]` to `batch["returns"]`, clipped or not.

    `batch["values"]` are the values the returns were made with, read where `spec` clips.
    Metrics: `value_loss` (aggregated); as means over tokens `value_mean`, and
    `value_clip_fraction` (clipped branch strictly larger) where `spec` clips.
    """
    mask, values, returns = batch["response_mask"], outputs["values"], batch["returns"]
    bounds = {"clip": spec.clip, "huber": spec.huber}
    token_loss = value_loss(values, batch.get("values"), returns, mask, **bounds)
    loss = aggregated(spec, token_loss, mask, totals)
    metrics = {"value_loss": loss.detach()}
    with torch.no_grad():
        metrics["value_mean"] = token_mean(select(values, mask), totals)
        if spec.clip is not None:
            free = value_loss(values, None, returns, mask, clip=None, huber=spec.huber)
            inert = (token_loss > free).to(loss.dtype)
            metrics["value_clip_fraction"] = token_mean(inert, totals)
    return loss, metrics


def sft_objective(
    spec: SFTLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the unmasked tokens. Metric: `sft_loss` (aggregated)."""
    mask = batch["response_mask"]
    loss = aggregated(spec, nll(outputs["log_probs"], mask), mask, totals)
    return loss, {"sft_loss": loss.detach()}


def old_log_probs(spec: PolicyLoss, log_probs: Tensor, batch: Fields) -> Tensor:
    """The log-probs that the ratio is taken against, as `spec.old` says."""
    if spec.old == "rollout":
        return batch["rollout_log_probs"]
    if spec.old == "recomputed":
        return batch["old_log_probs"]
    if spec.old == "loglinear":
        behaviour, mask = batch["rollout_log_probs"], batch["response_mask"]
        return loglinear(log_probs, behaviour, batch["age"], mask)
    old = None if spec.old == "current" else batch.get("old_log_probs")
    return log_probs.detach() if old is None else old


@functools.cache
def resolved(body: str) -> Callable[..., Any]:
    """The function behind a dotted name, looked up once."""
    function: Callable[..., Any] = pkgutil.resolve_name(body)
    return function
