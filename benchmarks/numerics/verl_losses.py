"""The cases beside verl 0.9.1's policy losses: at equal options, and at the defaults of both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from numerics.compare import Case, Fields, Made, Ours, Variant
from numerics.ours import MODES, averaged, policy

RECOMPUTED = {"old": "recomputed"}
EITHER = ("row_advantages", "token_advantages")
LOW_HIGH = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
EVERYWHERE = ("ragged", "edge", "far")


def ways(modes: tuple[str, ...] = MODES, of: tuple[str, ...] = EITHER) -> tuple[Variant, ...]:
    """Every average of advantages of rows and of tokens."""
    return tuple({**averaged(mode), "advantages": which} for mode in modes for which in of)


def equal(
    name: str,
    function: str,
    ours: Ours,
    config: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Case:
    """A loss with the same options on both sides."""
    given = {"config": dict(config or {}), **changed.pop("given", {})}
    variants = changed.pop("variants", ways())
    return Case(
        name=name,
        kind="policy",
        function=function,
        ours=ours,
        given=given,
        variants=variants,
        **changed,
    )


def at_equal_options() -> list[Case]:
    """Losses whose formula is the same."""
    clip, no_dual = {"clip": (0.1, 0.3)}, {"clip_ratio_c": 1e9}
    return [
        equal(
            "ppo_clip",
            "vanilla",
            policy("ppo_clip", **clip, **RECOMPUTED),
            {**LOW_HIGH, **no_dual},
            batches=EVERYWHERE,
        ),
        equal(
            "ppo_clip, dual_clip",
            "vanilla",
            policy("ppo_clip", **clip, dual_clip=1.5, **RECOMPUTED),
            {**LOW_HIGH, "clip_ratio_c": 1.5},
            batches=EVERYWHERE,
        ),
        equal(
            "gspo",
            "gspo",
            policy("gspo", clip=(0.01, 0.03), **RECOMPUTED),
            {"clip_ratio_low": 0.01, "clip_ratio_high": 0.03},
            variants=ways(of=EITHER[:1]),
        ),
        equal(
            "gspo_token",
            "gspo",
            policy("gspo_token", clip=(0.01, 0.03), **RECOMPUTED),
            {"clip_ratio_low": 0.01, "clip_ratio_high": 0.03},
        ),
    ]


def at_equal_weights() -> list[Case]:
    """Losses that weigh a log-prob, or bend the ratio, instead of clipping it."""
    clip, means = {"clip": (0.1, 0.3)}, ways(("seq-mean-token-mean",))
    return [
        equal(
            "cispo",
            "cispo",
            policy("cispo", ratio_max=1.3, ratio_min=0.9, **RECOMPUTED),
            LOW_HIGH,
            batches=EVERYWHERE,
        ),
        equal(
            "gmpo",
            "geo_mean",
            without("aggregate", policy("gmpo", **clip, **RECOMPUTED)),
            LOW_HIGH,
            variants=means,
            tolerance=1e-7,
        ),
        equal(
            "sapo",
            "sapo",
            policy("sapo", tau=(0.9, 1.2), **RECOMPUTED),
            {"tau_pos": 0.9, "tau_neg": 1.2},
            variants=means,
            batches=EVERYWHERE,
        ),
        equal("gpg", "gpg", policy("gpg"), batches=EVERYWHERE),
        equal(
            "dppo_tv",
            "dppo_tv",
            policy("dppo_tv", divergence=(0.1, 0.05), ratio_max=1.5, **RECOMPUTED),
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5},
            batches=EVERYWHERE,
        ),
        equal(
            "dppo_kl",
            "dppo_kl",
            policy("dppo_kl", divergence=(0.01, 0.005), ratio_max=1.5, **RECOMPUTED),
            {"clip_ratio_low": 0.01, "clip_ratio_high": 0.005, "clip_ratio_c": 1.5},
            batches=EVERYWHERE,
        ),
        equal(
            "dro",
            "dro",
            policy("dro", beta=0.3, **RECOMPUTED),
            given={"policy_loss": {"dro_beta": 0.3}},
            batches=EVERYWHERE,
        ),
        *by_covariance(),
    ]


def by_covariance() -> list[Case]:
    """Clip-Cov, whose random choice is given the same permutation, and KL-Cov."""
    clip_cov = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.2, "clip_cov_ub": 2.0}
    return [
        equal(
            "clip_cov, one batch a step",
            "clip_cov",
            policy("clip_cov", clip=(0.1, 0.3), cov_share=0.1, cov_range=(0.2, 2.0), **RECOMPUTED),
            LOW_HIGH,
            given={"policy_loss": clip_cov},
        ),
        equal(
            "kl_cov, one batch a step",
            "kl_cov",
            policy("kl_cov", cov_share=0.1, cov_coef=0.7, **RECOMPUTED),
            given={"policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}},
        ),
    ]


def in_micro_batches() -> list[Case]:
    """All rows at once beside the sum over two micro-batches in verl."""
    clip = policy("ppo_clip", clip=(0.1, 0.3), **RECOMPUTED)
    kl_cov = policy("kl_cov", cov_share=0.1, cov_coef=0.7, **RECOMPUTED)
    cut = {"micro": 2}
    return [
        equal(
            "ppo_clip, two micro-batches",
            "vanilla",
            clip,
            {**LOW_HIGH, "clip_ratio_c": 1e9},
            given=cut,
        ),
        equal(
            "kl_cov, two micro-batches",
            "kl_cov",
            kl_cov,
            given={**cut, "policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}},
            reason="tokens are chosen among all of the optimizer step, in verl of a micro-batch",
            option="none; they agree in one micro-batch",
        ),
    ]


def at_the_limits() -> list[Case]:
    """Log-ratios beyond +-20, where sides hold a ratio at different places."""
    by_rows = ways(of=EITHER[:1])
    return [
        equal(
            "gspo, log-ratios beyond 10",
            "gspo",
            policy("gspo", clip=(0.01, math.inf), **RECOMPUTED),
            {"clip_ratio_low": 0.01, "clip_ratio_high": 1e9},
            variants=by_rows,
            batches=("very far",),
            reason="log s is held within +-20, in verl below 10",
            option="none; they agree below 10",
        ),
        equal(
            "kl_cov, log-ratios beyond 20",
            "kl_cov",
            policy("kl_cov", cov_share=0.1, cov_coef=0.7, **RECOMPUTED),
            given={"policy_loss": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.7}},
            batches=("far",),
            reason="the log-ratio is held within +-20, in verl only where it clips as PPO does",
            option="none; they agree within +-20",
        ),
    ]


def default(
    name: str, function: str, reason: str, option: str, reached: Ours, **changed: Any
) -> Case:
    """A loss of which only the name is given, on either side."""
    ours = policy(name, **RECOMPUTED)
    return equal(
        f"{name}, defaults",
        function,
        changed.pop("ours", ours),
        variants=changed.pop("variants", ways(("token-mean",), EITHER[:1])),
        reason=reason,
        option=option,
        reached=reached,
        **changed,
    )


def at_defaults() -> list[Case]:
    """Each side as it is when only the name of the loss is given."""
    return [
        default(
            "ppo_clip",
            "vanilla",
            "no dual clip, in verl always, at 3",
            "dual_clip=3.0",
            policy("ppo_clip", dual_clip=3.0, **RECOMPUTED),
            batches=("edge", "far"),
        ),
        default(
            "gspo",
            "gspo",
            "clip is the paper's (3e-4, 4e-4), in verl 0.2; averaged by seq-mean-token-mean,"
            " in verl by token-mean",
            'clip=0.2, aggregate="token-mean"',
            policy("gspo", clip=0.2, **RECOMPUTED),
            ours=without("aggregate", policy("gspo", **RECOMPUTED)),
        ),
        default(
            "cispo",
            "cispo",
            "a ratio may not exceed 5, in verl it stays within 0.8 and 1.2",
            "ratio_min=0.8, ratio_max=1.2",
            policy("cispo", ratio_min=0.8, ratio_max=1.2, **RECOMPUTED),
        ),
        default(
            "gmpo",
            "geo_mean",
            "clip is the paper's (0.4, 0.4), in verl 0.2",
            "clip=0.2",
            policy("gmpo", clip=0.2, **RECOMPUTED),
            variants=ways(("seq-mean-token-mean",), EITHER[:1]),
            tolerance=1e-7,
        ),
        default(
            "dppo_tv",
            "dppo_tv",
            "divergence is 0.15 and ratio_max 20, as in the paper, in verl 0.2 and 3",
            "divergence=0.2, ratio_max=3.0",
            policy("dppo_tv", divergence=0.2, ratio_max=3.0, **RECOMPUTED),
            batches=("edge", "far"),
        ),
        default(
            "dppo_kl",
            "dppo_kl",
            "divergence is 0.05 and ratio_max 20, as in the paper, in verl 0.2 and 3",
            "divergence=0.2, ratio_max=3.0",
            policy("dppo_kl", divergence=0.2, ratio_max=3.0, **RECOMPUTED),
            batches=("edge", "far"),
        ),
        default(
            "kl_cov",
            "kl_cov",
            "cov_coef is 1, as verl documents, in its configuration 0.1",
            "cov_coef=0.1",
            policy("kl_cov", cov_coef=0.1, **RECOMPUTED),
        ),
    ]


def without(option: str, ours: Ours) -> Ours:
    """Ours with its own default of an option that the variant has."""

    def made(fields: Fields, variant: Variant) -> Made:
        return ours(fields, {name: value for name, value in variant.items() if name != option})

    return made


def loss_cases() -> list[Case]:
    """Every policy loss beside verl's."""
    return [
        *at_equal_options(),
        *at_equal_weights(),
        *in_micro_batches(),
        *at_the_limits(),
        *at_defaults(),
    ]
