"""The objectives of an optimizer step: a scalar loss and its metrics for one micro-batch.

`spec` is what the user said (`rlflow.ops.losses`), `outputs` what the training forward
computed (padded `[rows, tokens]`, with gradient), `batch` the fields of the micro-batch,
`totals` the counts of the whole optimizer step.

Every metric is a detached scalar already divided by the totals: the metrics of the
micro-batches of a step are *added* (over ranks too), except that names ending in `_max` are
combined by maximum; the result is exactly that of the whole batch. `combine` does it.

This file knows neither models nor optimizers.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlflow.ops.losses import POLICY_LOSSES, PolicyLoss, SFTLoss, ValueLoss
from rlflow.ops.math.aggregate import Totals, token_mean
from rlflow.ops.math.losses import clipped, nll, value_loss
from rlflow.ops.math.masked import select
from rlflow.ops.math.mismatch import corrected
from rlflow.ops.math.regularise import Fields, Metrics, aggregated, largest, regularised


def policy_objective(
    spec: PolicyLoss, outputs: Fields, batch: Fields, totals: Totals
) -> tuple[Tensor, Metrics]:
    """`policy + kl_coef * KL - entropy_coef * entropy`, each aggregated as `spec` says.

    `outputs`: `log_probs`, and `entropy` (needed where it has a coefficient). `batch`:
    `response_mask` bool, `advantages` `[rows]` or `[rows, tokens]`, and where there
    `old_log_probs` (else the current ones, detached), `rollout_log_probs`, `ref_log_probs`.
    With a `correction` the policy term of each token, and no other, is multiplied by its weight.

    Metrics: `policy_loss` (the aggregated policy term); as means over tokens `clip_fraction`,
    `approx_kl` (old minus current), `kl` if there is a reference, `entropy` if computed, and
    `rollout_gap` (|old minus rollout|, or current where old is the rollout's) if the rollout
    left log-probs; `ratio_max` and `rollout_gap_max`; those of `mismatch.corrected`.
    """
    mask, log_probs = batch["response_mask"], outputs["log_probs"]
    old = _old_log_probs(spec, log_probs, batch)
    kind = POLICY_LOSSES[spec.kind]
    options = {name: getattr(spec, name) for name in kind.options}
    token_loss, ratio = _resolve(kind.body)(log_probs, old, batch["advantages"], mask, **options)
    metrics: Metrics = {}
    if spec.correction is not None:
        token_loss = corrected(spec.correction, token_loss, old, batch, totals, metrics)
    policy = aggregated(spec, token_loss, mask, totals)
    metrics["policy_loss"] = policy.detach()
    loss = regularised(spec, policy, outputs, batch, totals, metrics)
    with torch.no_grad():
        metrics["approx_kl"] = token_mean(select(old - log_probs, mask), totals)
        metrics["ratio_max"] = largest(select(ratio, mask))
        if "clip" in kind.options:
            inert = clipped(ratio, batch["advantages"], mask, clip=spec.clip)
            metrics["clip_fraction"] = token_mean(inert.to(ratio.dtype), totals)
        if "rollout_log_probs" in batch:
            trained = log_probs if spec.old == "rollout" else old
            gap = select((trained - batch["rollout_log_probs"]).abs(), mask)
            metrics["rollout_gap"] = token_mean(gap, totals)
            metrics["rollout_gap_max"] = largest(gap)
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
    token_loss = value_loss(values, batch.get("values"), returns, mask, clip=spec.clip)
    loss = aggregated(spec, token_loss, mask, totals)
    metrics = {"value_loss": loss.detach()}
    with torch.no_grad():
        metrics["value_mean"] = token_mean(select(values, mask), totals)
        if spec.clip is not None:
            free = value_loss(values, None, returns, mask, clip=None)
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


def combine(parts: Sequence[Metrics]) -> Metrics:
    """The metrics of a whole optimizer step from those of its micro-batches.

    Sums, or maxima for names ending in `_max`; every part must have the same names.
    """
    first, *rest = parts
    metrics = dict(first)
    for part in rest:
        for name, value in part.items():
            join = torch.maximum if name.endswith("_max") else torch.add
            metrics[name] = join(metrics[name], value)
    return metrics


def _old_log_probs(spec: PolicyLoss, log_probs: Tensor, batch: Fields) -> Tensor:
    """The log-probs that the ratio is taken against, as `spec.old` says."""
    if spec.old == "rollout":
        return batch["rollout_log_probs"]
    if spec.old == "recomputed":
        return batch["old_log_probs"]
    old = None if spec.old == "current" else batch.get("old_log_probs")
    return log_probs.detach() if old is None else old


@functools.cache
def _resolve(body: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function behind a dotted name, looked up once."""
    function: Callable[..., tuple[Tensor, Tensor]] = pkgutil.resolve_name(body)
    return function
