"""The cases beside verl 0.9.1 of rollout correction: weights, rejection, and losses with them."""

from __future__ import annotations

from typing import Any

import rlflow as rf
from numerics import ours
from numerics.compare import Case, Fields, Made, Ours, Variant
from numerics.ours import policy
from numerics.verl_losses import EITHER, RECOMPUTED, equal, ways, without

RESPONSES = {
    "training_ppl": "trained_perplexity",
    "rollout_ppl": "rollout_perplexity",
    "ppl_ratio": "perplexity_ratio",
    "log_ppl_abs_diff": "perplexity_gap",
    "chi2_seq": "chi2_response",
}
TOKENS = {"k3_kl": "rollout_k3", "chi2_token": "rollout_chi2"}
REJECT = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "2.0,0.25"}


def correction_cases() -> list[Case]:
    """Everything of rollout correction."""
    return [*mismatch(), *measures(), *corrected()]


def measures() -> list[Case]:
    """Diagnostics of tokens and of whole responses; verl divides by a length and 1e-8."""

    def case(name: str, names: dict[str, str], **changed: Any) -> Case:
        return Case(
            name=name,
            kind="diagnostics",
            function="compute_offpolicy_metrics",
            given={"measures": list(names)},
            ours=ours.diagnostics(names),
            tolerance=1e-7,
            **changed,
        )

    return [
        case("rollout_k3, rollout_chi2", TOKENS),
        case("measures of responses", RESPONSES, batches=("ragged",)),
        case(
            "measures of responses, one without a token",
            RESPONSES,
            batches=("edge",),
            reason="means are over responses that have a token, in verl one without has"
            " perplexity 1 and weight 1",
            option="none; they agree without such rows",
        ),
    ]


def mismatch() -> list[Case]:
    """Weights and rejection of rollout correction."""
    everywhere = ("ragged", "edge", "far")
    found = []
    for level in ("token", "sequence"):
        for normalize in (False, True):
            for threshold, cut in (
                (1.5, {"mode": "truncate", "cap": 1.5}),
                ("0.1_3.0", {"mode": "mask", "cap": 3.0, "floor": 0.1}),
            ):
                given = {"rollout_is": level, "rollout_is_threshold": threshold}
                found.append(
                    Case(
                        name=f"importance_weight {level} {cut['mode']}"
                        + (" normalized" if normalize else ""),
                        kind="weights",
                        function="compute_rollout_correction_weights",
                        given={**given, "rollout_is_batch_normalize": normalize},
                        batches=everywhere,
                        ours=ours.weights(level=level, normalize=normalize, **cut),
                    )
                )
    return [*found, *rejections(everywhere)]


def rejections(everywhere: tuple[str, ...]) -> list[Case]:
    """Every statistic over every span."""
    spans = {"token": "token", "seq_sum": "row-sum", "seq_mean": "row-mean", "seq_max": "row-max"}
    found = []
    for theirs, over in spans.items():
        for statistic in ("k1", "k2", "k3"):
            if (theirs, statistic) == ("seq_max", "k1"):
                continue
            high = 1.4 if statistic == "k1" else 0.15
            option = f"{theirs}_{statistic}"
            found.append(
                Case(
                    name=f"kept {over} {statistic}",
                    kind="rejection",
                    function="compute_rollout_rejection_mask",
                    given={"rollout_rs": option, "rollout_rs_threshold": str(high)},
                    batches=everywhere,
                    ours=ours.rejection(statistic=statistic, over=over, high=high),
                )
            )
    return [*found, _two_bounds(everywhere)]


def _two_bounds(everywhere: tuple[str, ...]) -> Case:
    return Case(
        name="kept row-mean k1, two bounds",
        kind="rejection",
        function="compute_rollout_rejection_mask",
        given={"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.1"},
        batches=everywhere,
        ours=ours.rejection(statistic="k1", over="row-mean", low=0.8, high=1.1),
        reason="bounds are on pi_prox / pi_behave, in verl on the inverse",
        option="low=1 / 1.1, high=1 / 0.8",
        reached=ours.rejection(statistic="k1", over="row-mean", low=1 / 1.1, high=1 / 0.8),
    )


def rules(count: str) -> tuple[rf.Rejection, ...]:
    """The rules of `REJECT`."""
    return (
        rf.Rejection("k1", high=2.0, count=count),
        rf.Rejection("k3", over="row-mean", high=0.25, count=count),
    )


def decoupled(**options: Any) -> Ours:
    """PPO against the policy before the update, corrected against the one that sampled."""
    return policy("ppo_clip", **options, **RECOMPUTED)


def corrected() -> list[Case]:
    """Losses with rollout correction: decoupled, and bypassed."""
    by_rows = ways(("token-mean", "seq-mean-token-mean"))
    truncated = rf.ImportanceSampling(cap=1.5)
    whole = rf.ImportanceSampling(level="sequence", cap=1.5)
    normal = rf.ImportanceSampling(level="sequence", cap=1.5, normalize=True)
    dual = {"clip_ratio_c": 1e9}
    weigh = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    by_sequence = {
        "rollout_is": "sequence",
        "rollout_is_threshold": 1.5,
        "rollout_is_batch_normalize": True,
    }
    return [
        equal(
            "ppo_clip, correction by tokens",
            "vanilla",
            decoupled(correction=truncated),
            dual,
            given={"correction": weigh},
            variants=by_rows,
        ),
        equal(
            "ppo_clip, correction by responses, normalized",
            "vanilla",
            decoupled(correction=normal),
            dual,
            given={"correction": by_sequence},
            variants=by_rows,
        ),
        equal(
            "gmpo, correction by tokens",
            "geo_mean",
            without("aggregate", policy("gmpo", clip=0.2, correction=truncated, **RECOMPUTED)),
            given={"correction": weigh},
            variants=ways(("seq-mean-token-mean",), EITHER[:1]),
            reason="each token has its own weight, in verl a row the geometric mean of its weights",
            option="none; corrections by responses agree",
        ),
        equal(
            "gmpo, correction by responses",
            "geo_mean",
            without("aggregate", policy("gmpo", clip=0.2, correction=whole, **RECOMPUTED)),
            given={"correction": {"rollout_is": "sequence", "rollout_is_threshold": 1.5}},
            variants=ways(("seq-mean-token-mean",), EITHER[:1]),
            tolerance=1e-7,
        ),
        equal(
            "ppo_clip, rejection",
            "vanilla",
            decoupled(rejection=rules("all")),
            dual,
            given={"correction": {"rollout_is": None, **REJECT}, "count_kept": True},
            variants=by_rows[:2],
            reason="rejected tokens still count in the average, in verl's decoupled mode not",
            option='count="kept"',
            reached=decoupled(rejection=rules("kept")),
        ),
        *bypassed(by_rows),
    ]


def bypassed(by_rows: tuple[Variant, ...]) -> list[Case]:
    """The bypass mode of verl: the old policy is the one that sampled."""

    def bypass(loss: str, **more: Any) -> dict[str, Any]:
        correction = {"loss_type": loss, "rollout_is": None, **REJECT, **more}
        return {"policy_loss": {"rollout_correction": correction}, "old": "rollout_log_probs"}

    rejection = rules("all")
    weights = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    truncated = rf.ImportanceSampling(cap=1.5)
    ppo = policy("ppo_clip", old="rollout", rejection=rejection)
    return [
        equal(
            "ppo_clip old=rollout, rejection",
            "bypass_mode",
            ppo,
            {"clip_ratio_c": 1e9},
            given=bypass("ppo_clip"),
            variants=by_rows[:2],
        ),
        equal(
            "ppo_clip old=rollout, rejection, means of rows",
            "bypass_mode",
            ppo,
            {"clip_ratio_c": 1e9},
            given=bypass("ppo_clip"),
            variants=by_rows[2:],
            reason="a row's mean is over all its tokens, in verl's bypass mode over those kept,"
            " while its other normalisers count all",
            option='none; count="kept" is a mean over kept tokens and rows alike',
        ),
        equal(
            "reinforce, correction and rejection",
            "bypass_mode",
            _on_policy(policy("reinforce", correction=truncated, rejection=rejection)),
            given=bypass("reinforce", **weights),
            variants=by_rows[:2],
        ),
    ]


def _on_policy(ours: Ours) -> Ours:
    """Ours where the proximal policy is the current one: no old log-probs were computed."""

    def made(fields: Fields, variant: Variant) -> Made:
        return ours({k: v for k, v in fields.items() if k != "old_log_probs"}, variant)

    return made
