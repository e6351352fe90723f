"""The cases beside TRL 1.16.0 of preference losses and distillation."""

from __future__ import annotations

from typing import Any

import torch

from numerics.compare import Case, Fields, Made, Ours, Variant
from numerics.ours import differentiated
from rlflow.ops.losses.preference import DPOLoss
from rlflow.ops.math.aggregate import aggregate, count
from rlflow.ops.math.losses.batchwise import batchwise_objective, preference_terms
from rlflow.ops.math.losses.distillation import top_k_jsd
from rlflow.ops.math.losses.preference import (
    pairwise_reward_loss,
    preference_loss,
    sequence_log_probs,
)

BETA, SMOOTHING = 0.3, 0.1
FLOAT32 = 1e-5


def pairs(kind: str, **options: Any) -> Ours:
    """A loss of pairs: the first half of the rows was chosen."""

    def made(fields: Fields, variant: Variant) -> Made:
        mask = fields["response_mask"]
        half = len(mask) // 2
        batch = {
            "response_mask": mask,
            "ref_log_probs": fields["ref_log_probs"],
            "pair": torch.arange(half).repeat(2),
            "chosen": torch.arange(len(mask)) < half,
        }
        spec = DPOLoss(kind, beta=BETA, **options)
        if spec.policy_weights:
            batch["sum_pi_squared"] = fields["sum_pi_squared"]
        x = fields["log_probs"].clone().requires_grad_()
        terms = preference_terms(spec, x.detach(), batch)
        loss, _ = batchwise_objective(spec, {"log_probs": x}, {**batch, **terms}, count(mask))
        return differentiated(loss, x)

    return made


def pair(name: str, ours: Ours, config: dict[str, Any], **changed: Any) -> Case:
    """`DPOTrainer._compute_loss`."""
    return Case(
        name=f"DPOLoss {name}",
        kind="preference",
        function="DPOTrainer._compute_loss",
        ours=ours,
        given={"config": {"beta": BETA, **config}, **changed.pop("given", {})},
        **changed,
    )


def pair_cases() -> list[Case]:
    """Every loss of TRL's DPO trainer, its options, and the divergence of GKD."""
    plain = ("sigmoid", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
    smooth = {"label_smoothing": SMOOTHING}
    return [
        *(pair(kind, pairs(kind), {"loss_type": [kind]}) for kind in (*plain, "discopop")),
        *(
            pair(kind, pairs(kind, **smooth), {"loss_type": [kind], **smooth}, tolerance=FLOAT32)
            for kind in ("robust", "exo_pair", "aot", "aot_unpaired")
        ),
        *(
            pair(
                f"{kind}, policy weights",
                pairs(kind, policy_weights=True),
                {"loss_type": [kind], "use_weighting": True},
            )
            for kind in ("sigmoid", "nca_pair")
        ),
        *options(),
        *(
            Case(
                name=f"RewardModelLoss, center_coef {center}",
                kind="reward",
                function="RewardTrainer.compute_loss",
                given={"config": {"center_rewards_coefficient": center} if center else {}},
                ours=reward_model(center),
                tolerance=FLOAT32,
            )
            for center in (0.0, 0.01)
        ),
        Case(
            name="preference_loss simpo",
            kind="simpo",
            function="CPOTrainer.cpo_loss",
            variants=({"label_smoothing": 0.0}, {"label_smoothing": SMOOTHING}),
            given={"beta": BETA, "simpo_gamma": 0.4},
            batches=("ragged",),
            ours=simpo,
        ),
        Case(
            name="generalized_jsd",
            kind="distillation",
            function="GKDTrainer.generalized_jsd_loss",
            variants=tuple(
                {"beta": beta, "temperature": temperature}
                for beta in (0.0, 0.3, 0.5, 1.0)
                for temperature in (1.0, 0.7)
            ),
            ours=jsd,
        ),
    ]


def options() -> list[Case]:
    """Lengths, divergences, the tail of the longer response, an SFT term."""
    averaged = pairs("ipo", length="mean")
    return [
        pair(
            "ipo",
            pairs("ipo"),
            {"loss_type": ["ipo"]},
            reason="a response counts by its sum, as in the paper, in TRL by its mean",
            option='length="mean"',
            reached=averaged,
        ),
        pair("sigmoid, length mean", pairs("sigmoid", length="mean"), LENGTH_MEAN),
        pair("sigmoid, ld_alpha", pairs("sigmoid", ld_alpha=0.4), {"ld_alpha": 0.4}),
        pair("sigmoid, sft_coef", pairs("sigmoid", sft_coef=0.5), SFT),
        pair(
            "sigmoid, forward_kl",
            pairs("sigmoid", divergence="forward_kl"),
            {"f_divergence_type": "forward_kl"},
        ),
        pair(
            "sigmoid, js",
            pairs("sigmoid", divergence="js"),
            {"f_divergence_type": "js_divergence"},
        ),
        pair(
            "sigmoid, alpha (TRL in float32)",
            pairs("sigmoid", divergence="alpha", alpha=0.5),
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
            given={"float32": True},
            tolerance=FLOAT32,
        ),
    ]


LENGTH_MEAN = {"loss_type": ["sigmoid_norm"]}
SFT = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}


def reward_model(center: float) -> Ours:
    """The loss of a reward model from its scores: the first half of the rows was chosen."""

    def made(fields: Fields, variant: Variant) -> Made:
        x = fields["scores"].clone().requires_grad_()
        half = len(x) // 2
        margin = fields["reward"][:half].abs()
        found = pairwise_reward_loss(x[:half], x[half:], margin=margin, center_coef=center)
        return differentiated(found.mean(), x)

    return made


def simpo(fields: Fields, variant: Variant) -> Made:
    """SimPO of sums and lengths; the margin is TRL's gamma."""
    x, mask = fields["log_probs"].clone().requires_grad_(), fields["response_mask"]
    sums, lengths, half = sequence_log_probs(x, mask), mask.sum(-1), len(mask) // 2
    found = preference_loss(
        sums[:half],
        sums[half:],
        kind="simpo",
        beta=BETA,
        margin=0.4,
        label_smoothing=variant["label_smoothing"],
        chosen_tokens=lengths[:half],
        rejected_tokens=lengths[half:],
    )
    return differentiated(found.mean(), x)


def jsd(fields: Fields, variant: Variant) -> Made:
    """The divergence of two distributions, a mean over the tokens."""
    x, mask = fields["student_logits"].clone().requires_grad_(), fields["response_mask"]
    rest = torch.full(mask.shape, -torch.inf, dtype=x.dtype)
    logits = (x, fields["teacher_logits"])
    own, teacher = ((each / variant["temperature"]).log_softmax(-1) for each in logits)
    value = top_k_jsd(own, rest, teacher, rest, mask, beta=variant["beta"])
    return differentiated(aggregate(value, mask, count(mask), mode="token-mean"), x)
