"""The cases beside verl 0.9.1 of KL, critic, averages, controllers and distillation."""

from __future__ import annotations

import torch

from numerics import ours
from numerics.compare import Case, Fields, Made, Variant
from numerics.ours import MODES, averaged
from rlflow.ops.math.controllers import adaptive_kl
from rlflow.ops.math.losses.distillation import forward_kl_at

FLOAT32 = 2e-6
"""verl computes the divergence of likeliest tokens in float32, whatever the inputs are."""


def term_cases() -> list[Case]:
    """KL estimators, the value loss, averages, the KL controller, a divergence from a teacher."""
    kinds = ("k1", "abs", "k2", "k3", "k1+", "k3+", "abs+")
    everywhere = ("ragged", "edge", "far")
    modes = tuple(averaged(mode) for mode in MODES)
    return [
        Case(
            name="token_kl k1 abs k2 k3 k1+ abs+ k3+",
            kind="kl",
            function="kl_penalty",
            variants=tuple({"kl": kind} for kind in kinds),
            batches=everywhere,
            ours=ours.penalty,
        ),
        Case(
            name="value_loss, every average",
            kind="value",
            function="compute_value_loss",
            given={"clip": 0.3},
            variants=modes,
            ours=ours.critic(clip=0.3),
        ),
        Case(
            name="ValueLoss, defaults",
            kind="value",
            function="compute_value_loss",
            given={"clip": 0.5},
            variants=modes[:1],
            ours=ours.critic(),
            reason="clip is 0.2, in verl 0.5",
            option="clip=0.5",
            reached=ours.critic(clip=0.5),
        ),
        Case(
            name="adaptive_kl",
            kind="controller",
            function="AdaptiveKLController",
            variants=(CONTROLLER,),
            batches=("ragged",),
            ours=_controlled,
        ),
        Case(
            name="top_k_forward_kl",
            kind="distillation",
            function="compute_forward_kl_topk",
            variants=({"log_prob_min_clamp": None}, {"log_prob_min_clamp": -3.0}),
            ours=_top_k,
            tolerance=FLOAT32,
        ),
        *average_cases(),
    ]


def average_cases() -> list[Case]:
    """Averages."""
    modes = tuple(averaged(mode) for mode in MODES)
    by_rows = tuple(averaged(mode) for mode in MODES[2:4])
    return [
        Case(
            name="aggregate, every mode",
            kind="aggregate",
            function="agg_loss",
            variants=modes,
            ours=ours.aggregation(),
        ),
        Case(
            name="aggregate, totals of verl's own",
            kind="aggregate",
            function="agg_loss",
            given={"alone": True},
            variants=by_rows,
            batches=("edge",),
            ours=ours.aggregation(),
            reason="a row without a token counts, in verl's function by itself not",
            option="the caller's totals decide; verl's engines count every row as well",
            reached=ours.aggregation(seen_rows=True),
        ),
        Case(
            name="aggregate, no constant in verl",
            kind="aggregate",
            function="agg_loss",
            given={"alone": True},
            variants=modes[4:],
            batches=("ragged",),
            ours=ours.aggregation(),
            reason="the norm has to be given, in verl it may be the padded width of the batch",
            option="constant=",
            reached=ours.aggregation(padded=True),
        ),
    ]


CONTROLLER = {
    "init": 0.1,
    "target": 6.0,
    "horizon": 10_000.0,
    "n": 512,
    "measured": [3.0, 6.5, 40.0, 7.0, 0.0, 6.0],
}


def _controlled(fields: Fields, variant: Variant) -> Made:
    coef, found = variant["init"], []
    for kl in variant["measured"]:
        target, horizon = variant["target"], variant["horizon"]
        coef = adaptive_kl(coef, kl, target=target, horizon=horizon, n=variant["n"])
        found.append(coef)
    return {"coefficients": torch.tensor(found, dtype=torch.float64)}


def _top_k(fields: Fields, variant: Variant) -> Made:
    """Of every token, with the gradient of its sum in the student's logits."""
    x = fields["student_logits"].clone().requires_grad_()
    found = forward_kl_at(
        x.log_softmax(-1).gather(-1, fields["teacher_tokens"]),
        fields["teacher_log_probs"],
        fields["response_mask"],
        log_prob_min=variant["log_prob_min_clamp"],
    )
    (gradient,) = torch.autograd.grad(found.sum(), x)
    return {"kl": found.detach(), "gradient": gradient}
