"""The cases beside TRL 1.16.0: advantages and losses of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from numerics.compare import Case, Ours
from numerics.ours import averaged, chosen_by_entropy, policy
from numerics.trl_advantages import advantage_cases
from numerics.trl_pairs import pair_cases

RECOMPUTED = {"old": "recomputed"}
CLIP = {"epsilon": 0.1, "epsilon_high": 0.3}
EITHER = ("row_advantages", "token_advantages")
NORM = averaged("seq-mean-token-sum-norm")
ROW_MEANS = averaged("seq-mean-token-mean")
ROW_SUMS = averaged("seq-mean-token-sum")
STEEPNESS = (0.875, 1.25)
"""Temperatures of sapo that float32, in which TRL holds them, has exactly."""


def trl_cases() -> list[Case]:
    """Everything beside TRL."""
    return [
        *advantage_cases(),
        *loss_types(),
        *weighted_types(),
        *terms(),
        *limits(),
        *rloo_losses(),
        *pair_cases(),
    ]


def loss(name: str, ours: Ours, config: Mapping[str, Any], **changed: Any) -> Case:
    """`_compute_loss` of the GRPO trainer, at equal options unless said otherwise."""
    way, of = changed.pop("way", averaged("token-mean")), changed.pop("of", EITHER)
    given = {"config": dict(config), **changed.pop("given", {})}
    return Case(
        name=name,
        kind="policy",
        function=f"{changed.pop('trainer', 'GRPOTrainer')}._compute_loss",
        ours=ours,
        given=given,
        variants=tuple({**way, "advantages": which} for which in of),
        **changed,
    )


def loss_types() -> list[Case]:
    """Every `loss_type` of TRL."""
    ppo = policy("ppo_clip", clip=(0.1, 0.3), **RECOMPUTED)
    sequence = {"importance_sampling_level": "sequence"}
    tight = {"epsilon": 0.01, "epsilon_high": 0.03}
    rows_only = {"of": EITHER[:1]}
    return [
        loss("ppo_clip, defaults of both", policy("ppo_clip", **RECOMPUTED), {}),
        loss("ppo_clip, the policy as the old one", policy("ppo_clip"), {}, given=ON_POLICY),
        loss("ppo_clip seq-mean-token-mean", ppo, {"loss_type": "grpo", **CLIP}, way=ROW_MEANS),
        loss("ppo_clip token-mean", ppo, {"loss_type": "dapo", **CLIP}),
        loss("ppo_clip token-mean, one micro-batch", ppo, {"loss_type": "bnpo", **CLIP}),
        loss("ppo_clip, two micro-batches", ppo, {"loss_type": "dapo", **CLIP, **TWO}),
        loss(
            "ppo_clip, two micro-batches",
            ppo,
            {"loss_type": "bnpo", **CLIP, **TWO},
            reason="the mean is over all tokens of the optimizer step, in TRL (bnpo) of a"
            " micro-batch",
            option="none; they agree in one micro-batch",
        ),
        loss("ppo_clip seq-mean-token-sum-norm", ppo, {"loss_type": "dr_grpo", **CLIP}, way=NORM),
        loss("ppo_clip seq-mean-token-sum", ppo, {"loss_type": "luspo", **CLIP}, way=ROW_SUMS),
        loss(
            "luspo",
            policy("luspo", clip=(0.01, 0.03), **RECOMPUTED),
            {"loss_type": "luspo", **sequence, **tight},
            way=ROW_SUMS,
            **rows_only,
        ),
        loss(
            "gspo",
            policy("gspo", clip=(0.01, 0.03), **RECOMPUTED),
            {"loss_type": "grpo", **sequence, **tight},
            way=ROW_MEANS,
            **rows_only,
        ),
        loss(
            "gspo token-mean",
            policy("gspo", clip=(0.01, 0.03), **RECOMPUTED),
            {"loss_type": "dapo", **sequence, **tight},
            **rows_only,
        ),
    ]


ROUNDED = (0.9, 1.2)


def temperatures(tau: tuple[float, float]) -> dict[str, Any]:
    """The configuration of TRL's sapo, for positive advantages and for the others."""
    positive, negative = tau
    return {
        "loss_type": "sapo",
        "sapo_temperature_pos": positive,
        "sapo_temperature_neg": negative,
    }


def in_float32(tau: tuple[float, float]) -> tuple[float, float]:
    """The nearest numbers of float32."""
    positive, negative = torch.tensor(tau, dtype=torch.float32).tolist()
    return positive, negative


def weighted_types() -> list[Case]:
    """Losses that weigh a log-prob, and the trainer of GMPO."""
    rows_only = {"of": EITHER[:1]}
    sequence = {"importance_sampling_level": "sequence"}
    return [
        loss(
            "cispo",
            policy("cispo", ratio_max=1.4, **RECOMPUTED),
            {"loss_type": "cispo", "epsilon_high": 1.4},
        ),
        loss(
            "cispo, defaults",
            policy("cispo", **RECOMPUTED),
            {"loss_type": "cispo"},
            reason="a ratio may not exceed 5, in TRL, where epsilon_high is not given, 0.2",
            option="none; ratio_max below 1 is refused",
        ),
        loss(
            "sapo",
            policy("sapo", tau=STEEPNESS, **RECOMPUTED),
            temperatures(STEEPNESS),
            way=ROW_MEANS,
        ),
        loss(
            "cispo of responses",
            policy("cispo", ratio_max=1.4, level="sequence", **RECOMPUTED),
            {"loss_type": "cispo", "epsilon_high": 1.4, **sequence},
        ),
        loss(
            "sapo of responses",
            policy("sapo", tau=STEEPNESS, level="sequence", **RECOMPUTED),
            {**temperatures(STEEPNESS), **sequence},
            way=ROW_MEANS,
            **rows_only,
        ),
        loss(
            "sapo of responses, temperatures that float32 rounds",
            policy("sapo", tau=ROUNDED, level="sequence", **RECOMPUTED),
            {**temperatures(ROUNDED), **sequence},
            way=ROW_MEANS,
            reason="the temperatures are float64, in TRL float32",
            option=f"tau={in_float32(ROUNDED)}, what float32 makes of {ROUNDED}",
            reached=policy("sapo", tau=in_float32(ROUNDED), level="sequence", **RECOMPUTED),
            **rows_only,
        ),
        loss("vespo", policy("vespo", **RECOMPUTED), {"loss_type": "vespo"}),
        loss(
            "gmpo",
            policy("gmpo", **RECOMPUTED),
            {},
            trainer="GMPOTrainer",
            way=ROW_MEANS,
            batches=("ragged",),
            **rows_only,
        ),
        loss(
            "gmpo, a row without a token",
            policy("gmpo", **RECOMPUTED),
            {},
            trainer="GMPOTrainer",
            way=ROW_MEANS,
            batches=("edge",),
            reason="it has no loss, in TRL the constant -A",
            option="none; the gradient is the same",
            **rows_only,
        ),
    ]


TWO = {"gradient_accumulation_steps": 2}
ON_POLICY = {"old": "current"}


def terms() -> list[Case]:
    """What is added to a loss, or left out of it."""
    ppo = {"clip": (0.1, 0.3), **RECOMPUTED}
    with_kl = {**ppo, "kl_coef": 0.04, "kl": "k3"}
    plain = {"use_bias_correction_kl": False}
    return [
        loss(
            "ppo_clip, kl k3 times the ratio",
            policy("ppo_clip", **with_kl, kl_unbiased=True),
            {**CLIP, "beta": 0.04},
        ),
        loss(
            "ppo_clip, kl, defaults",
            policy("ppo_clip", **with_kl),
            {**CLIP, "beta": 0.04},
            reason="the estimate is k3, in TRL k3 times the ratio",
            option="kl_unbiased=True",
            reached=policy("ppo_clip", **with_kl, kl_unbiased=True),
        ),
        loss("ppo_clip, kl k3", policy("ppo_clip", **with_kl), {**CLIP, "beta": 0.04, **plain}),
        loss(
            "gspo, kl k3",
            policy("gspo", **with_kl),
            {
                **CLIP,
                **plain,
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "beta": 0.04,
            },
            way=ROW_MEANS,
            of=EITHER[:1],
        ),
        loss(
            "gspo, kl k3 times the ratio",
            policy("gspo", **with_kl, kl_unbiased=True),
            {
                **CLIP,
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "beta": 0.04,
            },
            way=ROW_MEANS,
            of=EITHER[:1],
            reason="the KL of a token is times the ratio of the token, in TRL of the response",
            option="none; with kl_unbiased=False and use_bias_correction_kl=False they agree",
        ),
        *left_out(ppo),
        *entropy(ppo),
    ]


def left_out(ppo: Mapping[str, Any]) -> list[Case]:
    """Bounds, and tokens that are left out of a loss."""
    return [
        loss(
            "ppo_clip, dual_clip", policy("ppo_clip", **ppo, dual_clip=1.5), {**CLIP, "delta": 1.5}
        ),
        loss(
            "ppo_clip, dual_clip below 1 + clip",
            policy("ppo_clip", **ppo, dual_clip=1.1),
            {**CLIP, "delta": 1.1},
            reason="the bound is for negative advantages, in TRL (delta) for both signs",
            option="clip=(0.1, 0.1), dual_clip=1.3: the upper bounds change places",
            reached=policy("ppo_clip", clip=(0.1, 0.1), **RECOMPUTED, dual_clip=1.3),
        ),
        loss(
            "ppo_clip, top_entropy",
            chosen_by_entropy(0.3, "ppo_clip", **ppo),
            {**CLIP, "top_entropy_quantile": 0.3},
            batches=("ragged", "edge"),
        ),
        loss(
            "ppo_clip, off_policy_limit",
            policy("ppo_clip", **ppo, off_policy_limit=0.02, off_policy_from="old"),
            {**CLIP, "off_policy_mask_threshold": 0.02},
        ),
    ]


def entropy(ppo: Mapping[str, Any]) -> list[Case]:
    """The entropy bonus; the entropy carries no gradient here, on either side."""
    bonus = policy("ppo_clip", **ppo, entropy_coef=0.1)
    return [
        loss("ppo_clip, entropy bonus", bonus, {**CLIP, "entropy_coef": 0.1}),
        loss(
            "ppo_clip seq-mean-token-mean, entropy bonus",
            bonus,
            {**CLIP, "loss_type": "grpo", "entropy_coef": 0.1},
            way=ROW_MEANS,
            reason="the entropy is averaged as the loss, in TRL over the tokens",
            option='none; aggregate="token-mean" averages both over tokens',
        ),
    ]


def limits() -> list[Case]:
    """Log-ratios beyond +-20, which TRL does not hold."""
    ppo = policy("ppo_clip", clip=(0.1, 0.3), **RECOMPUTED)
    far = {"batches": ("far",)}
    kl = policy("ppo_clip", clip=(0.1, 0.3), **RECOMPUTED, kl_coef=0.04)
    return [
        loss(
            "ppo_clip, log-ratios beyond 20",
            ppo,
            CLIP,
            **far,
            reason="the log-ratio is held within +-20, in TRL not",
            option="none; they agree within +-20",
        ),
        loss(
            "kl k3, log-ratios beyond 20",
            kl,
            {**CLIP, "beta": 0.04, "use_bias_correction_kl": False},
            **far,
            reason="k3 is held within +-10 and its exponent within +-20, in TRL not",
            option="none; they agree within",
        ),
        loss("vespo, log-ratios beyond 20", policy("vespo", **RECOMPUTED), VESPO, **far),
    ]


VESPO = {"loss_type": "vespo"}


def rloo_losses() -> list[Case]:
    """TRL's RLOO clips the ratio of a whole response; on-policy its gradient is REINFORCE's."""
    own = {"old": "recomputed", "clip": (0.1, 0.3)}
    sums = {"way": ROW_SUMS, "of": EITHER[:1], "trainer": "RLOOTrainer"}
    return [
        loss(
            "reinforce, the gradient on-policy",
            policy("reinforce"),
            {},
            given=ON_POLICY,
            **sums,
            only=("gradient",),
        ),
        loss(
            "sequence_clip, defaults of both",
            policy("sequence_clip", **RECOMPUTED),
            {},
            **sums,
            batches=("ragged",),
        ),
        loss("sequence_clip", policy("sequence_clip", **own), CLIP, **sums, batches=("ragged",)),
        loss(
            "sequence_clip, the gradient beside an empty row",
            policy("sequence_clip", **own),
            CLIP,
            **sums,
            batches=("edge",),
            only=("gradient",),
        ),
        loss(
            "sequence_clip, the value of an empty row",
            policy("sequence_clip", **own),
            CLIP,
            **sums,
            batches=("edge",),
            only=("loss",),
            reason="a response without a token has no loss, in TRL -A, which carries no gradient",
            option="none; gradients agree, and values without such rows",
        ),
    ]
