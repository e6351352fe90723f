"""rlflow's functions as `vs_numerics.py` calls them: fields and a variant in, results out.

Each function here makes one that may stand in a case. Losses go through the objectives that
an update calls, with the totals of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from numerics.compare import Fields, Made, Ours, Variant
from rlflow.ops.losses.losses import PolicyLoss, ValueLoss
from rlflow.ops.math.aggregate import Totals, aggregate, count
from rlflow.ops.math.diagnostics import finished, response_measures, rollout_measures
from rlflow.ops.math.importance import (
    importance_ratio,
    importance_weight,
    normalized,
    weight_sums,
)
from rlflow.ops.math.kl import token_kl
from rlflow.ops.math.losses.covariance import clip_cov_chosen, kl_cov_chosen
from rlflow.ops.math.losses.mismatch import step_sums
from rlflow.ops.math.losses.objective import policy_objective, value_objective
from rlflow.ops.math.losses.off_policy import top_entropy
from rlflow.ops.math.losses.rejection import kept
from rlflow.ops.math.masked import per_token, select

CONSTANT = 17.0
MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)


def averaged(mode: str) -> dict[str, Any]:
    """The options of a way of averaging, on either side."""
    norm = {"constant": CONSTANT} if mode == "seq-mean-token-sum-norm" else {}
    return {"aggregate": mode, **norm}


def spread(advantages: Tensor, mask: Tensor) -> Tensor:
    """A row's advantage on each of its tokens, 0 where masked."""
    wide: Tensor = select(per_token(advantages).expand(mask.shape), mask)
    return wide


def rows(estimator: Callable[..., Tensor], *names: str, **options: Any) -> Ours:
    """An estimator of rows over the fields `names`."""

    def made(fields: Fields, variant: Variant) -> Made:
        found = estimator(*(fields[name] for name in names), **options)
        return {"advantages": spread(found, fields["response_mask"])}

    return made


def tokens(estimator: Callable[..., tuple[Tensor, Tensor]], *names: str, **options: Any) -> Ours:
    """An estimator of tokens over the fields `names`; the variant may hold arguments."""

    def made(fields: Fields, variant: Variant) -> Made:
        extra = {**options, **variant.get("arguments", {}), **variant.get("config", {})}
        advantages, returns = estimator(*(fields[name] for name in names), **extra)
        return {"advantages": advantages, "returns": returns}

    return made


def policy(kind: str, **options: Any) -> Ours:
    """A policy loss with its gradient; the variant says how it is averaged, and of what."""

    def made(fields: Fields, variant: Variant) -> Made:
        ways = {name: variant[name] for name in ("aggregate", "constant") if name in variant}
        spec = PolicyLoss(kind, **{**ways, **options})
        batch = {**fields, "advantages": fields[variant.get("advantages", "row_advantages")]}
        if spec.of_kind.selection is not None:
            batch |= chosen(spec, batch)
        return policy_gradient(spec, batch)

    return made


def chosen_by_entropy(share: float, kind: str, **options: Any) -> Ours:
    """A policy loss of the tokens of highest entropy, among all of the batch."""
    plain = policy(kind, top_entropy=share, **options)

    def made(fields: Fields, variant: Variant) -> Made:
        found = top_entropy(fields["entropy"], fields["response_mask"], share=share)
        return plain({**fields, "uncertain": found}, variant)

    return made


def policy_gradient(spec: PolicyLoss, batch: Fields, totals: Totals | None = None) -> Made:
    """The value of a policy loss and its gradient in the log-probs, all of a batch at once."""
    x = batch["log_probs"].clone().requires_grad_()
    outputs = {"log_probs": x}
    if spec.entropy_coef:
        outputs["entropy"] = batch["entropy"]
    counted = totals or count(batch["response_mask"])
    sums = step_sums(spec, lambda: batch)
    whole = Totals(tokens=counted.tokens, rows=counted.rows, sums=sums)
    loss, _ = policy_objective(spec, outputs, batch, whole)
    return differentiated(loss, x)


def chosen(spec: PolicyLoss, batch: Fields) -> dict[str, Tensor]:
    """The tokens that a loss chooses by covariance; in verl's order where that is random."""
    given = (batch["log_probs"], batch["old_log_probs"], batch["advantages"])
    mask = batch["response_mask"]
    if spec.kind == "kl_cov":
        found = kl_cov_chosen(given[0], given[2], mask, cov_share=spec.cov_share)
    else:
        found = clip_cov_chosen(
            *given,
            mask,
            clip=spec.clip,
            cov_share=spec.cov_share,
            cov_range=spec.cov_range,
            order=lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(11)),
        )
    return {"chosen": found, "covariance": found.double()}


def penalty(fields: Fields, variant: Variant) -> Made:
    """A KL estimate of every token, with the gradient of its sum."""
    x = fields["log_probs"].clone().requires_grad_()
    kl = token_kl(x, fields["ref_log_probs"], fields["response_mask"], kind=variant["kl"])
    (gradient,) = torch.autograd.grad(kl.sum(), x)
    return {"kl": kl.detach(), "gradient": gradient}


def critic(**options: Any) -> Ours:
    """The loss of a critic."""

    def made(fields: Fields, variant: Variant) -> Made:
        x = fields["new_values"].clone().requires_grad_()
        ways = {name: variant[name] for name in ("aggregate", "constant") if name in variant}
        spec = ValueLoss(**{**ways, **options})
        loss, _ = value_objective(spec, {"values": x}, fields, count(fields["response_mask"]))
        return differentiated(loss, x)

    return made


def aggregation(*, seen_rows: bool = False, padded: bool = False) -> Ours:
    """`aggregate` by itself.

    With `seen_rows` its total counts rows that have a token only; with `padded` the constant is
    the padded width.
    """

    def made(fields: Fields, variant: Variant) -> Made:
        x, mask = fields["token_advantages"].clone().requires_grad_(), fields["response_mask"]
        totals = count(mask[mask.any(-1)] if seen_rows else mask)
        constant = float(mask.shape[1]) if padded else variant.get("constant", CONSTANT)
        loss = aggregate(x, mask, totals, mode=variant["aggregate"], constant=constant)
        return differentiated(loss, x)

    return made


def weights(*, level: str, normalize: bool = False, **options: Any) -> Ours:
    """Importance weights of the old policy against the one that sampled."""

    def made(fields: Fields, variant: Variant) -> Made:
        mask = fields["response_mask"]
        policies = (fields["old_log_probs"], fields["rollout_log_probs"])
        found = importance_weight(importance_ratio(*policies, mask, level=level), **options)
        if normalize:
            total, number = weight_sums(found, mask, level=level)
            found = normalized(found, total=total, count=number)
        return {"weights": select(found, mask)}

    return made


def rejection(**options: Any) -> Ours:
    """Which tokens a rejection keeps."""

    def made(fields: Fields, variant: Variant) -> Made:
        policies = (fields["old_log_probs"], fields["rollout_log_probs"])
        return {"kept": kept(*policies, fields["response_mask"], **options).double()}

    return made


def diagnostics(names: Mapping[str, str]) -> Ours:
    """Measures of the old policy against the one that sampled, under the other's `names`."""

    def made(fields: Fields, variant: Variant) -> Made:
        mask = fields["response_mask"]
        given = (fields["old_log_probs"], fields["rollout_log_probs"], mask, count(mask))
        parts = {**rollout_measures(*given), **response_measures(*given)}
        found = finished({name: float(value) for name, value in parts.items()})
        return {name: torch.tensor(found[own]).double() for name, own in names.items()}

    return made


def differentiated(loss: Tensor, x: Tensor) -> Made:
    """A loss and its gradient in x."""
    (gradient,) = torch.autograd.grad(loss, x)
    return {"loss": loss.detach(), "gradient": gradient}
